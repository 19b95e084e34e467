# SPDX-License-Identifier: Apache-2.0
"""The commands list, lint, defects, drift and version.

The module must not load vLLM or torch, so it imports the tools of kvconform.dev on demand.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvconform import __version__
from kvconform.adapters import registry as adapters
from kvconform.compat.installed import NEWEST, OLDEST, vllm_version
from kvconform.config import catalogue
from kvconform.contract.case import Case
from kvconform.contract.loader import Spec, load_spec
from kvconform.contract.requirement import Requirement
from kvconform.contract.scenario import Scenario
from kvconform.errors import UsageError, did_you_mean
from kvconform.execute.choice import parse
from kvconform.files import check_writable

KINDS = ("requirements", "cases", "profiles", "connectors", "adapters")


def show(what: str, area: str | None = None, *, everything: bool = False) -> None:
    """Print a list: on a terminal the areas or one area, tab-separated lines elsewhere.

    `kvconform list AREA` is short for the requirements of an area. UsageError if unknown.
    """
    spec = load_spec()
    areas = {one.area for one in spec.requirements.values()}
    areas |= {one.area for one in spec.cases.values()}
    if what not in KINDS and what in areas and area is None:
        what, area = KINDS[0], what
    if what not in KINDS:
        close = did_you_mean(what, [*KINDS, *areas])
        raise UsageError(f"list what? {what!r} is none of {', '.join(KINDS)}, and no area{close}")
    columns, rows = _rows(spec, what)
    if area is not None:
        known = {row[1] for row in rows} if columns[1] == "area" else set()
        rows = [row for row in rows if columns[1] == "area" and row[1] == area]
        if not rows:
            close = did_you_mean(area, known - {area})
            raise UsageError(f"there are no {what} of area {area!r}{close}")
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return
    print_list(Console(highlight=False, markup=False), what, columns, rows, area, everything)


def print_list(
    console: Console,
    what: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    area: str | None,
    everything: bool,
) -> None:
    """Print a list for people: areas with their numbers, or two lines per entry.

    `everything` prints all entries with their whole texts.
    """
    if columns[1] == "area" and area is None and not everything:
        for name, count in sorted(Counter(row[1] for row in rows).items()):
            console.print(f"{name:<14}{count:>4}")
        hint = f"{len(rows)} {what}; kvconform list {what} AREA shows one area, --all shows all"
        console.print(f"\n{hint}", soft_wrap=True)
        return
    room = max(20, console.width - 4)
    for name, *facts, text in rows:
        if columns[1] == "area":
            facts = facts[0 if area is None else 1 :]
        console.print("  ".join([name, *facts]), soft_wrap=True)
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        if not everything and columns[1] == "area" and len(lines) > 1:
            lines = [textwrap.shorten(text, room, placeholder=" …")]
        for line in lines:
            console.print(f"    {line}", soft_wrap=True)
    if not everything and columns[1] == "area":
        console.print("\nkvconform explain ID says more; --all prints whole texts", soft_wrap=True)


def _rows(spec: Spec, what: str) -> tuple[list[str], list[list[str]]]:
    if what == "requirements":
        requirements = sorted(spec.requirements.values(), key=lambda r: (r.area, r.id))
        rows = [[r.id, r.area, _level(r), _flat(r.text)] for r in requirements]
        return ["requirement", "area", "level", "text"], rows
    if what == "cases":
        cases: list[Case | Scenario] = [*spec.cases.values(), *spec.scenarios.values()]
        return ["case", "area", "runs", "text"], [
            [c.id, c.area, str(len(c.variants())), _flat(c.text)] for c in cases
        ]
    if what == "connectors":
        return ["connector", "text"], [
            [f"{catalogue.PREFIX}{name}", catalogue.named(name).text] for name in catalogue.names()
        ]
    if what == "adapters":
        found = {name: adapters.named(name) for name in adapters.names()}
        return ["adapter", "title", "text"], [
            [name, adapter.title, adapter.text] for name, adapter in found.items()
        ]
    return ["profile", "text"], [[p.id, _flat(p.text)] for p in spec.profiles.values()]


def _level(requirement: Requirement) -> str:
    suffix = " (engine)" if requirement.kind == "guarantee" else ""
    return requirement.level + suffix


def _flat(text: str) -> str:
    return " ".join(text.split())


def lint(root: str | None, *, strict: bool = False) -> int:
    """Print the findings, and return 1 if one of them is no warning, else 0.

    UsageError if there is no directory `root`, or nothing to check in it.
    """
    from kvconform.dev.lint import lint_root

    if root is not None:
        _check_is_specification(Path(root))
    findings = lint_root(Path(root) if root is not None else None, strict=strict)
    for finding in findings:
        print(finding)
    warnings = sum(finding.warning for finding in findings)
    counts = [_count(len(findings) - warnings, "finding"), _count(warnings, "warning")]
    print(", ".join(filter(None, counts)) or "nothing found", file=sys.stderr)
    return int(len(findings) > warnings)


def _check_is_specification(root: Path) -> None:
    if root.is_file():
        raise UsageError(
            f"{root} is a file: lint checks a directory; kvconform run --case {root} checks a case"
        )
    if not root.is_dir():
        raise UsageError(f"there is no directory {root}")
    if not any((root / name).is_dir() for name in ("cases", "requirements")):
        raise UsageError(f"{root} has neither cases/ nor requirements/: there is nothing to check")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}" if number else ""


def defects(
    ids: list[str],
    jobs: int,
    report_dir: str | None,
    cases: list[str],
    *,
    strict: bool,
    executor: str | None = None,
) -> int:
    """Examine defects and print the kill matrix; see `kvconform.dev.defects.main`.

    Names of objects are defects of one's own; see `kvconform.dev.own`. `executor`: where they run
    (`kvconform.execute.choice.parse`).
    """
    where = parse(executor)
    own = [name for name in ids if ":" in name]
    if own and (len(own) < len(ids) or report_dir is not None or strict):
        raise UsageError(f"{own[0]} is no planted defect: name it alone, or with -k")
    if own:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        module = importlib.import_module("kvconform.dev.own")
        workers = where.workers(jobs or None, min(4, len(os.sched_getaffinity(0))))
        return int(module.main(own, cases, jobs=workers, where=where))
    if cases:
        raise UsageError("-k is for a defect of your own (package.module:NAME)")
    if report_dir is not None:
        check_writable("--report-dir", Path(report_dir))
    module = importlib.import_module("kvconform.dev.defects")
    return int(module.main(ids, jobs=jobs, report_dir=report_dir, strict=strict, where=where))


def drift() -> int:
    """Print how the installed vLLM differs from the source that was read; return 1 if it does."""
    from kvconform.dev import drift

    spec = load_spec()
    found = drift.drift(spec)
    print(drift.report(found, spec), end="")
    return 1 if found else 0


def versions() -> None:
    """Print the versions of kvconform, vLLM, Python and dependencies, one per line."""
    spec = load_spec()
    counts = f"{len(spec.requirements)} requirements, {len(spec.cases)} cases"
    found = {
        "kvconform": f"{__version__} ({counts})",
        "vllm": f"{vllm_version() or 'not installed'} (supported: {OLDEST} to {NEWEST})",
        "python": f"{platform.python_version()} ({sys.platform})",
    }
    for name in ("pytest", "pytest-xdist", "pydantic"):
        found[name] = importlib.metadata.version(name)
    for name, value in found.items():
        print(f"{name:<13}{value}")
