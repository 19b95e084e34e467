# SPDX-License-Identifier: Apache-2.0
"""The command line: options and arguments of every command.

It must not load vLLM or torch: the commands import what they need when they are called. Exit codes:
0 conformant, 1 not, 2 usage, 3 environment or harness error.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvconform import __version__
from kvconform.compat import installed
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError
from kvconform.explore.cli import explore
from kvconform.gpu.command import gpu
from kvconform.init.command import command as init
from kvconform.pack.command import pack, unpack
from kvconform.report.ci.command import command as ci
from kvconform.report.compare.command import command as compare
from kvconform.snapshots.command import app as snapshot

if TYPE_CHECKING:
    from kvconform.config.settings import Settings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help=(
        "Conformance suite for vLLM KV connectors. "
        "Exit codes: 0 conformant, 1 not, 2 usage, 3 environment or harness error."
    ),
)
option = functools.partial(typer.Option, show_default=False)

Text = str | None
Texts = list[str] | None
INTERRUPTED = 130
"""Status that typer returns for a KeyboardInterrupt."""
LISTS = ("requirements", "cases", "profiles", "connectors", "adapters")

CONNECTOR = typer.Argument(
    help="package.module:Class, or a name registered in vLLM's factory", show_default=False
)
EXTRA = "kv_connector_extra_config; {tmp} stands for a directory of each run"
SELECT = (
    "only these cases with all requirements, or only these requirements: ids, areas, globs; "
    "repeat, or a,b"
)
ENGINE = "engines to run on; live: the complete vLLM (docs/live.md) [all: reference and vllm]"
ROLES = "kv_both|kv_producer|kv_consumer"


def _version(wanted: bool) -> None:
    """Print the version, and end the program."""
    if wanted:
        typer.echo(f"kvconform {__version__}")
        raise typer.Exit


@app.callback()
def every(
    _: Annotated[
        bool,
        option(
            "--version",
            callback=_version,
            is_eager=True,
            help="version of kvconform; `kvconform version` also prints those of what it uses",
        ),
    ] = False,
) -> None:
    """Take the options that come before a command."""


@app.command()
def run(
    connector: Annotated[Text, CONNECTOR] = None,
    option_connector: Annotated[Text, option("--connector", hidden=True)] = None,
    extra_config: Annotated[
        Text, option("--extra-config", metavar="JSON|@FILE", help=EXTRA)
    ] = None,
    device: Annotated[
        Text, option("--device", metavar="cpu|cuda", help="where the KV cache is [cpu]")
    ] = None,
    emulate_cuda: Annotated[
        bool | None,
        option("--emulate-cuda", help="a CUDA device, emulated on the CPU (docs/emulation.md)"),
    ] = None,
    adapters: Annotated[
        Texts,
        option(
            "--adapter",
            metavar="NAME",
            help="stand-in for what the connector lacks here (kvconform list adapters; repeat)",
        ),
    ] = None,
    slow: Annotated[
        Text,
        option(
            "--slow",
            metavar="compute|transfers|all",
            help="streams of the device that are slow [all]",
        ),
    ] = None,
    engine: Annotated[
        Text, option("--engine", metavar="reference|vllm|live|all", help=ENGINE)
    ] = None,
    seeds: Annotated[
        int | None,
        option("--seeds", metavar="N", help="engine live: add N random workloads [0]"),
    ] = None,
    shrink: Annotated[
        bool | None,
        option(
            "--shrink/--no-shrink",
            help="engine live: reduce random workloads that fail [yes]",
        ),
    ] = None,
    scheduling: Annotated[
        Text, option("--scheduling", metavar="sync|async|all", help="scheduling to run with [all]")
    ] = None,
    select: Annotated[Texts, option("-k", metavar="ID...", help=SELECT)] = None,
    cases: Annotated[
        Texts,
        option(
            "--case",
            metavar="FILE",
            help="a case file of your own; without -k, run only that (repeat)",
        ),
    ] = None,
    shard: Annotated[
        Text,
        option(
            "--shard",
            metavar="I/N",
            help="only this part of the runs (kvconform merge joins the parts)",
        ),
    ] = None,
    profile: Annotated[Text, option("--profile", help="profile to judge by [core]")] = None,
    report_dir: Annotated[
        Text, option("--report-dir", metavar="DIR", help="where reports go [kvconform-report]")
    ] = None,
    strict: Annotated[bool | None, option("--strict", help="count SHOULD and MAY, too")] = None,
    workers: Annotated[
        int | None,
        option("--workers", "-n", metavar="N", help="worker processes [2, or 1 on one CPU]"),
    ] = None,
    seed: Annotated[
        int | None, option("--seed", metavar="N", help="seed of prompts and tokens [0]")
    ] = None,
    trace: Annotated[
        Text,
        option("--trace", metavar="CASE", help="run only these cases, and print timelines"),
    ] = None,
    role: Annotated[
        Text, option("--role", metavar=ROLES, help="kv_role, instead of the cases' own")
    ] = None,
    half: Annotated[
        Text,
        option(
            "--half",
            metavar="both|scheduler",
            help="scheduler: judge only the scheduler half; the worker half cannot run here [both]",
        ),
    ] = None,
    hook_timeout: Annotated[
        float | None, option("--hook-timeout", metavar="SECONDS", help="time limit per hook [10]")
    ] = None,
    pythonpath: Annotated[
        Texts,
        option("--pythonpath", metavar="DIR", help="where the connector's package is (repeat)"),
    ] = None,
    config: Annotated[
        Text,
        option(
            "--config", metavar="FILE", help="settings, instead of kvconform.toml or pyproject.toml"
        ),
    ] = None,
    verbose: Annotated[
        bool | None,
        option("--verbose", "-v", help="print all verdicts, and every failure at length"),
    ] = None,
    full: Annotated[
        bool | None,
        option("--full", help="write a line per requirement and run to report.jsonl"),
    ] = None,
    debug: Annotated[
        bool | None,
        option("--debug", help="show tracebacks and pytest's own output, keep temporary files"),
    ] = None,
    no_server: Annotated[
        bool,
        option("--no-server", help="do not use the server that kvconform watch has started"),
    ] = False,
) -> None:
    """Judge a connector; without an argument, the reference connector."""
    settings = _settings(**{name: value for name, value in locals().items() if name != "no_server"})
    if not no_server:
        from kvconform.watch import client

        code = client.run_if_warm(settings)
        if code is not None:
            raise typer.Exit(code)
    from kvconform.session import launch

    raise typer.Exit(launch.run(settings))


def _settings(
    *,
    connector: Text,
    option_connector: Text,
    extra_config: Text,
    select: Texts,
    config: Text,
    **options: Any,
) -> Settings:
    """Return the settings for the options of `run`. BadParameter for options that contradict."""
    from kvconform.config import settings

    if connector and option_connector:
        raise typer.BadParameter("name the connector once")
    selected = [part.strip() for entry in select or [] for part in entry.split(",") if part.strip()]
    if select and not selected:
        raise typer.BadParameter("-k names nothing")
    extra = None if extra_config is None else settings.parse_extra_config(extra_config)
    repeated = ("adapters", "cases", "pythonpath")
    given: dict[str, Any] = {
        **options,
        "connector": connector or option_connector,
        "extra_config": extra,
        "select": selected or None,
        **{name: options[name] or None for name in repeated},
    }
    again = {
        "--extra-config": extra_config,
        "--profile": options["profile"],
        "--role": options["role"],
        "--strict": options["strict"],
        "--hook-timeout": options["hook_timeout"],
        "--half": options["half"],
        "--config": config,
        "--device": options["device"],
        "--emulate-cuda": options["emulate_cuda"],
        "--adapter": options["adapters"],
        "--case": options["cases"],
        "--pythonpath": options["pythonpath"],
    }
    given["arguments"] = settings.as_arguments(again)
    return settings.load(given, file=config)


def _with_options_of_run(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `run`, but --no-server and --debug, before the function's own."""
    theirs = inspect.signature(run, eval_str=True).parameters.values()
    own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [
        *(each for each in theirs if each.name not in ("no_server", "debug")),
        *(each for each in own if each.kind is not each.VAR_KEYWORD),
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    return function


@app.command()
@_with_options_of_run
def watch(
    once: Annotated[bool, option("--once", help="judge once, and exit like run")] = False,
    **options: Any,
) -> None:
    """Judge a connector again whenever its source changes, until Ctrl-C.

    A server that has imported vLLM makes the runs; it ends after 15 minutes without any.
    """
    settings = _settings(**options, debug=None)
    installed.check_vllm()
    from kvconform.report.terminal import make_console
    from kvconform.watch import loop

    if once:
        raise typer.Exit(loop.once(settings, lambda sentence: typer.echo(sentence, err=True)))
    raise typer.Exit(loop.watch(settings, make_console()))


app.command()(explore)
app.command(name="compare")(compare)
app.command(name="ci")(ci)
app.command(name="init")(init)
app.command()(pack)
app.command()(unpack)
app.command()(gpu)


@app.command()
def merge(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR...", help="report directories, one per shard", show_default=False
        ),
    ],
    report_dir: Annotated[
        str,
        option(
            "--report-dir", metavar="DIR", help="where the joint report goes [kvconform-report]"
        ),
    ] = "kvconform-report",
    verbose: Annotated[
        bool, option("--verbose", "-v", help="print all verdicts, and every failure at length")
    ] = False,
    full: Annotated[
        bool, option("--full", help="write a line per requirement and run to report.jsonl")
    ] = False,
) -> None:
    """Join the reports of all shards of a run into one report with one verdict. Needs no vLLM."""
    from kvconform.report import merge as merging
    from kvconform.report.terminal import make_console

    raise typer.Exit(merging.merge(folders, report_dir, make_console(), verbose=verbose, full=full))


