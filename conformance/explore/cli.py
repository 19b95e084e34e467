# SPDX-License-Identifier: Apache-2.0
"""The options of `kvconform explore`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from kvconform.errors import UsageError

option = functools.partial(typer.Option, show_default=False)

CONNECTOR = typer.Argument(
    help="package.module:Class, a registered name, or catalogue:NAME", show_default=False
)
PROFILE = (
    "gate: 200 workloads, always the same; small: 2,000 small ones;"
    " nightly: 5,000, others each day; hunt: until --minutes or --seconds are over; races: aborts"
)
ENGINES = ("reference", "vllm", "all")


def explore(
    connector: Annotated[str | None, CONNECTOR] = None,
    option_connector: Annotated[str | None, option("--connector", hidden=True)] = None,
    extra_config: Annotated[
        str | None, option("--extra-config", metavar="JSON|@FILE", help="kv_connector_extra_config")
    ] = None,
    profile: Annotated[
        str, option("--profile", metavar="gate|small|nightly|hunt|races", help=f"{PROFILE} [gate]")
    ] = "gate",
    examples: Annotated[
        int | None,
        option("--examples", min=1, metavar="N", help="workloads, at most [the profile's]"),
    ] = None,
    minutes: Annotated[
        float | None,
        option("--minutes", metavar="N", help="time limit of all, shrinking included"),
    ] = None,
    seconds: Annotated[
        float | None, option("--seconds", metavar="N", help="the same in seconds")
    ] = None,
    engine: Annotated[
        str | None, option("--engine", metavar="|".join(ENGINES), help="engines to run on [all]")
    ] = None,
    scheduling: Annotated[
        str | None,
        option("--scheduling", metavar="sync|async|all", help="scheduling to run with [all]"),
    ] = None,
    seed: Annotated[
        int | None, option("--seed", metavar="N", help="other workloads, and other tokens [0]")
    ] = None,
    workers: Annotated[
        int | None, option("--workers", "-n", metavar="N", help="processes [2, or 1 on one CPU]")
    ] = None,
    executor: Annotated[
        str | None,
        option("--executor", metavar="WHERE", help="processes, here, or Ray (docs/scale.md)"),
    ] = None,
    out: Annotated[
        Path, option("--out", metavar="DIR", help="for failures, a case each [kvconform-found]")
    ] = Path("kvconform-found"),
    corpus: Annotated[
        list[str] | None,
        option(
            "--corpus",
            metavar="PLACE",
            help="what reached something new or failed: DIR, redis://HOST or github:OWNER/REPO"
            " (repeat; docs/explore.md) [hunt: kvconform-corpus]",
        ),
    ] = None,
    shrink: Annotated[
        int,
        option(
            "--shrink", min=0, metavar="N", help="runs to spend on making each failure small [400]"
        ),
    ] = 400,
    emulate_cuda: Annotated[
        bool | None, option("--emulate-cuda", help="a CUDA device, emulated on the CPU")
    ] = None,
    adapters: Annotated[
        list[str] | None,
        option("--adapter", metavar="NAME", help="stand-in for what it lacks here (repeat)"),
    ] = None,
    pythonpath: Annotated[
        list[str] | None,
        option("--pythonpath", metavar="DIR", help="where its package is (repeat)"),
    ] = None,
    config: Annotated[
        str | None,
        option(
            "--config", metavar="FILE", help="settings, instead of kvconform.toml or pyproject.toml"
        ),
    ] = None,
    verbose: Annotated[
        bool, option("--verbose", "-v", help="name all requirements that were never exercised")
    ] = False,
) -> None:
    """Run random workloads; shrink failures to cases for `kvconform run --case FILE`."""
    from kvconform.config import settings
    from kvconform.config.limits import in_seconds
    from kvconform.execute.choice import parse
    from kvconform.explore.command import run

    if connector and option_connector:
        raise typer.BadParameter("name the connector once")
    known = (*ENGINES, "live")  # live is refused later, with a hint
    if engine is not None and not {each.strip() for each in engine.split(",")} <= set(known):
        raise UsageError(
            f"there is no engine {engine!r} of explore;"
            " there are reference and vllm, and all for both"
        )
    again = {"--extra-config": extra_config, "--config": config}
    repeated = {"--adapter": adapters, "--pythonpath": pythonpath}
    given: dict[str, Any] = {
        "connector": connector or option_connector,
        "extra_config": settings.parse_extra_config(extra_config)
        if extra_config is not None
        else None,
        "engine": engine,
        "scheduling": scheduling,
        "seed": seed,
        "workers": workers,
        "emulate_cuda": emulate_cuda,
        "adapters": adapters or None,
        "pythonpath": pythonpath or None,
        "arguments": settings.as_arguments({**again, "--emulate-cuda": emulate_cuda, **repeated}),
    }
    places = corpus or (["kvconform-corpus"] if profile == "hunt" else [])
    how = {
        "profile": profile,
        "examples": examples,
        "seconds": in_seconds(minutes, seconds),
        "out": out,
        "tries": shrink,
        "places": places,
        "verbose": verbose,
        "where": parse(executor),
    }
    raise typer.Exit(run(settings.load(given, file=config), **how))  # type: ignore[arg-type]
