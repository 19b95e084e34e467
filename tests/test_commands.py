# SPDX-License-Identifier: Apache-2.0
"""Tests of the commands that run nothing, and of the program's error messages."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from kvconform import cli, commands
from kvconform.config import settings
from kvconform.contract.loader import load_spec
from kvconform.snapshots import command as snapshots


def kvconform(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)"""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    assert "Traceback" not in captured.err
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize("what", ["requirements", "cases", "profiles"])
def test_list(capsys: pytest.CaptureFixture[str], what: str) -> None:
    code, out, _ = kvconform(capsys, "list", what)
    ids = [line.split("\t")[0] for line in out.splitlines()]
    assert code == 0
    spec = load_spec()
    assert sorted(ids) == sorted(
        [*getattr(spec, what), *(spec.scenarios if what == "cases" else ())]
    )


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvconform(capsys, "explain", "hook.terminates")
    assert code == 0
    assert "A hook MUST return." in out


def test_a_report_directory_of_defects_is_checked_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "matrix")
    code, _, err = kvconform(capsys, "defects", "--report-dir", folder, "appends-on-resume")
    assert code == 2 and "file is not a directory; name another folder" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvconform(capsys, "version")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["kvconform", "vllm", "python", "pytest", "pytest-xdist", "pydantic"]


