# SPDX-License-Identifier: Apache-2.0
"""`kvconform pack` and `kvconform unpack` (docs/offline.md)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from kvconform.errors import EnvironmentProblem
from kvconform.pack import launch

option = functools.partial(typer.Option, show_default=False)


def pack(
    out: Annotated[str, option("--out", metavar="DIR", help="the pack: a folder to copy")],
    vllm: Annotated[str, option("--vllm", metavar="VERSION", help="vLLM release [0.32.0]")] = (
        "0.32.0"
    ),
    have: Annotated[
        str | None,
        option("--have", metavar="FILE", help="`pip list` of the target; leave out what it has"),
    ] = None,
    python: Annotated[
        str, option("--python", metavar="X.Y", help="the target's Python [3.12]")
    ] = "3.12",
    platform: Annotated[
        str, option("--platform", metavar="TAG", help="its platform [manylinux_2_28_x86_64]")
    ] = "manylinux_2_28_x86_64",
    capability: Annotated[
        str | None,
        option(
            "--capability",
            metavar="X.Y",
            help="its GPU's compute capability: with vLLM's compiled parts for that [without]",
        ),
    ] = None,
    find_links: Annotated[
        list[str] | None,
        option("--find-links", metavar="DIR|URL", help="where more wheels are, as pip's (repeat)"),
    ] = None,
    max_mb: Annotated[float, option("--max-mb", metavar="MB", help="its size at most [60]")] = 60,
) -> None:
    """Write a folder that runs kvconform on a machine with torch and without a package index."""
    from kvconform.pack import build  # its libraries are for this command alone
    from kvconform.pack.compiled import Capability
    from kvconform.pack.fetch import Target

    folder = Path(out)
    known = build.read_have(Path(have)) if have is not None else {}
    typer.echo(f"fetching vLLM {vllm} and what it needs; this takes minutes", err=True)
    done = build.build(
        vllm,
        folder,
        Target(python, platform),
        have=known,
        most=max_mb,
        links=find_links or [],
        capability=Capability.of(capability) if capability is not None else None,
    )
    for part in done.parts[:5]:
        typer.echo(f"{build.megabytes(part.size):>8}  {part.name} {part.version}")
    rest = sum(part.size for part in done.parts[5:])
    typer.echo(f"{build.megabytes(rest):>8}  {len(done.parts[5:])} others")
    typer.echo(f"{build.megabytes(done.size):>8}  {folder}")
    typer.echo(f"on the target:  python3 {folder.name} run --device cuda")


def unpack(
    folder: Annotated[str, typer.Argument(metavar="PACK", show_default=False)],
    into: Annotated[
        str | None, option("--into", metavar="DIR", help="where its packages go [PACK/site]")
    ] = None,
) -> None:
    """Unpack a pack for this Python, and print the line that makes it importable."""
    try:
        site = launch.unpack(Path(folder), Path(into) if into is not None else None)
    except launch.CannotUnpack as problem:
        raise EnvironmentProblem(str(problem)) from None
    typer.echo(launch.said(site))
