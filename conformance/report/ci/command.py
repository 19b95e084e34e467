# SPDX-License-Identifier: Apache-2.0
"""`kvconform ci`: a report's annotations and summary for a CI system, and the job's exit code."""

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
from kvconform.report.ci.address import artefact, run_page
from kvconform.report.ci.annotation import annotated
from kvconform.report.ci.formats import Place, markdown
from kvconform.report.ci.formats import command as workflow_command
from kvconform.report.collector import EXIT_CODES
from kvconform.report.compare.changes import compare
from kvconform.report.jsonl import Report, read

option = functools.partial(typer.Option, show_default=False)

POLICIES = ("any", "new", "never")
"""What fails a job.

- `any`: what also fails `kvconform run`.
- `new`: failures that the baseline does not have.
- `never`: no failure.

A report without a verdict fails a job with any policy.
"""


def exit_code(report: Report, policy: str, new: Collection[object] | None) -> int:
    """Return 0, 1 (the connector's fault) or 3 (no verdict); with policy `any`, the run's status.

    There is no verdict if the harness or the environment failed, or the report was cut off. `new`
    are the failures that count and are not in the baseline; with policy `new` they outweigh a
    missing verdict.
    """
    if policy == "any":
        # A report of an earlier version does not have the status of its run.
        status = report.footer.exit_code if report.footer is not None else None
        return EXIT_CODES[report.verdict or "error"] if status is None else status
    if report.silent and not (policy == "new" and new):
        return 3
    return 1 if policy == "new" and new else 0


FORMATS = ("github", "gitlab", "plain")
SHOW = "format of annotations [github in GitHub Actions, gitlab in GitLab CI, else plain]"
FAIL_ON = "what fails the job [any; new with --baseline]"


def command(
    report_dir: Annotated[
        str, typer.Argument(metavar="REPORT_DIR", help="report of kvconform run or merge")
    ] = "kvconform-report",
    format_: Annotated[str, option("--format", metavar="|".join(FORMATS), help=SHOW)] = "",
    baseline: Annotated[
        str | None, option("--baseline", metavar="REPORT", help="an earlier report")
    ] = None,
    fail_on: Annotated[
        str | None, option("--fail-on", metavar="|".join(POLICIES), help=FAIL_ON)
    ] = None,
) -> None:
    """Write annotations and a Markdown summary; exit by policy. Needs no vLLM."""
    format_ = format_ or _format()
    policy = fail_on or ("new" if baseline else "any")
    for name, value, known in (("--format", format_, FORMATS), ("--fail-on", policy, POLICIES)):
        if value not in known:
            raise UsageError(f"{name} {value} is unknown: one of {', '.join(known)}")
    if policy == "new" and baseline is None:
        raise UsageError("--fail-on new needs --baseline REPORT to compare with")
    report = read(report_dir)
    folder = report.path.parent
    comparison = compare(read(baseline), report) if baseline is not None else None
    new = comparison.added if comparison is not None else None
    found = annotated(report, load_spec(), new if policy == "new" else None)
    place = _place(format_, folder)
    try:
        if format_ == "github":
            for one in found:
                typer.echo(workflow_command(one, place))
        elif format_ == "gitlab":
            quality = formats.code_quality(found, place)
            (folder / formats.NAME).write_text(quality, encoding="utf-8")
        text = markdown(report, found, comparison, place)
        page = os.environ.get("GITHUB_STEP_SUMMARY") if format_ == "github" else None
        if page:
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(text)
        else:
            typer.echo(text)
    except OSError as error:
        raise EnvironmentProblem(f"{error.filename} cannot be written: {error.strerror}") from None
    raise typer.Exit(exit_code(report, policy, new))


def _place(format_: str, folder: Path) -> Place:
    """Return where the reader of this format finds the report in `folder`."""
    if format_ == "github" and (page := run_page(os.environ)):
        return Place(archive=page)
    if format_ == "gitlab" and (address := artefact(os.environ, folder)):
        return Place(folder=address)
    return Place(folder=str(folder))


def _format() -> str:
    """Return the format of the CI system that this process runs in."""
    if os.environ.get("GITHUB_ACTIONS"):
        return "github"
    if os.environ.get("GITLAB_CI"):
        return "gitlab"
    return "plain"