def test_lint_of_broken_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "x.yaml").write_text("- id: a\n  id: b\n")
    code, out, _ = kvconform(capsys, "lint", str(tmp_path))
    assert code == 1
    assert out.startswith("spec/requirements/x.yaml:2: L001 ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("explain", "hook.terminate"),
            (
                "there is no requirement, case, defect, rule or bug 'hook.terminate'; "
                "did you mean hook.terminates"
            ),
        ),
        (("list", "bugs"), "kvconform: list what? 'bugs' is none of requirements, cases, profiles"),
        (("lint", "/no/such/directory"), "kvconform: there is no directory /no/such/directory"),
        (("lint", "/dev"), "kvconform: /dev has neither cases/ nor requirements/"),
        (("lint", __file__), f"kvconform: {__file__} is a file: lint checks a directory"),
        (
            ("run", "--engine", "fast"),
            ("kvconform: --engine: must be 'reference', 'vllm', 'live' or 'all' (it is"),
        ),
        (
            ("run", "-n", "0"),
            ("kvconform: --workers: must be greater than or equal to 1 (it is 0)"),
        ),
        (
            ("run", "--extra-config", "@nowhere.json"),
            "kvconform: --extra-config: nowhere.json cannot be read: No such file or directory",
        ),
        (
            ("run", "mypkg.conn"),
            "if mypkg.conn is the module, add its class: mypkg.conn:MyConnector",
        ),
        (("run", "mypkg.conn.MyConnector"), "did you mean mypkg.conn:MyConnector?"),
        (("run", "not a name"), "kvconform: 'not a name' does not name a connector"),
        (
            ("run", "-k", "hook.terminatos"),
            (
                "kvconform: there is no case or requirement 'hook.terminatos'; "
                "did you mean hook.terminates"
            ),
        ),
        (
            ("run", "-k", "identiti"),
            "kvconform: there is no area, case or requirement 'identiti'; did you mean identity?",
        ),
        (
            ("run", "-k", "qqqq"),
            "kvconform: there is no area, case or requirement 'qqqq'; the areas are ",
        ),
        (("run", "-k", ""), "kvconform: invalid value: -k names nothing"),
        (("run", ""), "kvconform: an argument is empty; is a variable unset?"),
        (("run", "--config", ""), "kvconform: --config has no value; is a variable unset?"),
        (("run", "--report-dir="), "kvconform: --report-dir has no value; is a variable unset?"),
        (("run", "-k", " , "), "kvconform: invalid value: -k names nothing"),
        (
            ("run", "--profile", "smok"),
            "kvconform: there is no profile 'smok'; did you mean smoke?",
        ),
        (("run", "--config", "none.toml"), "kvconform: there is no settings file none.toml"),
        (
            ("run", "--config", "."),
            "kvconform: . is a directory; name the settings file in it",
        ),
        (("run", "a:B", "--connector", "c:D"), "kvconform: invalid value: name the connector once"),
        (("run", "--no-such-option"), "kvconform: no such option: --no-such-option"),
        (("no-such-command",), "kvconform: no such command 'no-such-command'; kvconform -h shows"),
        (("run", "--seed", "x"), "kvconform: invalid value for '--seed': "),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = kvconform(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err


def test_a_bug_of_our_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr(commands, "versions", broken)
    code, _, err = kvconform(capsys, "version")
    assert (code, err) == (
        3,
        "kvconform: internal error, RuntimeError: one (--debug shows where)\n",
    )
    with pytest.raises(RuntimeError, match="one"):
        kvconform(capsys, "version", "--debug")


def test_a_command_with_an_option_debug_gets_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[object] = []

    def session(given: dict[str, object], **_: object) -> int:
        got.append(given["debug"])
        return 0

    monkeypatch.setattr(snapshots, "_session", session)
    for words in ("check", "check --debug", "--debug check"):
        assert kvconform(capsys, "snapshot", *words.split())[0] == 0
    assert got == [None, True, True]


def test_a_full_disk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.jsonl")

    monkeypatch.setattr(commands, "versions", full)
    code, _, err = kvconform(capsys, "version")
    assert (code, err) == (
        3,
        "kvconform: cannot write to report.jsonl: No space left on device\n",
    )


def test_a_directory_that_is_gone_and_streams_that_the_shell_has_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, err = kvconform(capsys, "run")
    assert (code, err) == (3, "kvconform: the current directory does not exist any more\n")
    monkeypatch.setattr("sys.stdout", None)
    code, _, err = kvconform(capsys, "version")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("name", ["vllm", "numpy"])
def test_a_command_that_needs_vllm_says_so_where_it_is_missing(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.compat import installed

    def missing() -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(commands, "versions", missing)
    monkeypatch.setattr(installed, "vllm_version", lambda: None)
    code, _, err = kvconform(capsys, "version")
    assert code == 3 and err.startswith(
        "kvconform: vLLM is not installed in this environment; install it"
    )
    assert "internal error" not in err
    monkeypatch.setattr(installed, "vllm_version", lambda: "0.32.0")
    code, _, err = kvconform(capsys, "version")
    assert (code, "internal error" in err) == (3, name != "vllm")


def test_no_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvconform.compat import installed

    monkeypatch.chdir(tmp_path)
    for version, sentence in (
        (None, "vLLM is not installed"),
        ("0.11.0", "vLLM 0.11.0 is too old: kvconform supports 0.11.2 to 0.33"),
    ):
        monkeypatch.setattr(installed, "vllm_version", lambda found=version: found)
        for command in (["run"], ["watch", "--once"]):
            code, _, err = kvconform(capsys, *command)
            assert code == 3
            assert err.startswith(f"kvconform: {sentence}")


def test_every_option_is_a_setting() -> None:
    import inspect

    from kvconform.config.settings import Settings

    own = {"connector", "option_connector", "config", "no_server"}
    assert set(inspect.signature(cli.run).parameters) - own <= set(Settings.model_fields)


def test_a_report_repeats_each_option_that_can_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the run, which the report names, the command shows the same failure again."""
    import inspect

    loaded: dict[str, Any] = {}
    monkeypatch.setattr(settings, "load", lambda given, *, file: loaded.update(given))
    parameters = inspect.signature(cli.run, eval_str=True).parameters
    texts = {name: f"the-{name}" for name in parameters}
    lists = {name: [texts[name]] for name in ("adapters", "cases", "pythonpath", "select")}
    values: dict[str, Any] = texts | lists | {"extra_config": "{}", "option_connector": None}
    values |= {"strict": True, "emulate_cuda": True, "hook_timeout": 2.5}
    cli._settings(**{name: value for name, value in values.items() if name != "no_server"})
    named = {"connector", "option_connector", "engine", "scheduling", "slow"}
    named |= {"select", "trace", "seed", "seeds"}
    how_told = {"report_dir", "workers", "verbose", "full", "debug", "no_server", "shard", "shrink"}
    repeated = {name for name, value in texts.items() if value in loaded["arguments"]}
    repeated |= {"extra_config", "strict", "emulate_cuda", "hook_timeout"}
    assert repeated == {*parameters} - named - how_told
    for word in ("{}", "--strict", "--emulate-cuda", "2.5"):
        assert word in loaded["arguments"]
