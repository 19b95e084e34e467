# SPDX-License-Identifier: Apache-2.0
"""`kvconform init`: write the missing files without questions, and run a first check."""

from __future__ import annotations

import functools
import json
import os
import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from kvconform.compat.installed import check_vllm
from kvconform.config.exists import check_connector_exists
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.files import broken_toml
from kvconform.init import write
from kvconform.init.find import Found, find, hands_over, named
from kvconform.init.origin import Origin, origin
from kvconform.report.causes import THROUGH

option = functools.partial(typer.Option, show_default=False)

SETTINGS = "kvconform.toml"
PYPROJECT = "pyproject.toml"


def command(
    folder: Annotated[
        str,
        typer.Argument(metavar="[DIR]", help="the connector's repository [.]", show_default=False),
    ] = "",
    connector: Annotated[
        str | None, option("--connector", metavar="MODULE:CLASS", help="instead of looking for it")
    ] = None,
    template: Annotated[
        str | None,
        option("--template", metavar="DIR", help="begin a new connector there, one that passes"),
    ] = None,
    run: Annotated[
        bool, option("--run/--no-run", help="run a first check, of a dozen cases [--run]")
    ] = True,
    workers: Annotated[
        int | None,
        option("--workers", "-n", metavar="N", help="processes of that check [2, or 1 on one CPU]"),
    ] = None,
) -> None:
    """Find the connector of a repository, write settings, a workflow and a test, and check it."""
    if template is not None and (folder or connector):
        raise UsageError(
            "--template cannot be combined with a folder or --connector: it creates both"
        )
    repository = Path(template or folder or ".").expanduser().resolve()
    if template is not None:
        write.template(repository)
        typer.echo(f"new     {repository}: FolderConnector, a connector to start from")
    elif not repository.is_dir():
        if repository.exists():
            raise UsageError(f"{repository} is no folder")
        raise UsageError(
            f"there is no folder {repository}; --template {repository} begins a new connector there"
        )
    here = origin()
    files = _files(repository, connector, here, is_judged=run)
    for file in write.write(repository, files):
        if file.kept and template is not None:
            continue  # it is part of the template, which is new
        typer.echo(f"{'kept ' if file.kept else 'wrote'}   {file.path}")
    if here.url is None:
        typer.echo(
            "        (say in the workflow where kvconform is, and which commit:"
            " this one was not installed from a repository)"
        )
    if not run:
        return
    try:
        check_vllm()
    except EnvironmentProblem as problem:
        advice = (
            "nothing was judged; from a checkout of kvconform, nox -s init -- DIR installs vLLM"
        )
        raise EnvironmentProblem(f"{problem.message.rstrip('.')}; {advice}") from None
    _judge(repository, workers)


def _files(
    repository: Path, connector: str | None, here: Origin, *, is_judged: bool
) -> dict[str, str]:
    """Return the repository's files by path; "" for the settings if they exist already.

    UsageError for a connector that is to be judged and does not exist, so that nothing is written.
    """
    place, known = _configured(repository)
    if known and connector and known != connector:
        raise UsageError(f"{place} names {known}: change it there")
    found: Found | None = None
    if not known:
        found = find(repository) if connector is None else named(repository, connector)
        if connector is not None and found is None and is_judged:
            check_connector_exists(connector, [str(repository)])
    if found is not None:
        typer.echo(f"found   {found.connector}, {found.file.relative_to(repository)}:{found.line}")
        if hands_over(found):
            typer.echo(
                "        (it seems to hand KV from a producer to a consumer: declare capability"
                " transfer, and judge that with --profile transfer)"
            )
    name = known or connector or (found.connector if found else "")
    if place and not known:  # later runs would judge the default, the reference connector
        raise UsageError(
            f"{place} has settings and names no connector:"
            f" write connector = {json.dumps(name)} there, before the tables"
        )
    files: dict[str, str] = {}
    if place == SETTINGS:
        files[SETTINGS] = ""
    elif not place:
        files[SETTINGS] = write.settings(repository, name, found)
    path, text = write.workflow(repository, here)
    return {**files, path: text, "tests/test_conformance.py": write.test_file()}


def _configured(repository: Path) -> tuple[str | None, str | None]:
    """Return (file with the repository's settings, connector that it names), None if absent."""
    for name in (SETTINGS, PYPROJECT):
        try:
            data: dict[str, Any] = tomllib.loads((repository / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise broken_toml(repository / name, error) from None
        table = data if name == SETTINGS else data.get("tool", {}).get("kvconform")
        if isinstance(table, dict):
            connector = table.get("connector")
            return name, connector if isinstance(connector, str) and connector else None
    return None, None


def _judge(repository: Path, workers: int | None) -> None:
    from kvconform.config import settings
    from kvconform.session import launch

    typer.echo("")
    file = repository / SETTINGS if (repository / SETTINGS).is_file() else repository / PYPROJECT
    arguments = ["--profile", "smoke"]
    if Path.cwd() != repository:
        arguments += ["--config", str(file)]
    given = {
        "profile": "smoke",
        "report_dir": str(repository / "kvconform-report"),
        "workers": workers,
        "arguments": arguments,
    }
    loaded = settings.load(given, file=str(file))
    code = launch.run(loaded)
    again = os.environ.get(THROUGH) or "kvconform run"
    place = shlex.quote(str(repository))
    typer.echo(f"\nThose were a dozen cases. All of them: cd {place} && {again}")
    raise typer.Exit(code)
