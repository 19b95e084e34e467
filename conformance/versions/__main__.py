# SPDX-License-Identifier: Apache-2.0
"""Judge a connector in several vLLM releases, and report what changed between them.

Exit code 0: conformant in every release, or partially; 1: not conformant in one of them; 2: usage;
3: one of them could not be run, or not completely.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from kvconform.config.exists import check_connector_name
from kvconform.config.selection import select
from kvconform.config.settings import Settings, load, parse_extra_config
from kvconform.contract.loader import load_spec
from kvconform.contract.requirement import version_key
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError
from kvconform.execute import choice
from kvconform.execute.choice import add_options
from kvconform.files import check_writable
from kvconform.versions import changes, matrix, page
from kvconform.versions.matrix import RELEASES, Place, Release


class Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (--help shows the options)")


def parser() -> Parser:
    """Return the parser of the command line."""
    found = Parser(prog="nox -s versions --", description=__doc__, allow_abbrev=False)
    found.add_argument(
        "--plan",
        metavar="FILE",
        help="JSON: a list of {release, python} or {release, problem}; nox writes it",
    )
    found.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="RELEASE=PYTHON",
        help="a release and a Python that has it (repeat)",
    )
    found.add_argument(
        "--connector",
        help="package.module:Class, or a name registered in vLLM's factory"
        " (default: the reference connector)",
    )
    found.add_argument("--extra-config", metavar="JSON|@FILE", help="its kv_connector_extra_config")
    found.add_argument(
        "--config", metavar="FILE", help="settings, instead of kvconform.toml or pyproject.toml"
    )
    found.add_argument(
        "--engine",
        choices=("reference", "vllm", "all"),
        default="vllm",
        help="engines to run on (default: vllm)",
    )
    found.add_argument(
        "--scheduling",
        choices=("sync", "async", "all"),
        help="scheduling to run with (default: all)",
    )
    found.add_argument(
        "-k", action="append", metavar="ID", dest="select", help="only these cases or requirements"
    )
    found.add_argument("--seed", type=int, help="seed of prompts and tokens (default: 0)")
    found.add_argument(
        "--report-dir",
        default="kvconform-versions",
        metavar="DIR",
        help="where versions.md and versions.json go",
    )
    add_options(found, "one per core, as memory allows")
    found.add_argument(
        "--no-snapshots", action="store_true", help="leave out metadata and stored KV"
    )
    found.add_argument(
        "--keep",
        action="store_true",
        help="keep the files and output of each release's process, in DIR/runs",
    )
    found.add_argument(
        "--all-runs", action="store_true", help="every block size and queue depth, too"
    )
    return found


def places(options: argparse.Namespace) -> list[Place]:
    """Return the releases, oldest first. UsageError for none, duplicates, and an invalid plan."""
    found = []
    if options.plan:
        try:
            found = [
                Place(**entry)
                for entry in json.loads(Path(options.plan).read_text(encoding="utf-8"))
            ]
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"--plan {options.plan} cannot be read: {error}") from None
    for entry in options.at:
        release, equals, python = entry.partition("=")
        if not equals or not release or not python:
            raise UsageError(
                f"--at {entry}: write RELEASE=PYTHON, such as 0.31.0=/path/to/bin/python"
            )
        found.append(Place(release, python))
    if not found:
        raise UsageError(
            "no release to run: give --at RELEASE=PYTHON, or use"
            f" nox -s versions -- --vllm {','.join(RELEASES[-2:])}"
        )
    names = [place.release for place in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"release {twice} is there twice")
    if odd := next((name for name in names if not re.match(r"\d+\.\d+", name)), None):
        raise UsageError(f"{odd!r} is no release of vLLM, such as {RELEASES[-1]}")
    return sorted(found, key=lambda place: version_key(place.release))


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of the runs. UsageError as for `kvconform run`."""
    given: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("connector", "engine", "scheduling", "select", "seed", "report_dir")
    }
    given["select"] = [
        part for entry in options.select or [] for part in entry.split(",") if part
    ] or None
    given["extra_config"] = (
        parse_extra_config(options.extra_config) if options.extra_config is not None else None
    )
    found = load(given, file=options.config)
    if found.setup or found.teardown or found.servers:
        advice = "start them yourself, and leave setup, teardown and servers out of the settings"
        raise UsageError(f"a matrix of releases starts no servers: {advice}")
    return found


def run(options: argparse.Namespace) -> int:
    """Run the matrix, write and print the report, and return the exit code."""
    began = time.monotonic()
    where, settings, spec = places(options), settings_of(options), load_spec()
    check_connector_name(settings.connector, settings.pythonpath)
    executor = choice.parse(options.executor)
    select(spec, settings, "unknown")  # what is asked for must exist
    snapshots = not options.no_snapshots
    at_once = executor.workers(options.jobs, matrix.jobs(len(where)))
    folder = Path(settings.report_dir)
    check_writable("--report-dir", folder)
    count = f"{len(where)} release{'s' * (len(where) > 1)}"
    together = f", {at_once} at a time" if at_once else ""
    print(f"kvconform versions: {settings.connector} in {count}{together}", flush=True)
    kept = (folder / "runs").absolute() if options.keep else None
    found = matrix.run(
        where,
        matrix.Observing(settings, snapshots, options.all_runs, kept),
        at_once=at_once,
        report=lambda release: print(page.summary(release), flush=True),
        where=executor,
    )
    between = changes.neighbours(found, spec)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write(folder, found, between, settings, snapshots=snapshots, all_runs=options.all_runs)
    except OSError as error:
        raise EnvironmentProblem(
            f"the report cannot be written to {folder}: {error.strerror or error}"
        ) from None
    for change in between:
        print(page.line(change))
    seconds = time.monotonic() - began
    print(f"reports     {os.path.relpath(folder)}/versions.md, versions.json  in {seconds:.0f} s")
    return exit_code(found)


def exit_code(releases: list[Release]) -> int:
    """Return the worst of the releases: 1 not conformant, 3 not run or not completely, 0."""
    if any(
        release.found is not None and release.found.failed or release.verdict == "nonconformant"
        for release in releases
    ):
        return 1
    if any(release.problem or release.verdict in ("error", "not run") for release in releases):
        return 3
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; an error is one sentence on stderr. Return the exit code."""
    try:
        return run(parser().parse_args(arguments))
    except KvconformError as error:
        print(f"kvconform: {error.message}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
