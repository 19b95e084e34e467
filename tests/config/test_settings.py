# SPDX-License-Identifier: Apache-2.0
"""Tests of settings: precedence, locations, and one sentence for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.settings import REFERENCE, load, parse_extra_config
from kvconform.errors import EnvironmentProblem, UsageError


def write(folder: Path, text: str, name: str = "kvconform.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_defaults_judge_the_reference_connector(tmp_path: Path) -> None:
    found = load({}, start=tmp_path)
    assert (found.connector, found.extra_config, found.file) == (
        REFERENCE,
        {"store": "{tmp}"},
        None,
    )
    assert (found.engines, found.schedulings) == (["reference", "vllm"], ["sync", "async"])


@pytest.mark.parametrize(
    ("name", "each"), [("engine", "reference, vllm"), ("scheduling", "async,sync")]
)
def test_a_list_of_all_is_all(name: str, each: str, tmp_path: Path) -> None:
    found = load({name: each}, start=tmp_path)
    assert getattr(found, name) == "all"


def test_file_over_defaults_and_command_line_over_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        (
            'connector = "a:B"\nengine = "vllm"\nhook-timeout = 3\nreport-dir = "out"\n'
            "[extra-config]\nx = 1\n"
        ),
    )
    found = load({"engine": "reference", "seed": None}, start=tmp_path / "deep" / "er")
    assert (found.connector, found.engine, found.hook_timeout, found.extra_config) == (
        "a:B",
        "reference",
        3.0,
        {"x": 1},
    )
    assert found.report_dir == str(tmp_path / "out")
    assert found.base == tmp_path


def test_pyproject_counts_only_with_a_table(tmp_path: Path) -> None:
    write(tmp_path, '[tool.kvconform]\nconnector = "a:B"\n', "pyproject.toml")
    write(tmp_path / "sub", "[tool.other]\n", "pyproject.toml")
    assert load({}, start=tmp_path / "sub").connector == "a:B"


def test_the_search_ends_at_the_repository(tmp_path: Path) -> None:
    write(tmp_path, 'connector = "a:B"\n')
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    assert load({}, start=tmp_path / "repo").connector == REFERENCE


def test_expected_failures(tmp_path: Path) -> None:
    write(
        tmp_path,
        '[[expected-failures]]\nrequirement = "load.x"\nreason = "known"\nexpires = 2027-01-31\n',
    )
    (entry,) = load({}, start=tmp_path).expected_failures
    assert (entry.requirement, entry.case, entry.expires) == ("load.x", "*", "2027-01-31")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[capabilities]\nbest_efort = true",
            "unknown capability 'best_efort'; did you mean best_effort?",
        ),
        (
            "[capabilities]\nbest_efort = true\nhmma = true",
            "unknown capabilities: 'best_efort' (did you mean best_effort?), "
            "'hmma' (did you mean hma?)",
        ),
        (
            "[capabilities]\nzzz = true\nhmma = true",
            "unknown capabilities: 'zzz', 'hmma' (did you mean hma?); known are ",
        ),
        (
            "[capabilities]\nstore = 1\nhma = true\nchunk_tokens = 'four'",
            "capability store must be true or false (it is 1); "
            "capability chunk_tokens must be a whole number above 0 (it is 'four')",
        ),
        ("conector = 'a:B'", "unknown setting 'conector'; did you mean 'connector'?"),
        (
            "engine = 'fast'",
            "engine: must be 'reference', 'vllm', 'live' or 'all' (it is 'fast')",
        ),
        ("workers = 0", "workers: must be greater than or equal to 1 (it is 0)"),
        ("workers = '2'", "workers: must be a whole number (it is '2')"),
        ("[[expected-failures]]\nrequirement = 'a'", "expected_failures.0.reason: is missing"),
        (
            "[[expected-failures]]\nrequirement = 'a'\nreason = 'b'\nuntil = 'c'",
            "expected_failures.0.until: extra inputs are not permitted",
        ),
        (
            "[[expected-failures]]\nrequirement = 'a'\nreason = 'b'\nexpires = 'soon'",
            "expected_failures.0.expires: must be a day such as 2027-01-31",
        ),
        ("file = 'x'", "unknown setting 'file'"),
        ("connector = ", "is not valid TOML: Invalid value"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as error:
        load({}, start=tmp_path)
    assert error.value.message.startswith(str(path))
    assert sentence in error.value.message


def test_every_mistake_has_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "workers = 0\nconector = 'a:B'\nengine = 'fast'\n")
    with pytest.raises(UsageError) as error:
        load({}, start=tmp_path)
    lines = error.value.message.splitlines()
    assert len(lines) == 3 and all(line.startswith(f"{path}: ") for line in lines)
    for name in ("workers", "conector", "engine"):
        assert any(name in line for line in lines)


def test_a_named_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x", 'connector = "a:B"\n', "other.toml")
    assert load({}, file=str(path)).connector == "a:B"
    with pytest.raises(UsageError, match="there is no settings file"):
        load({}, file=str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"has no table \[tool\.kvconform\]"):
        load({}, file=str(write(tmp_path, "", "pyproject.toml")))


def test_extra_config(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": 1}')
    assert parse_extra_config(f"@{tmp_path}/c.json") == {"a": 1}
    assert parse_extra_config('{"b": "{tmp}"}') == {"b": "{tmp}"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "{",
            (
                "--extra-config is not valid JSON: Expecting property name enclosed in double "
                "quotes at line 1 column 2"
            ),
        ),
        ("[1]", "--extra-config must be a JSON object, not [1]"),
        (
            "@/no/such/file",
            "--extra-config: /no/such/file cannot be read: No such file or directory",
        ),
    ],
)
def test_bad_extra_config(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_extra_config(text)
    assert error.value.message == sentence


class TestEnvironment:
    """kvconform.compat.installed: what is installed."""

    @pytest.mark.parametrize(
        ("version", "warns"),
        [
            ("0.31.0", False),
            ("0.33.1", False),
            ("0.34.0rc1", True),
            ("1.0", True),
            ("unknown", True),
        ],
    )
    def test_versions(self, monkeypatch: pytest.MonkeyPatch, version: str, warns: bool) -> None:
        from kvconform.compat import installed

        monkeypatch.setattr(installed, "vllm_version", lambda: version)
        found, warnings = installed.check_vllm()
        assert (found, bool(warnings)) == (version, warns)

    @pytest.mark.parametrize(
        ("version", "sentence"),
        [(None, "vLLM is not installed"), ("0.10.2", "vLLM 0.10.2 is too old")],
    )
    def test_no_good(
        self, monkeypatch: pytest.MonkeyPatch, version: str | None, sentence: str
    ) -> None:
        from kvconform.compat import installed

        monkeypatch.setattr(installed, "vllm_version", lambda: version)
        with pytest.raises(EnvironmentProblem, match=sentence):
            installed.check_vllm()

    @pytest.mark.parametrize(
        ("connector", "sentence"),
        [
            ("pkg.mod.Class", "did you mean pkg.mod:Class?"),
            ("a b:C", "does not name a connector"),
            ("catalogue:example", "on the command line (kvconform run catalogue:example)"),
            ("no_such_package_here.mod:C", "there is no package 'no_such_package_here'"),
        ],
    )
    def test_names(self, connector: str, sentence: str) -> None:
        from kvconform.config.exists import check_connector_name

        with pytest.raises(UsageError) as error:
            check_connector_name(connector)
        assert sentence in error.value.message

    @pytest.mark.parametrize(
        ("connector", "sentence"),
        [
            ("mine.py:Conn", "did you mean mine:Conn?"),
            ("below/theirs.py:Conn", "did you mean theirs:Conn with --pythonpath below?"),
            ("below/theirs.py", "did you mean theirs:Theirs with --pythonpath below?"),
            ("mine.py", "add its class, as mine:MyConnector"),
            ("pkg/inside/conn.py:Conn", "did you mean pkg.inside.conn:Conn?"),
            ("mine:Conn", "or give --pythonpath {here}"),
            ("pkg.inside.conn:Conn", "or give --pythonpath {here}"),
            ("theirs:Conn", "or give --pythonpath {here}/below"),
            ("none.py:Conn", "there is no package 'none'"),
        ],
    )
    def test_files_that_lie_here(
        self, connector: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvconform.config.exists import check_connector_name

        files = {
            "mine.py": "",
            "below/theirs.py": "class Theirs(KVConnectorBase_V1): pass",
            "pkg/__init__.py": "",
            "pkg/inside/__init__.py": "",
            "pkg/inside/conn.py": "",
        }
        for file, text in files.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError) as error:
            check_connector_name(connector)
        assert sentence.format(here=tmp_path) in error.value.message

    def test_pythonpath(self, tmp_path: Path) -> None:
        from kvconform.config.exists import check_connector_name

        (tmp_path / "only_here.py").write_text("")
        check_connector_name("only_here:C", [str(tmp_path)])
        for folder, sentence in (
            ("", f"in {tmp_path} (pythonpath)"),
            ("misspelt", f"no directory {tmp_path / 'misspelt'}, which pythonpath names"),
        ):
            with pytest.raises(UsageError) as error:
                check_connector_name("nor_here:C", [str(tmp_path / folder)])
            assert sentence in error.value.message
        check_connector_name("ExampleConnector")


SELECTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"select": ["lokup.truth"]},
        "there is no case or requirement 'lokup.truth'; did you mean lookup.truth",
    ),
    (
        {"select": ["lifecycle.api[reference-sync-v9-d1-b4]"]},
        "case lifecycle.api has no run lifecycle.api[reference-sync-v9-d1-b4]; it has ",
    ),
    ({"profile": "cor"}, "there is no profile 'cor'; did you mean core"),
    ({"profile": "fast"}, "there is no profile 'fast'; the profiles are core, full, findings, "),
    ({"trace": "lookup.truth"}, "--trace: there is no case 'lookup.truth'"),
    ({"disable": ["nothing"]}, "disable: there is no requirement or case 'nothing'"),
    (
        {"expected_failures": [{"requirement": "nothing", "reason": "x"}]},
        "expected failure of 'nothing' matches nothing",
    ),
    (
        {"expected_failures": [{"requirement": "*", "case": "nocase", "reason": "x"}]},
        "expected failure on case 'nocase' matches nothing",
    ),
]


class TestSelection:
    """kvconform.config.selection: from settings to runs."""

    @pytest.mark.parametrize(("values", "sentence"), SELECTIONS)
    def test_mistakes(self, values: dict[str, Any], sentence: str) -> None:
        from kvconform.config.selection import select
        from kvconform.config.settings import Settings
        from kvconform.contract.loader import load_spec

        with pytest.raises(UsageError) as error:
            select(load_spec(), Settings.model_validate(values), "0.32.0")
        assert error.value.message.startswith(sentence)

    def test_one_run(self) -> None:
        from kvconform.config.selection import select
        from kvconform.config.settings import Settings
        from kvconform.contract.loader import load_spec

        spec = load_spec()
        wanted = spec.cases["lifecycle.api"].variants()[0].id
        found = select(spec, Settings(select=[wanted]), "0.32.0")
        assert [variant.id for variant in found.variants] == [wanted]
        assert found.narrowed

    def test_requirements_of_other_versions_are_left_out(self) -> None:
        from kvconform.config.selection import select
        from kvconform.config.settings import Settings
        from kvconform.contract.loader import load_spec

        spec = load_spec()
        for version in ("0.31.0", "0.33.0"):
            found = select(spec, Settings(), version)
            assert found.judged
            assert all(spec.requirements[name].in_force(version) for name in found.judged)


def test_a_case_that_is_named_replaces_what_the_file_selects(tmp_path: Path) -> None:
    (tmp_path / "kvconform.toml").write_text('select = ["lookup.truth"]\n', encoding="utf-8")
    assert load({}, start=tmp_path).select == ["lookup.truth"]
    assert load({"trace": "lifecycle.api"}, start=tmp_path).select == []
    assert load({"cases": ["mine.yaml"]}, start=tmp_path).select == []
    both = {"cases": ["mine.yaml"], "select": ["lifecycle.api"]}
    assert load(both, start=tmp_path).select == ["lifecycle.api"]
    with pytest.raises(UsageError, match="--trace and -k cannot be combined"):
        load({"trace": "lifecycle.api", "select": ["lookup.truth"]}, start=tmp_path)


def test_a_file_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvconform.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="--extra-config: .* is not UTF-8"):
        parse_extra_config(f"@{file}")
    with pytest.raises(UsageError, match="is not UTF-8, which TOML must be: byte 0"):
        load({}, start=tmp_path)

    def refuses(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuses)
    with pytest.raises(UsageError, match="kvconform.toml cannot be read: Permission denied"):
        load({}, start=tmp_path)


def test_two_letters_in_the_wrong_order_are_a_misspelt_placeholder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no placeholder \{tpm\}; did you mean \{tmp\}\?"):
        load({"extra_config": {"path": "{tpm}/kv"}}, start=tmp_path)


def test_a_misspelt_placeholder_is_named(tmp_path: Path) -> None:
    """Every run would use the folder of that name, and find what others have stored."""
    with pytest.raises(UsageError, match=r"no placeholder \{temp\}; did you mean \{tmp\}\?"):
        load({"extra_config": {"stores": [{"path": "{temp}/kv"}]}}, start=tmp_path)
    for unclosed in ("{tmp", "{tmp/kv", "{block_size /"):
        with pytest.raises(UsageError, match="lacks its closing brace"):
            load({"extra_config": {"path": unclosed}}, start=tmp_path)
    with pytest.raises(UsageError, match=r"extra_config_after_restart: there is no placeholder"):
        load({"extra_config_after_restart": {"path": "{temp}"}}, start=tmp_path)
    template = {"path": "{tmp}/{model}", "size": "{block_size}", "other": "{tmpfs"}
    assert load({"extra_config": template}, start=tmp_path).extra_config == template
