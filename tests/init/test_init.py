# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform init`: what it writes, what it leaves alone, and what it prints."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvconform.cli import main
from kvconform.contract import yaml12
from kvconform.errors import UsageError
from kvconform.init import write
from kvconform.init.find import find
from kvconform.init.origin import Origin
from program_rig import FAKE, kvconform, python

CONNECTOR = """from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
class Acme(KVConnectorBase_V1):
    def __init__(self, config, role):
        self.path = config.kv_transfer_config.get_from_extra_config("kv-dir", None)
        self.port = config.kv_transfer_config.get_from_extra_config("port", 1)
"""
SHA = "0123456789012345678901234567890123456789"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "acme.py").write_text(CONNECTOR, encoding="utf-8")
    return tmp_path


def init(
    here: Path, *arguments: str, runner: str = "fake_runner:judge", command: str = "init"
) -> subprocess.CompletedProcess[str]:
    env = FAKE | {"KVCONFORM_RUNNER": runner} if runner else {"PYTHONPATH": FAKE["PYTHONPATH"]}
    return kvconform(command, *arguments, cwd=here, env=env, timeout=400)


def written(repository: Path, name: str) -> str:
    return (repository / name).read_text(encoding="utf-8")


def test_everything_is_written_and_judged(repository: Path) -> None:
    done = init(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "found   acme:Acme, acme.py:2",
        "wrote   kvconform.toml",
        "wrote   .github/workflows/kvconform.yml",
        "CONFORMANT",
    ):
        assert line in done.stdout
    settings = tomllib.loads(written(repository, "kvconform.toml"))
    assert settings == {
        "connector": "acme:Acme",
        "pythonpath": ["."],
        "extra_config": {"kv-dir": "{tmp}/kv-dir"},
    }
    assert "# port = 1" in written(repository, "kvconform.toml")
    assert (repository / "kvconform-report" / "summary.json").is_file()


def test_a_connector_that_hands_over_is_told_the_capability_and_the_profile(
    repository: Path,
) -> None:
    plain = init(repository, "--no-run")
    assert "transfer" not in plain.stdout and "transfer" not in written(
        repository, "kvconform.toml"
    )
    (repository / "kvconform.toml").unlink()
    reads = '    def plan(self, params):\n        return params.get("do_remote_prefill")\n'
    (repository / "acme.py").write_text(CONNECTOR + reads, encoding="utf-8")
    done = init(repository, "--no-run")
    assert "declare capability transfer, and judge that with --profile transfer" in done.stdout
    text = written(repository, "kvconform.toml")
    declared = text[text.index("# [capabilities]") :].replace("# ", "", 1)
    for name in ("transfer", "roles"):
        declared = declared.replace(f"# {name}", name)
    assert tomllib.loads(declared) == {
        "capabilities": {"transfer": True, "roles": ["kv_producer", "kv_consumer"]}
    }


def test_what_is_there_is_kept(repository: Path) -> None:
    (repository / "kvconform.toml").write_text(
        'connector = "acme:Acme"\nseed = 3\n', encoding="utf-8"
    )
    (repository / "tests").mkdir()
    (repository / "tests" / "test_conformance.py").write_text("# mine\n", encoding="utf-8")
    done = init(repository, "--no-run")
    assert done.returncode == 0 and "found" not in done.stdout
    assert (
        "kept    kvconform.toml" in done.stdout
        and "kept    tests/test_conformance.py" in done.stdout
    )
    assert (
        "seed = 3" in written(repository, "kvconform.toml")
        and written(repository, "tests/test_conformance.py") == "# mine\n"
    )


def test_nothing_of_a_new_template_is_called_kept(tmp_path: Path) -> None:
    """Its settings come with it, a moment ago."""
    done = init(tmp_path, "--template", "new", "--no-run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new" / "kvconform.toml").is_file()
    assert "new     " in done.stdout and "wrote   " in done.stdout
    assert "kept" not in done.stdout


def test_settings_in_pyproject_are_enough(repository: Path) -> None:
    (repository / "pyproject.toml").write_text(
        '[tool.kvconform]\nconnector = "json:Fake"\n', encoding="utf-8"
    )
    done = init(repository)
    assert done.returncode == 0, done.stderr
    assert not (repository / "kvconform.toml").exists() and "json:Fake" in done.stdout