@app.command(name="list")
def list_(
    what: Annotated[
        str, typer.Argument(metavar=f"[{'|'.join(LISTS)}]", show_default=False)
    ] = "requirements",
    area: Annotated[
        Text,
        typer.Argument(
            metavar="[AREA]", help="only the requirements or cases of this area", show_default=False
        ),
    ] = None,
    everything: Annotated[bool, option("--all", help="all areas, with whole texts")] = False,
) -> None:
    """List requirements, cases, profiles, the catalogue's connectors, or adapters."""
    from kvconform import commands

    commands.show(what, area, everything=everything)


@app.command()
def explain(
    identifier: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="a requirement, case, planted defect, rule (R035) or bug (B040)",
        ),
    ],
) -> None:
    """Explain a requirement, a case, a planted defect, a rule or a bug."""
    from kvconform.contract.loader import load_spec
    from kvconform.report.explain import explain as text_of

    typer.echo(text_of(load_spec(), identifier), nl=False)


@app.command()
def lint(
    root: Annotated[
        Text,
        typer.Argument(
            metavar="[DIR]",
            help="has cases/ and requirements/; default: the built-in specification",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool,
        option("--strict", help="report each requirement that no defect violates; it counts"),
    ] = False,
) -> None:
    """Check the specification itself for mistakes."""
    from kvconform import commands

    raise typer.Exit(commands.lint(root, strict=strict))


@app.command()
def defects(
    ids: Annotated[
        Texts,
        typer.Argument(
            metavar="[ID]...",
            help="defects, or requirements for all of their defects [all]; "
            "or package.module:NAME, a Fault or connector of your own",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int,
        option(
            "--workers", "-n", metavar="N", help="worker processes [two more than CPUs, at most 4]"
        ),
    ] = 0,
    report_dir: Annotated[
        Text, option("--report-dir", metavar="DIR", help="where kill-matrix.json and .md go")
    ] = None,
    select: Annotated[
        Texts, option("-k", metavar="CASE...", help="cases for a defect of your own [all]")
    ] = None,
    strict: Annotated[
        bool, option("--strict", help="a MUST that no defect violates is a failure")
    ] = False,
    executor: Annotated[
        Text,
        option("--executor", metavar="WHERE", help="processes, or a Ray cluster (docs/scale.md)"),
    ] = None,
) -> None:
    """Run the planted defects and print the kill matrix. For the development of kvconform."""
    from kvconform import commands

    cases = [part for entry in select or [] for part in entry.split(",") if part]
    raise typer.Exit(
        commands.defects(ids or [], workers, report_dir, cases, strict=strict, executor=executor)
    )


@app.command()
def drift() -> None:
    """Compare the installed vLLM with the source that the requirements cite.

    Prints the requirements whose source has changed, and the hooks that are new, gone or changed.
    Exit code 1: there are some.
    """
    from kvconform import commands

    raise typer.Exit(commands.drift())


@app.command()
def version() -> None:
    """Print the versions of kvconform, vLLM, and what a run depends on."""
    from kvconform import commands

    commands.versions()


app.add_typer(
    snapshot,
    name="snapshot",
    help="Golden snapshots of a connector's metadata, hooks and stored KV.",
)


WITH_DEBUG = (["run"], ["snapshot", "check"], ["snapshot", "update"])
"""Commands with an option --debug of their own: it also shows pytest's output."""


def _command(arguments: list[str]) -> list[str]:
    """Return the command in a command line: one word, or two of a group."""
    words = [word for word in arguments if not word.startswith("-")]
    return words[: 2 if words[:1] == ["snapshot"] else 1]


def _refuse_empty(arguments: list[str]) -> None:
    """Raise UsageError for an empty argument: nothing would be judged by what it was meant to be.

    An empty `-k` has a sentence of its own.
    """
    for before, word in pairwise(["", *arguments]):
        option, _, value = word.partition("=")
        if word.startswith("--") and "=" in word and not value:
            raise UsageError(f"{option} has no value; is a variable unset?")
        if not word and before.startswith("-") and before not in ("-k", "--select"):
            raise UsageError(f"{before} has no value; is a variable unset?")
        if not word and not before.startswith("-"):
            raise UsageError("an argument is empty; is a variable unset?")


def _misused(error: Any) -> str:
    """Return an error of the option parser, such as an unknown option, as a sentence."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = "kvconform" if context is None else context.command_path
    return f"{message[:1].lower()}{message[1:]}; {command} -h shows how it is used"


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the program: print one sentence for an error, and a traceback only with --debug."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in ("stdout", "stderr"):  # None if the shell has closed it
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    if debug and _command(arguments) in WITH_DEBUG:
        arguments.append("--debug")
    try:
        _refuse_empty(arguments)
        status = app(args=arguments, prog_name="kvconform", standalone_mode=False)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
    except KvconformError as error:
        if debug and error.__cause__ is not None:
            raise
        typer.echo(f"kvconform: {error.message}", err=True)
        status = error.code
    except KeyboardInterrupt:
        typer.echo("kvconform: interrupted", err=True)
        status = 3
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):
            typer.echo(f"kvconform: {_misused(error)}", err=True)
            status = 2
        elif debug:
            raise
        elif _lacks_vllm(error):
            typer.echo(f"kvconform: {installed.NO_VLLM}", err=True)
            status = EnvironmentProblem.code
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" to {error.filename}" if error.filename else ""
            typer.echo(f"kvconform: cannot write{where}: {error.strerror}", err=True)
            status = EnvironmentProblem.code
        elif isinstance(error, FileNotFoundError) and not _in_a_directory():
            typer.echo("kvconform: the current directory does not exist any more", err=True)
            status = EnvironmentProblem.code
        else:
            first = (str(error).splitlines() or [""])[0]
            sentence = f"internal error, {type(error).__name__}: {first} (--debug shows where)"
            typer.echo(f"kvconform: {sentence}", err=True)
            status = 3
    sys.exit(status if isinstance(status, int) else 0)


def _in_a_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _lacks_vllm(error: Exception) -> bool:
    """Return whether an import failed because vLLM is not installed.

    Modules that vLLM brings along, such as torch and numpy, may be missed first.
    """
    if not isinstance(error, ModuleNotFoundError):
        return False
    return error.name == "vllm" or installed.vllm_version() is None
