# SPDX-License-Identifier: Apache-2.0
"""The command line of `kvconform gpu` (docs/kernels.md)."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated

import typer

from kvconform.errors import EnvironmentProblem, UsageError

option = functools.partial(typer.Option, show_default=False)
DEVICES = ("cuda", "emulated")


def gpu(
    minutes: Annotated[
        float, option("--minutes", metavar="N", help="most minutes of this call [9]")
    ] = 9,
    out: Annotated[
        str,
        option("--out", metavar="DIR", help="where the results are and go [kvconform-gpu]"),
    ] = "kvconform-gpu",
    afresh: Annotated[
        bool, option("--afresh", help="start again; else this call goes on with those in DIR")
    ] = False,
    only: Annotated[
        list[str] | None,
        option("--only", metavar="PART", help="only this part, also if it has been run (repeat)"),
    ] = None,
    jobs: Annotated[
        int,
        option(
            "--jobs",
            metavar="N",
            help="parts that run at the same time, after those alone [3 to 8, by processors]",
        ),
    ] = min(8, max(3, (os.cpu_count() or 1) // 2)),
    device: Annotated[
        str, option("--device", metavar="cuda|emulated", hidden=True, help="emulated: for tests")
    ] = "cuda",
) -> None:
    """Make all checks that need a GPU, in order of worth, within a time limit.

    Exit codes: 0 all that ran passed, 1 a part failed or was timed out, 2 usage, 3 no GPU.
    """
    from kvconform.files import check_writable
    from kvconform.gpu import page, session
    from kvconform.gpu.parts import Setting

    if minutes <= 0:
        raise UsageError(f"--minutes {minutes:g} is no time")
    if device not in DEVICES:
        raise UsageError(f"--device {device} is none of {', '.join(DEVICES)}")
    found = session.machine()
    emulated = device == "emulated"
    if found.device is None and not emulated:
        raise EnvironmentProblem("kvconform gpu needs a GPU that torch can use; none was found")
    folder = Path(out).absolute()
    check_writable("--out", folder)
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting.here(found, folder, emulated)
    result = session.run(
        setting, minutes, typer.echo, afresh=afresh, only=only or [], jobs=max(1, jobs)
    )
    typer.echo(f"results: {folder / page.NAME}")
    raise typer.Exit(result.code)
