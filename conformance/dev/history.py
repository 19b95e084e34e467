# SPDX-License-Identifier: Apache-2.0
"""Real bugs of released connectors and engines that the suite must still find.

spec/history.yaml lists them with the vLLM releases that have them. `nox -s history` installs those
releases one after the other and runs this module in each. It judges the entries of the installed
release, and fails if one of them passes. With `--pages` it writes docs/history.md and
docs/engine-findings.md from the results that `nox -s history -- --json FILE` has collected.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconform.compat.installed import vllm_version
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec, entries, load_spec
from kvconform.contract.references import Entry
from kvconform.contract.requirement import version_key
from kvconform.dev.example import ROOT
from kvconform.report.pages import render

TEMPLATES = ROOT / "docs" / "templates"


def of_release(known: list[Entry], version: str) -> list[Entry]:
    """Return the entries that name a release (`0.26.0+cpu` is 0.26.0)."""
    return [entry for entry in known if version_key(version) in map(version_key, entry.releases)]


def as_of(entry: Entry, spec: Spec, release: str) -> Spec:
    """Return the specification that `release` is judged by.

    It has the requirements that are in force there, and those that `entry` names: a bug that a
    later release repaired was a bug before.
    """
    chosen = {
        name: req
        for name, req in spec.requirements.items()
        if name in entry.fails or req.in_force(release)
    }
    return dataclasses.replace(spec, requirements=chosen)


def examine(entry: Entry, spec: Spec, release: str, tmp: Path) -> dict[str, str]:
    """Map requirements to the message of their first FAIL, over all runs of the entry.

    An error of the harness is listed as `harness`. Writes only below `tmp`.
    """
    from kvconform.config.target import Target
    from kvconform.run.case import run_and_judge

    target = Target(entry.connector, dict(entry.extra_config), half=entry.half)
    found: dict[str, str] = {}
    for number, variant in enumerate(_variants(entry, spec)):
        report = run_and_judge(
            variant, target, as_of(entry, spec, release), seed=0, tmp=tmp / str(number)
        )
        if report.harness_error is not None:
            last = report.harness_error.strip().splitlines()[-1]
            found.setdefault("harness", f"{variant.id}: {last}")
        for row in report.rows:
            if row.verdict == "FAIL":
                sentence = f"{variant.id}, step {row.step}: {row.finding}"
                found.setdefault(row.requirement, sentence)
    return found


def _variants(entry: Entry, spec: Spec) -> Iterator[Variant]:
    for name in entry.cases:
        variants = spec.cases[name].variants(["vllm"], entry.scheduling)
        yield from (variant for variant in variants if variant.runner == entry.runner)


def found_in(entry: Entry, lines: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Return what was found of an entry, sorted by release: release, requirement and sentence.

    The newest line of a release counts.
    """
    by_release = {
        line["release"]: line["found"] for line in lines if line["id"] == entry.id and line["found"]
    }
    return [
        {"release": release, "name": name, "said": " ".join(said.split())}
        for release in sorted(by_release, key=version_key)
        for name, said in by_release[release].items()
    ]


def history_page(known: Sequence[Entry], lines: Sequence[dict[str, Any]]) -> str:
    """Return the page of every entry of which something was found."""
    found = [(entry, rows) for entry in known if (rows := found_in(entry, lines))]
    releases = sorted({row["release"] for _, rows in found for row in rows}, key=version_key)
    bugs = {entry.bug for entry, _ in found}
    return render(
        TEMPLATES, "history.md.jinja", {}, found=found, releases=releases, count=len(bugs)
    )


def findings_page(
    known: Sequence[Entry], lines: Sequence[dict[str, Any]], spec: Spec, folder: Path
) -> str:
    """Return the page of the entries whose case belongs to the area `findings`.

    The text of each case is read from `folder` (spec/cases/findings).
    """
    found = []
    for entry in known:
        rows = found_in(entry, lines)
        case = entry.cases[0]
        if spec.cases[case].area == "findings" and rows:
            broken = [spec.requirements[name] for name in entry.fails if name.startswith("engine.")]
            found.append((entry, rows, broken, (folder / f"{case}.yaml").read_text()))
    newest = max((rows[-1]["release"] for _, rows, _, _ in found), key=version_key, default="")
    return render(TEMPLATES, "engine-findings.md.jinja", {}, found=found, newest=newest)


def write_pages(results: Path) -> None:
    """Write docs/history.md and docs/engine-findings.md from a file that `--json` wrote.

    The current directory must be the checkout.
    """
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    spec = load_spec()
    known = entries(spec)
    Path("docs/history.md").write_text(history_page(known, lines), encoding="utf-8")
    findings = findings_page(known, lines, spec, Path("spec/cases/findings"))
    Path("docs/engine-findings.md").write_text(findings, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Examine the entries of the installed release; return 0 if each is found, else 1."""
    parser = argparse.ArgumentParser(prog="python -m kvconform.dev.history", description=__doc__)
    parser.add_argument(
        "id", nargs="*", help="entries to examine (default: all of the installed release)"
    )
    parser.add_argument(
        "--releases",
        action="store_true",
        help="only print the releases that spec/history.yaml names",
    )
    parser.add_argument("--json", type=Path, help="append the results to this file, one line each")
    parser.add_argument(
        "--pages",
        metavar="FILE",
        type=Path,
        help="write docs/history.md and docs/engine-findings.md from that file",
    )
    options = parser.parse_args(arguments)
    if options.pages:
        write_pages(options.pages)
        return 0
    spec = load_spec()
    known = entries(spec)
    if options.releases:
        releases = {release for entry in known for release in entry.releases}
        print("\n".join(sorted(releases, key=version_key)))
        return 0
    release = (vllm_version() or "0").partition("+")[0]
    mine = [
        entry for entry in of_release(known, release) if not options.id or entry.id in options.id
    ]
    table = Table("bug", "entry", "requirement", "message", title=f"vLLM {release}")
    missed = 0
    for entry in mine:
        with tempfile.TemporaryDirectory(prefix="kvconform-history-") as tmp:
            found = examine(entry, spec, release, Path(tmp))
        absent = [name for name in entry.fails if name not in found]
        missed += bool(absent)
        shown = [*entry.fails, *(["harness"] if absent and "harness" in found else [])]
        for name in shown:
            message = escape(found[name]) if name in found else "[red]not found[/]"
            table.add_row(entry.bug, entry.id, name, message)
        if options.json:
            line = {
                "release": release,
                "id": entry.id,
                "found": {name: found[name] for name in entry.fails if name in found},
            }
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
    console = Console(width=160)
    console.print(table)
    console.print(f"{len(mine) - missed} of {len(mine)} bugs found in vLLM {release}")
    return 1 if missed or not mine else 0


if __name__ == "__main__":
    sys.exit(main())
