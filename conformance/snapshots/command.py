# SPDX-License-Identifier: Apache-2.0
"""`kvconform snapshot check` and `kvconform snapshot update`.

Exit codes: 0 nothing changed, or updated; 1 changed or missing; 2 usage; 3 environment.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvconform.snapshots.job import Job

option = functools.partial(typer.Option, show_default=False)
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Text = str | None
Texts = list[str] | None
CONNECTOR = typer.Argument(
    help="package.module:Class, or a name registered in vLLM's factory", show_default=False
)
DIRECTORY = "where the snapshots are [kvconform-snapshots]"
SHOWN = 12
"""Differences that are printed per case."""

Connector = Annotated[Text, CONNECTOR]
Directory = Annotated[Text, option("--dir", metavar="DIR", help=DIRECTORY)]
Extra = Annotated[
    Text, option("--extra-config", metavar="JSON|@FILE", help="kv_connector_extra_config")
]
Select = Annotated[
    Texts,
    option(
        "-k",
        metavar="CASE...",
        help="only these cases: ids, areas, globs [those of profile golden]",
    ),
]
Engine = Annotated[
    Text, option("--engine", metavar="reference|vllm", help="the engine to run on [reference]")
]
Device = Annotated[Text, option("--device", metavar="cpu|cuda", help="where the KV cache is [cpu]")]
Emulate = Annotated[
    bool | None,
    option("--emulate-cuda", help="a CUDA device, emulated on the CPU; nothing is slow there"),
]
Pythonpath = Annotated[
    Texts, option("--pythonpath", metavar="DIR", help="where the connector's package is (repeat)")
]
Config = Annotated[
    Text,
    option(
        "--config", metavar="FILE", help="settings, instead of kvconform.toml or pyproject.toml"
    ),
]
Debug = Annotated[bool | None, option("--debug", help="tracebacks, and pytest's own output")]
Prune = Annotated[
    bool,
    option("--prune", help="delete this version's snapshots that belong to no case"),
]


@app.command()
def check(
    connector: Connector = None,
    directory: Directory = None,
    extra_config: Extra = None,
    select: Select = None,
    engine: Engine = None,
    device: Device = None,
    emulate_cuda: Emulate = None,
    pythonpath: Pythonpath = None,
    config: Config = None,
    debug: Debug = None,
) -> None:
    """Compare with the snapshots; one that is missing is a failure."""
    raise typer.Exit(_session(locals(), updating=False, prune=False))


@app.command()
def update(
    connector: Connector = None,
    directory: Directory = None,
    extra_config: Extra = None,
    select: Select = None,
    engine: Engine = None,
    device: Device = None,
    emulate_cuda: Emulate = None,
    pythonpath: Pythonpath = None,
    config: Config = None,
    debug: Debug = None,
    prune: Prune = False,
) -> None:
    """Record the snapshots again, and print what changed and which requirements that concerns."""
    raise typer.Exit(_session(locals(), updating=True, prune=prune))


def _session(given: dict[str, Any], *, updating: bool, prune: bool) -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    import pytest

    from kvconform.config import settings
    from kvconform.errors import EnvironmentProblem
    from kvconform.report.terminal import make_console
    from kvconform.session.launch import hermetic
    from kvconform.snapshots.job import Job
    from kvconform.snapshots.plugin import Handed

    extra = given["extra_config"]
    chosen = {
        name: given[name]
        for name in ("connector", "engine", "device", "emulate_cuda", "pythonpath", "debug")
    }
    chosen["extra_config"] = settings.parse_extra_config(extra) if extra is not None else None
    chosen["select"] = [
        part for entry in given["select"] or [] for part in entry.split(",") if part
    ] or None
    merged = settings.load(chosen, file=given["config"])
    job = Job(
        merged,
        Path(given["directory"] or merged.base / "kvconform-snapshots").absolute(),
        updating=updating,
    )
    job.prepare()
    arguments = [
        "--pyargs",
        "kvconform.snapshots",
        "--import-mode=importlib",
        "-pno:cacheprovider",
        "--noconftest",
        "-q",
    ]
    arguments += ["--snapshot-update"] if updating else []
    with hermetic(merged.debug, "syrupy,kvconform.snapshots.plugin"):
        status = int(pytest.main(arguments, plugins=[Handed(job)]))
    if job.error is not None:
        raise job.error
    broken = [result.case for result in job.results if result.outcome == "error"]
    if broken or len(job.results) != len(job.cases) or status not in (0, 1):
        where = f" in {broken[0]}" if broken else ""
        raise EnvironmentProblem(
            f"the snapshot session was aborted{where} (pytest ended with status {status};"
            " --debug shows why)"
        )
    return _report(job, make_console(), prune=prune)


def _report(job: Job, console: Console, *, prune: bool) -> int:
    """Print the results and return the exit code."""
    from kvconform.report.layout import paragraph

    for warning in job.warnings:
        paragraph(console, "warning", warning)
    by = {
        outcome: [r for r in job.results if r.outcome == outcome]
        for outcome in ("changed", "new", "missing", "skipped", "same")
    }
    for result in (*by["changed"], *by["missing"], *(by["new"] if not job.updating else [])):
        console.print(f"{result.outcome.upper():8} {result.case}", style="bold", highlight=False)
        for sentence in result.sentences[:SHOWN]:
            console.print(f"  {sentence}", markup=False, highlight=False)
        if len(result.sentences) > SHOWN:
            console.print(f"  and {len(result.sentences) - SHOWN} more")
    unused = job.unused()
    if unused and prune:
        job.store.remove(unused)
    if unused:
        console.print(
            f"{'deleted' if prune else 'unused'}: {', '.join(sorted(unused)[:SHOWN])}",
            markup=False,
            highlight=False,
        )
    if (by["changed"] or by["new"]) and job.updating:
        touched = job.touched([*by["changed"], *by["new"]])
        console.print(
            f"requirements that this concerns: {', '.join(touched)}", markup=False, highlight=False
        )
    counts = ", ".join(f"{len(results)} {outcome}" for outcome, results in by.items() if results)
    other = ""
    if not job.updating and job.before not in (None, job.store.version):
        other = f", compared with those of vLLM {job.before}"
    console.print(
        f"snapshots of {job.settings.connector}, vLLM {job.vllm}{other}: {counts}",
        markup=False,
        highlight=False,
    )
    return int(not job.updating and bool(by["changed"] or by["missing"] or by["new"]))
