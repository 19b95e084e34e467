# SPDX-License-Identifier: Apache-2.0
"""Tests that the documentation is correct: commands, settings, capabilities, examples, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvconform.cli import app
from kvconform.config import settings
from kvconform.contract import yaml12
from kvconform.contract.capabilities import CAPABILITIES, complete
from kvconform.contract.case import Case
from kvconform.contract.expression import FUNCTIONS
from kvconform.contract.loader import load_spec
from kvconform.contract.requirement import PATTERNS, Requirement
from kvconform.judge.records import Verdict
from places import ROOT

NOTES = ROOT / "docs" / "results" / "notes"  # parts of the pages above them, which are looked at
PAGES = sorted(
    page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if page.parent != NOTES
)
GUIDE = (ROOT / "docs" / "guide-connector-authors.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(text: str, language: str, first: str) -> str:
    """The fenced block in `language` that begins with `first`, without its indentation."""
    for indent, body in re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.M | re.S):
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        if lines[0].startswith(first):
            return "\n".join(lines) + "\n"
    raise AssertionError(f"no {language} block that begins with {first!r}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)#]+)", prose)
    assert not [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]


def test_the_test_command_is_what_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (command,) = re.findall(r"^exec (nox .*)$", script, re.M)
    assert f"```\n{command}\n```" in README
    assert f"```\n{command}\n```" in CONTRIBUTING


def test_sessions_that_are_named_exist() -> None:
    sessions = set(
        re.findall(
            r"^@nox.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.M
        )
    )
    for page in (README, CONTRIBUTING, GUIDE):
        for command in re.findall(r"nox -s ([a-z ]+)", page):
            assert sessions.issuperset(command.split()), command


def test_commands_and_options_that_are_named_exist() -> None:
    import typer.main

    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    fenced = "".join(re.findall(r"^ *```.*?^ *```", README + CONTRIBUTING + GUIDE, re.M | re.S))
    assert set(re.findall(r"^kvconform ([a-z]+)", fenced, re.M)) <= set(commands)
    known = {
        option
        for name in ("run", "watch", "ci", "init", "pack", "gpu")
        for parameter in commands[name].params
        for option in parameter.opts
    }
    known |= {"--help", "--vllm", "--install"}
    usage = README.split("## Usage")[1].split("\n## ")[0]
    # of pip, and of a server in an example
    others = {"--port", "--daemon", "--stop", "--yes", "--extra-index-url", "--no-deps", "--data"}
    others |= {"--system-site-packages", "--spec", "--no-project", "--python", "--with"}  # pipx, uv
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", usage + GUIDE)) - others
    assert named
    assert named <= known
    lines = re.findall(r"^kvconform ([a-z]+)((?: .*)?)$", fenced.replace("\\\n", " "), re.M)
    for name, rest in lines:
        own = {option for each in commands[name].params for option in each.opts}
        inner = getattr(commands[name], "commands", {}).values()
        own |= {option for each in inner for parameter in each.params for option in parameter.opts}
        given = set(re.findall(r"(?<= )(--?[a-z][a-z-]*)", re.split(r"  |#", rest)[0]))
        assert given <= own | {"--help"}, (name, given - own)


def test_the_example_of_settings_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "kvconform.toml"
    file.write_text(block(GUIDE, "toml", "# kvconform.toml"), encoding="utf-8")
    found = settings.load({}, file=str(file))
    assert found.connector == "mypkg.connector:MyConnector"
    assert found.expected_failures[0].expires == "2027-06-30"
    assert complete(found.capabilities)["saves"] == "all"


def test_settings_that_are_named_exist() -> None:
    (sentence,) = re.findall(r"The other keys are those.*?`pythonpath`", GUIDE, re.S)
    named = set(re.findall(r"`([a-z_]+)`", sentence))
    assert len(named) > 5
    assert named <= set(settings.Settings.model_fields)


def test_capabilities_are_all_described() -> None:
    table = GUIDE.split("### Capabilities")[1].split("###")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(CAPABILITIES)


def test_verdicts_are_all_explained() -> None:
    section = GUIDE.split("## Read the result")[1].split("\n## ")[0]
    assert set(re.findall(r"\*\*([A-Z_]+)\*\*", section)) | {"PASS"} == {
        verdict.value for verdict in Verdict
    }


def test_the_example_of_a_case_is_valid() -> None:
    data = yaml12.parse(block(CONTRIBUTING, "yaml", "id:"), "CONTRIBUTING.md")
    case = Case.model_validate(data)
    assert case.id not in load_spec().cases, "it would replace a case of the suite"


def test_the_report_of_the_readme_is_part_of_the_whole_one() -> None:
    whole = [
        line
        for line in (ROOT / "docs" / "example-connector-report.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    shown = README.split("<!-- REPORT -->")[1].split("```")[1].strip().splitlines()
    assert not [line for line in shown if line not in whole and line != "..."]


def test_the_language_of_checks_is_what_contributing_says() -> None:
    examples = yaml12.parse(
        block(CONTRIBUTING, "yaml", "# examples of each pattern"), "CONTRIBUTING.md"
    )
    plain = {"id": "a.b", "text": "It MUST.", "area": "a"}
    assert {Requirement.model_validate({**plain, **raw}).pattern for raw in examples} == set(
        PATTERNS
    ) - {"always"}
    (names,) = re.findall(r"the functions (.*?)\.\s", CONTRIBUTING, re.S)
    assert set(re.findall(r"`(\w+)`", names)) == set(FUNCTIONS)


def test_decisions_are_numbered_once() -> None:
    numbers = [page.name[:4] for page in (ROOT / "docs" / "decisions").glob("*.md")]
    assert len(set(numbers)) == len(numbers)
    assert all(number.isdigit() for number in numbers)


def test_every_python_file_names_its_licence() -> None:
    folders = ("conformance", "refimpl", "kernels", "fixtures", "spec", "tests")
    files = [
        ROOT / "noxfile.py",
        *(path for folder in folders for path in (ROOT / folder).rglob("*.py")),
    ]
    unmarked = [
        path
        for path in files
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text(encoding="utf-8")[:200]
    ]
    assert not unmarked
