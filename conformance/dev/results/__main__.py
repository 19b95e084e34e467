# SPDX-License-Identifier: Apache-2.0
"""`python -m kvconform.dev.results`: keep what reports of the catalogue's connectors say, and make docs/results/ of it.

    add ENTRY REPORT_DIR     keep the report of a connector of the catalogue, one digest per engine; then make the pages
    pages [--check]          make the pages; --check only says whether they are as they should be
    reproduce [NAME...]      run what reproduces the findings (of these ids, pages or entries), and say which still fail as they say

Run `add` in the environment in which the report was made: it notes the versions of the connector's packages. `reproduce` takes what is
installed.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from kvconform.config import catalogue
from kvconform.contract.loader import Spec, load_spec
from kvconform.dev.results import digest, finding, page, reproduce
from kvconform.errors import KvconformError, UsageError

ROOT = Path("docs/results")


def wanted(root: Path, spec: Spec) -> dict[str, str]:
    """The pages as they should be, by file name. UsageError for findings that name what does not exist."""
    digests, findings = digest.read(root), finding.read(root)
    said = [
        sentence
        for each in findings
        for sentence in finding.problems(each, root, spec, _scenarios())
    ]
    if said:
        raise UsageError("; ".join(said))
    return page.pages(digests, findings, spec, root)


def _scenarios() -> set[str]:
    folder = Path("spec/live")
    return {path.stem for path in folder.glob("**/*.yaml")} | {
        f"live.{path.stem}" for path in folder.glob("**/*.yaml")
    }


def make(root: Path, spec: Spec) -> list[str]:
    """Write the pages that differ; returns their names."""
    changed = []
    for name, text in wanted(root, spec).items():
        if _text(root / name) != text:
            (root / name).write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


def check(root: Path, spec: Spec) -> list[str]:
    """The names of pages that are not as they should be."""
    return [name for name, text in wanted(root, spec).items() if _text(root / name) != text]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def run(arguments: list[str] | None = None) -> int:
    """Exit code 0: done, or as it should be; 1: --check found pages that are not; 2: usage."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m kvconform.dev.results", description=__doc__, formatter_class=form
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="directory of the results (default: docs/results)"
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser("add", help="keep a report")
    adding.add_argument("entry")
    adding.add_argument("report_dir", type=Path)
    making = verbs.add_parser("pages", help="make the pages")
    making.add_argument("--check", action="store_true")
    trying = verbs.add_parser("reproduce", help="run what reproduces the findings")
    trying.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args(arguments)
    if given.verb == "reproduce":
        return _reproduce(given.root, given.names)
    spec = load_spec()
    if given.verb == "add":
        entry = given.entry.removeprefix(catalogue.PREFIX)
        today = datetime.now(UTC).date().isoformat()
        for found in digest.digests(
            given.report_dir, entry, catalogue.named(entry).requires, today, spec
        ):
            print(f"{digest.write(given.root, found)}: {found.verdict}, {found.runs} runs")
    elif given.check:
        stale = check(given.root, spec)
        if stale:
            print(
                f"not as they should be: {', '.join(stale)}; run python -m kvconform.dev.results pages",
                file=sys.stderr,
            )
        return bool(stale)
    for name in make(given.root, spec):
        print(f"{given.root / name}: written")
    return 0


def _reproduce(root: Path, names: list[str]) -> int:
    """1 if one that is called confirmed did not fail as it says, or none could be run."""
    found = []
    for each in reproduce.chosen(finding.read(root), names):
        found.append(reproduce.reproduce(each))
        print(found[-1], flush=True)
    return int(any(each.disproved for each in found) or all(each.why is not None for each in found))


def main(arguments: list[str] | None = None) -> int:
    """Entry point: one sentence per error."""
    try:
        return run(arguments)
    except KvconformError as error:
        print(f"kvconform: {error.message}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
