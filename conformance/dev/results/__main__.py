# SPDX-License-Identifier: Apache-2.0
"""Record reports of the catalogue's connectors, and generate docs/results/ from them.

    add ENTRY REPORT_DIR    record a report, one digest per engine, and write the pages
    judge [ENTRY...]        run the suite on entries (all, or these), record them as `add` does, and
                            name those that were not judged
    pages [--check]         write the pages, or only report which are stale
    reproduce [NAME...]     run the commands of the findings (all, or those of these ids,
                            families or catalogue entries), and report which still fail

Run `add` in the environment of the report, because it records the versions of the connector's
packages. `judge` and `reproduce` use what is installed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from kvconform.config import catalogue
from kvconform.contract.loader import Spec, load_spec
from kvconform.dev.results import digest, finding, judge, page, reproduce
from kvconform.errors import KvconformError, UsageError
from kvconform.execute.choice import add_options, parse

ROOT = Path("docs/results")


def wanted(root: Path, spec: Spec) -> dict[str, str]:
    """Return the text of every page, by file name.

    UsageError for findings that name something that does not exist.
    """
    digests = digest.read(root)
    findings = finding.read(root)
    scenarios = _scenarios()
    problems: list[str] = []
    for each in findings:
        problems += finding.problems(each, root, spec, scenarios)
    if problems:
        raise UsageError("; ".join(problems))
    return page.pages(digests, findings, spec, root)


def _scenarios() -> set[str]:
    names = {path.stem for path in Path("spec/live").glob("**/*.yaml")}
    return names | {f"live.{name}" for name in names}


def make(root: Path, spec: Spec) -> list[str]:
    """Write the pages that differ, and return their names."""
    changed = []
    for name, text in wanted(root, spec).items():
        if _text(root / name) != text:
            (root / name).write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


def check(root: Path, spec: Spec) -> list[str]:
    """Return the names of stale pages."""
    return [name for name, text in wanted(root, spec).items() if _text(root / name) != text]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def run(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit code.

    0: done; 1: --check found stale pages, an entry was not judged, or a confirmed finding was not
    reproduced.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m kvconform.dev.results", description=__doc__, formatter_class=form
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="directory of the results (default: docs/results)"
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser("add", help="record a report")
    adding.add_argument("entry")
    adding.add_argument("report_dir", type=Path)
    making = verbs.add_parser("pages", help="write the pages")
    making.add_argument("--check", action="store_true")
    trying = verbs.add_parser("reproduce", help="run the commands of the findings")
    trying.add_argument("names", nargs="*", metavar="NAME")
    add_options(trying, "1")
    judging = verbs.add_parser("judge", help="run the suite on entries, and record them")
    judging.add_argument("entries", nargs="*", metavar="ENTRY")
    judging.add_argument(
        "--reports", type=Path, metavar="DIR", help="keep each report, in DIR/ENTRY"
    )
    judging.add_argument(
        "--options", default="", metavar="TEXT", help="for kvconform run, such as '--engine vllm'"
    )
    add_options(judging, "1; each run has workers of its own")
    given = parser.parse_args(arguments)
    if given.verb == "reproduce":
        return _reproduce(given)
    spec = load_spec()
    today = datetime.now(UTC).date().isoformat()
    missing = False
    if given.verb == "judge":
        missing = _judge(given, today)
    elif given.verb == "add":
        entry = given.entry.removeprefix(catalogue.PREFIX)
        requires = catalogue.named(entry).requires
        for found in digest.digests(given.report_dir, entry, requires, today, spec):
            print(f"{digest.write(given.root, found)}: {found.verdict}, {found.runs} runs")
    elif given.check:
        stale = check(given.root, spec)
        if stale:
            advice = "run python -m kvconform.dev.results pages"
            print(f"stale: {', '.join(stale)}; {advice}", file=sys.stderr)
        return bool(stale)
    for name in make(given.root, spec):
        print(f"{given.root / name}: written")
    return int(missing)


def _judge(given: argparse.Namespace, today: str) -> bool:
    """Judge entries, and record each as soon as it is done; return whether one was not judged."""
    names = [each.removeprefix(catalogue.PREFIX) for each in given.entries] or catalogue.names()
    for name in names:
        catalogue.named(name)  # must exist
    options = tuple(shlex.split(given.options))
    reports = None if given.reports is None else given.reports.absolute()
    turns = [judge.Turn(name, today, options, reports) for name in names]
    where = parse(given.executor)
    missing = False
    for done in judge.run(turns, where, where.workers(given.jobs, 1)):
        print(done, flush=True)
        for each in done.digests:
            digest.write(given.root, each)
        missing = missing or done.why is not None
    return missing


def _reproduce(given: argparse.Namespace) -> int:
    """Return 1 if a confirmed finding was not reproduced, or none could be run; else 0."""
    found: list[reproduce.Reproduced] = []
    chosen = reproduce.chosen(finding.read(given.root), given.names)
    where = parse(given.executor)
    for done in reproduce.run(chosen, where, where.workers(given.jobs, 1)):
        found.append(done)
        print(done, flush=True)
    disproved = any(each.disproved for each in found)
    none_run = all(each.why is not None for each in found)
    return int(disproved or none_run)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; print one sentence for an error, and return its exit code."""
    try:
        return run(arguments)
    except KvconformError as error:
        print(f"kvconform: {error.message}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