def test_a_failing_connector_fails_it(repository: Path) -> None:
    text = 'connector = "json:Fake"\n[extra_config]\nfail = {"hook.no-raise" = ["lifecycle.api"]}\n'
    (repository / "kvconform.toml").write_text(text, encoding="utf-8")
    done = init(repository)
    assert done.returncode == 1 and "NOT CONFORMANT" in done.stdout


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["no-such-folder"], "there is no folder"),
        (["--template", "new", "here"], "--template cannot be combined with"),
        (["--template", "."], "exists: --template makes a new folder"),
        (["empty"], "derives from KVConnectorBase_V1: name it"),
        (["other", "--connector", "a:B"], "kvconform.toml names json:Fake: change it there"),
        (["broken"], "is not valid TOML"),
        (["blocked"], "blocked/.github is not a directory"),
        (["--template", "blocked/.github/new"], "blocked/.github is not a directory"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(
    repository: Path,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in (("other", 'connector = "json:Fake"'), ("broken", "connector =")):
        (repository / name).mkdir()
        (repository / name / "kvconform.toml").write_text(text, encoding="utf-8")
    (repository / "empty").mkdir()
    (repository / "blocked").mkdir()
    (repository / "blocked" / "kvconform.toml").write_text('connector = "json:Fake"')
    (repository / "blocked" / ".github").write_text("")
    monkeypatch.chdir(repository)
    with pytest.raises(SystemExit) as done:
        main(["init", *arguments])
    said = capsys.readouterr().err
    assert done.value.code == 2 and sentence in said and said.count("\n") == 1


def test_nothing_is_written_for_a_connector_that_does_not_exist(repository: Path) -> None:
    done = init(repository, "--connector", "acme:Acne")
    assert done.returncode == 2 and "did you mean Acme?" in done.stderr
    assert [each.name for each in repository.iterdir()] == ["acme.py"]


def test_the_written_test_runs_the_connector(repository: Path) -> None:
    (repository / "kvconform.toml").write_text('connector = "json:Fake"\n', encoding="utf-8")
    init(repository, "--no-run")
    text = written(repository, "kvconform.toml")
    for bad, code in (
        ("", 0),
        ('[extra_config]\nfail = {"hook.no-raise" = ["lifecycle.api"]}\n', 1),
    ):
        (repository / "kvconform.toml").write_text(text + bad, encoding="utf-8")
        env = FAKE | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = python(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=repository, env=env
        )
        assert done.returncode == code, done.stdout
        assert "1 passed" in done.stdout or "NOT CONFORMANT" in done.stdout


def jobs(text: str) -> list[dict[str, Any]]:
    found: Any = yaml12.parse(text, "workflow")
    return list(found["jobs"]["kvconform"]["steps"])


def test_github_is_pinned_to_this_one(repository: Path) -> None:
    name, text = write.workflow(repository, Origin("https://github.com/acme/kvconform.git", SHA))
    assert name == ".github/workflows/kvconform.yml" and jobs(text)[-1] == {
        "uses": f"acme/kvconform@{SHA}"
    }
    steps = jobs(write.workflow(repository, Origin("https://git.example.org/k.git", SHA))[1])
    assert steps[1]["env"] == {"URL": "https://git.example.org/k.git", "COMMIT": SHA}
    assert (
        steps[1]["run"]
        == 'git clone --quiet -- "$URL" .kvconform && git -C .kvconform checkout --quiet "$COMMIT"'
    )
    assert steps[2] == {"uses": "./.kvconform"}
    assert jobs(write.workflow(repository, Origin())[1])[-1] == {"uses": "OWNER/kvconform@COMMIT"}


@pytest.mark.parametrize(
    "url",
    [
        "https://h/a: b.git",
        "https://h/x.git #y",
        "https://h/x.git && touch pwned",
        "https://h\\d/x.git",
    ],
)
def test_a_url_is_quoted_in_yaml_and_for_the_shell(repository: Path, url: str) -> None:
    step = jobs(write.workflow(repository, Origin(url, "1e5"))[1])[1]
    assert step["env"] == {"URL": url, "COMMIT": "1e5"} and url not in step["run"]
    (repository / ".gitlab-ci.yml").write_text("", encoding="utf-8")
    found: Any = yaml12.parse(write.workflow(repository, Origin(url, "1e5"))[1], "gitlab")
    assert found["variables"] == {"KVCONFORM": url, "KVCONFORM_COMMIT": "1e5"}


@pytest.mark.parametrize("name", ["kvconform.toml", "pyproject.toml"])
@pytest.mark.parametrize("arguments", [[], ["--connector", "acme:Acme"]])
def test_settings_without_a_connector_do_not_judge_another(
    repository: Path, name: str, arguments: list[str]
) -> None:
    """They are kept as they are, and what they leave out is the reference connector."""
    table = "" if name == "kvconform.toml" else "[tool.kvconform]\n"
    (repository / name).write_text(f"{table}seed = 3\n", encoding="utf-8")
    done = init(repository, *arguments)
    assert (
        done.returncode == 2
        and f'{name} has settings and names no connector: write connector = "acme:Acme" there'
        in done.stderr
    )
    assert "CONFORMANT" not in done.stdout and not (repository / ".github").exists()


def test_the_file_that_counts_is_the_one_that_a_run_goes_by(repository: Path) -> None:
    (repository / "kvconform.toml").write_text("seed = 3\n", encoding="utf-8")
    (repository / "pyproject.toml").write_text(
        '[tool.kvconform]\nconnector = "acme:Acme"\n', encoding="utf-8"
    )
    assert (
        "kvconform.toml has settings and names no connector" in init(repository, "--no-run").stderr
    )


def test_settings_are_toml_whatever_the_source_says(tmp_path: Path) -> None:
    defaults = {
        "mark": '\U0001f600\x7f\n"\\',
        "limit": float("inf"),
        "none": None,
        "half": "\ud83d",
        "raw": b"1",
        "many": 10**30,
        "é": True,
    }
    folder = tmp_path / "\U0001f4e6"
    folder.mkdir()
    calls = "".join(
        f"        config.get_from_extra_config({name!r}, {value!r})\n"
        for name, value in defaults.items()
    )
    body = CONNECTOR.replace("self.port", "self.a").partition("        self.path")[
        0
    ] + calls.replace("inf)", "1e999)")
    (folder / "c.py").write_text(body, encoding="utf-8")
    found = find(tmp_path)
    text = write.settings(tmp_path, found.connector, found)
    assert tomllib.loads(text)["pythonpath"] == ["\U0001f4e6"]
    on = tomllib.loads(text.partition("# What it sets out")[0].replace("\n# ", "\n"))[
        "extra_config"
    ]
    assert on == {**defaults, "none": "", "half": "", "raw": ""}


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes only text")
    (folder / "acme.py").write_text(CONNECTOR, encoding="utf-8")
    found = find(tmp_path)
    with pytest.raises(UsageError, match="is no UTF-8"):
        write.settings(tmp_path, found.connector, found)


def test_gitlab_gets_its_own(repository: Path) -> None:
    (repository / ".gitlab-ci.yml").write_text("", encoding="utf-8")
    name, text = write.workflow(repository, Origin("https://git.example.org/k.git", SHA))
    found: Any = yaml12.parse(text, name)
    assert name == "kvconform.gitlab-ci.yml"
    assert found["variables"] == {
        "KVCONFORM": "https://git.example.org/k.git",
        "KVCONFORM_COMMIT": SHA,
    }
    plain: Any = yaml12.parse(write.workflow(repository, Origin())[1], name)
    assert (
        plain["variables"]["KVCONFORM"].startswith("https://")
        and plain["variables"]["KVCONFORM_COMMIT"]
    )


@pytest.mark.e2e
@pytest.mark.long
def test_the_template_passes_and_a_fault_in_it_is_found(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    done = init(tmp_path, "--template", "new", runner="")
    assert done.returncode == 0 and "CONFORMANT with profile smoke  in" in done.stdout, (
        done.stdout[-2000:] + done.stderr
    )
    file = tmp_path / "new" / "folder_connector" / "connector.py"
    text = file.read_text(encoding="utf-8")
    right = "tracked, computed - self._granted.pop(req_id, 0), "
    assert right in text
    text = text.replace(right, "tracked, 0, ")  # writes over blocks that are shared
    assert "self._failed.add(load.block)" in text
    # a load that fails is not reported
    file.write_text(text.replace("self._failed.add(load.block)", "pass"), encoding="utf-8")
    chosen = [
        "-k",
        "lifecycle.last-token,lifecycle.fail-recompute",
        "--engine",
        "reference",
        "--workers",
        "1",
    ]
    again = init(tmp_path / "new", *chosen, runner="", command="run")
    assert again.returncode == 1, again.stdout[-2000:]
    (failed,) = [line for line in again.stdout.splitlines() if line.startswith("  FAIL:")]
    assert {"load.only-grant", "load.complete-or-failed"} <= set(
        failed.removeprefix("  FAIL:").replace(",", " ").split()
    )


def test_workers_are_those_of_the_first_check(repository: Path) -> None:
    done = init(repository, "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((repository / "kvconform-report" / "logs").glob("gw*.log"))) == 1
    refused = init(repository, "--workers", "0")
    assert refused.returncode == 2 and "workers" in refused.stderr
