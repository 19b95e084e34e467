# SPDX-License-Identifier: Apache-2.0
"""`kvconform ci`: from a report to what a CI system shows, and to the job's end.

What ends a job.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from kvconform.contract.loader import load_spec
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.report.ci import formats
from kvconform.report.ci.annotation import annotated
from kvconform.report.ci.formats import command as workflow_command
from kvconform.report.ci.formats import markdown
from kvconform.report.collector import EXIT_CODES
from kvconform.report.compare.changes import compare
from kvconform.report.compare.reports import Report, read

option = functools.partial(typer.Option, show_default=False)

POLICIES = ("any", "new", "never")
"""any: whatever ends `kvconform run`; new: only what the baseline did not have; never: only a report that is none."""


def exit_code(report: Report, policy: str, new: Collection[object] | None) -> int:
    """0, 1 (the connector's fault) or 3 (no answer: harness or environment, or a report that was cut off).
    `new`: what counts against the connector and did not in the baseline; it outweighs that there is no answer."""
    if report.silent and not (policy == "new" and new):
        return 3
    if policy == "never":
        return 0
    if policy == "new":
        return 1 if new else 0
    return EXIT_CODES[report.answer or "error"]


FORMATS = ("github", "gitlab", "plain")
SHOW = "whose annotations [github in GitHub Actions, gitlab in its CI, else plain]"
FAIL_ON = "what ends the job [any; new with --baseline]"


def command(
    report_dir: Annotated[
        str, typer.Argument(metavar="REPORT_DIR", help="what kvconform run or merge has written")
    ] = "kvconform-report",
    format_: Annotated[str, option("--format", metavar="|".join(FORMATS), help=SHOW)] = "",
    baseline: Annotated[
        str | None, option("--baseline", metavar="REPORT", help="an earlier report")
    ] = None,
    fail_on: Annotated[
        str | None, option("--fail-on", metavar="|".join(POLICIES), help=FAIL_ON)
    ] = None,
) -> None:
    """Annotations, a summary in Markdown, and an exit code by policy. Needs no vLLM."""
    format_ = format_ or (
        "github"
        if os.environ.get("GITHUB_ACTIONS")
        else "gitlab"
        if os.environ.get("GITLAB_CI")
        else "plain"
    )
    policy = fail_on or ("new" if baseline else "any")
    for name, value, known in (("--format", format_, FORMATS), ("--fail-on", policy, POLICIES)):
        if value not in known:
            raise UsageError(f"{name} {value} is unknown: one of {', '.join(known)}")
    if policy == "new" and baseline is None:
        raise UsageError("--fail-on new needs --baseline: the report that new failures are new to")
    report = read(report_dir)
    comparison = compare(read(baseline), report) if baseline is not None else None
    new = comparison.added if comparison is not None else None
    found = annotated(report, load_spec(), new if policy == "new" else None)
    try:
        if format_ == "github":
            for one in found:
                typer.echo(workflow_command(one))
        elif format_ == "gitlab":
            (Path(report_dir) if Path(report_dir).is_dir() else Path(report_dir).parent).joinpath(
                formats.NAME
            ).write_text(formats.code_quality(found), encoding="utf-8")
        text = markdown(report, found, comparison)
        place = os.environ.get("GITHUB_STEP_SUMMARY") if format_ == "github" else None
        if place:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write(text)
        else:
            typer.echo(text)
    except OSError as error:
        raise EnvironmentProblem(f"{error.filename} cannot be written: {error.strerror}") from None
    raise typer.Exit(exit_code(report, policy, new))
