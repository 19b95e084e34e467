# SPDX-License-Identifier: Apache-2.0
"""Generated parts of hand-written pages, and the paths and names that these pages give."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvconform.dev import docs, example
from kvconform.errors import UsageError
from places import ROOT

PAGES = (
    "docs/architecture.md",
    "docs/decisions/0021-packages.md",
    "README.md",
    "CONTRIBUTING.md",
)
"""The pages whose paths are checked. Paths are relative to the checkout or to conformance/."""


def spans(page: str) -> list[str]:
    """What a page shows as code within its text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))


def exists(path: str) -> bool:
    """Whether there is such a file or folder; `<id>` and `*` stand for any name."""
    pattern = re.sub(r"<\w+>", "*", path).rstrip("/")
    found = [*ROOT.glob(pattern), *(ROOT / "conformance").glob(pattern)]
    if "/" not in pattern:  # a file of the folder that the sentence names
        found += [*(ROOT / "conformance").glob(f"*/{pattern}"), *(ROOT / "refimpl").glob(pattern)]
    return bool(found)


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or class defines, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if target is not None:
                found |= {each.id: node for each in ast.walk(target) if isinstance(each, ast.Name)}
    return found


def defines(path: str, name: str) -> bool:
    """Whether the file defines a name such as `EVENTS` or `Engine.schedule`."""
    file = next(place for place in (ROOT / "conformance" / path, ROOT / path) if place.is_file())
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        node = names_in(body).get(part)
        if node is None:
            return False
        body = getattr(node, "body", [])
    return True


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_are_named_exist(page: str) -> None:
    found = [span.partition("::")[0] for span in spans(page) if re.fullmatch(r"\w[^ ]*", span)]
    paths = {path for path in found if "/" in path or path.endswith(".py")}
    assert paths
    assert {path for path in paths if not exists(path)} == set()


def test_names_that_are_named_exist() -> None:
    found = [span.split("::") for span in spans(PAGES[0]) if "::" in span]
    assert len(found) > 80
    assert [f"{path}::{name}" for path, name in found if not defines(path, name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_tools_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    tools = {name.replace(".", "/") for name in re.findall(r"python -m kvconform\.([\w.]+)", text)}
    assert {tool for tool in tools if not exists(f"{tool}*")} == set()


def test_the_page_answers_questions() -> None:
    rows = re.findall(r"^\| (?!I want|-)([a-z].*?) \|", (ROOT / PAGES[0]).read_text(), re.M)
    assert len(rows) > 30
    assert len(set(rows)) == len(rows)


# -- the picture


def checkout(folder: Path, layers: str) -> Path:
    """A checkout with two packages."""
    (folder / "pyproject.toml").write_text(
        f'[[tool.importlinter.contracts]]\nname = "Down"\ntype = "layers"\nlayers = {layers}\n'
    )
    for name in ("high", "low"):
        (folder / "conformance" / name).mkdir(parents=True)
        (folder / "conformance" / name / "__init__.py").write_text(f'"""The {name} one."""\n')
    return folder


def test_every_package_has_its_place() -> None:
    picture = docs.picture(ROOT)
    for place in (ROOT / "conformance").iterdir():
        if not place.name.startswith("__") and (place.is_dir() or place.suffix == ".py"):
            assert f"│ {docs.label(ROOT, place.stem)} " in picture


def test_floors_are_in_the_order_of_the_contract(tmp_path: Path) -> None:
    lines = docs.picture(checkout(tmp_path, '["high", "low"]')).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("│")] == ["high/", "low/"]
    assert [line[0] for line in lines[1:6]] == ["┌", "│", "├", "│", "└"]
    assert len({len(line) for line in lines[1:6]}) == 1
    assert lines[-1] == "- Down."


def test_packages_of_one_floor_share_a_box(tmp_path: Path) -> None:
    picture = docs.picture(checkout(tmp_path, '["high | low"]'))
    assert "├" not in picture
    assert "The high one." in picture and "The low one." in picture


def test_a_package_without_a_docstring_is_an_error(tmp_path: Path) -> None:
    root = checkout(tmp_path, '["high"]')
    (root / "conformance/high/__init__.py").write_text("")
    with pytest.raises(UsageError, match="conformance/high/__init__.py has no docstring"):
        docs.picture(root)


# -- the example


def test_the_excerpt_fits_on_a_screen() -> None:
    lines = example.excerpt(ROOT).splitlines()[1:-1]
    assert len(lines) <= example.MOST
    assert lines[0].startswith("$ kvconform run")
    assert "NOT CONFORMANT" in lines
    assert any(line.startswith("reproduce ") for line in lines)


def test_the_report_holds_nothing_that_differs_from_run_to_run() -> None:
    output = (
        "kvconform 0.1.0 \n3 of 9 runs made, no failures so far\nreports     /tmp/x\n"
        "CONFORMANT  in 2.5 s\n"
    )
    command, *rest = example.whole(output).splitlines()
    assert command.startswith("$ kvconform run ExampleConnector --extra-config '{")
    assert rest == ["kvconform 0.1.0", "reports     kvconform-report", "CONFORMANT"]


def test_a_report_without_its_failure_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / example.PLACE).write_text("$ kvconform run\nCONFORMANT\n")
    with pytest.raises(UsageError, match=example.PANEL):
        example.excerpt(tmp_path)


# -- parts of pages


def test_a_part_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(docs.PARTS, "a.md", ("A", lambda root: "new\n"))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "a.md"
    page.write_text("before\n<!-- A -->\nold\n<!-- /A -->\nafter\n")
    assert docs.with_part(tmp_path, "a.md") == "before\n<!-- A -->\nnew\n<!-- /A -->\nafter\n"
    page.write_text("<!-- A -->\n")
    with pytest.raises(UsageError, match="docs/a.md lacks"):
        docs.with_part(tmp_path, "a.md")
