# SPDX-License-Identifier: Apache-2.0
"""The controller's half of the pytest plugin.

It sends the settings to the workers, collects their results, handles their deaths, and writes the
reports.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.markup import escape

from kvconform.compat.installed import check_vllm
from kvconform.config.catalogue import check_servers, lacking
from kvconform.config.exists import check_connector_exists, check_connector_name, check_router
from kvconform.config.mentioned import unmentioned
from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError
from kvconform.files import scratch_root, why_not
from kvconform.judge.records import CaseReport, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.live.random import spec_for
from kvconform.pack import unpacked
from kvconform.process import scratch
from kvconform.process.servers import Commands
from kvconform.process.watchdog import Note, read_note
from kvconform.report import jsonl, statement, summary, terminal
from kvconform.report.collector import Collector
from kvconform.report.compact import judged_of, restored
from kvconform.report.html import anchor, page
from kvconform.report.jsonl import FooterLine, HeaderLine
from kvconform.report.merge import JUNIT
from kvconform.report.progress import Progress
from kvconform.run.lines import Lines
from kvconform.session import crash
from kvconform.session.worker import RUNNER, SPENT, START, server_problems

STARTS = 3
"""The run is aborted at this number of worker deaths before any case, or of worker failures."""

PATIENCE = 180.0
"""Seconds that workers may lose to hooks that do not return and to processes that end.

Then the run is given up: the connector fails a MUST, and all runs together might take hours.
"""
REPLACED = 5.0
"""Seconds that it takes to replace a worker, about."""

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)

VERDICTS = (summary.NAME, anchor.NAME, statement.NAME, statement.BADGE, JUNIT)
"""Files of a report that are written at its end; report.jsonl is written from the beginning."""

Listener = Callable[[CaseReport, Lines, float], None]
"""Function that gets the result of each run, the lines that it executed, and its seconds."""


class GaveUp(KvconformError):
    """A run that was ended because the connector's failures cost too much time. Exit code 1."""

    code = 1


class Controller:
    """State of one run, registered as a pytest plugin.

    `exit_code` and `problem` are the result once pytest has ended. The constructor raises
    KvconformError if the settings name something that does not exist.
    """

    def __init__(
        self,
        settings: Settings,
        console: Console,
        *,
        quiet_workers: bool = False,
        first: Sequence[str] = (),
        traced: Sequence[str] = (),
        untraced: Sequence[str] = (),
        listener: Listener | None = None,
    ) -> None:
        self.settings = settings
        self.console = console
        self.quiet_workers = quiet_workers
        self.first = list(first)
        self.traced = list(traced)
        self.untraced = list(untraced)
        self.listener = listener
        self.vllm, self.warnings = check_vllm()
        self.warnings += lacking(settings.catalogue)
        check_servers(settings.servers)
        self.warnings += unpacked.notes()
        check_connector_name(settings.connector, settings.pythonpath)
        if RUNNER not in os.environ:
            check_connector_exists(
                settings.connector, settings.pythonpath, stand_ins=bool(settings.adapters)
            )
        check_router(settings.router, settings.pythonpath)
        self.warnings += unmentioned(settings.connector, settings.all_options, settings.pythonpath)
        self.spec = spec_for(settings)
        selection = select(self.spec, settings, self.vllm)
        self.collector = Collector(self.spec, settings, selection, self.vllm)
        # By these lists, the workers compact rows, and the header lists them.
        self._judged = judged_of(self.spec.requirements, selection.judged)
        shown = [] if settings.full else selection.shown
        self._listed = judged_of(self.spec.requirements, shown)
        self.hint = terminal.hint_of(self.collector)  # before the last report is gone
        self.folder = Path(settings.report_dir)
        scratch.remove_abandoned()
        parent = None if settings.debug else scratch_root()  # kept folders go to a disk
        self.scratch = scratch.make("run", parent, keep=settings.debug)
        self.commands = Commands(settings, self.scratch, self.folder / "logs" / "commands.log")
        self.progress = Progress(console, len(selection.variants))
        self.began = time.monotonic()
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.problem: KvconformError | None = None
        self.exit_code: int | None = None
        self._stream: jsonl.Stream | None = None
        self._early_deaths = 0
        self._troubles = 0
        self._ran_something = False
        self._lost = 0.0
        self.in_doubt = False
        """Whether a run loaded KV of another run: other runs may have, without a proof."""

    # -- pytest's hooks

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Print the header, open the report, and run the set-up commands."""
        terminal.header(self.console, self.collector, self.warnings, hint=self.hint)
        try:
            self.open_report()
            self.commands.up()
        except KvconformError as error:
            self.stop(error)
        self.progress.start()

    def pytest_configure_node(self, node: Any) -> None:
        """Send the settings to a worker."""
        node.workerinput["kvconform"] = self.for_worker()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Narrow the selection to the collected items."""
        self.collector.only({name[name.index("[") + 1 : -1] for name in ids if name.endswith("]")})
        self.progress.total = len(self.collector.selection.variants)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Narrow the selection to the collected items, without worker processes."""
        if session.items:
            self.pytest_xdist_node_collection_finished([item.name for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the result of a run to the report."""
        text = getattr(report, "kvconform", None)
        if text is None:
            if report.when == "setup" and report.failed:
                why = str(report.longrepr).strip().splitlines()[-1]
                self.stop(EnvironmentProblem(f"a case could not be set up: {why}"))
            return
        found = restored(json.loads(text), self._judged)
        if found.abort is not None:
            self._trouble(*found.abort, final=found.foreign)
        self._take(found, getattr(report, "kvconform_lines", {}), report.duration)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """Judge the run during which a worker died."""
        note = read_note(self.scratch / f"{report.node.gateway.id}.note")
        sentence = crash.sentence(note)
        if note is not None and note.case == SPENT:
            # The worker ended on purpose, after its result: xdist's crash report means nothing.
            report.outcome = "passed"
            report.when = "setup"
            report.longrepr = None
            return
        starting = note is not None and note.case == START
        if note is not None and starting:
            self._died_at_start(note, sentence)
        variant = next(
            (v for v in self.collector.selection.variants if crashitem.endswith(f"[{v.id}]")), None
        )
        if variant is None:
            self.stop(EnvironmentProblem(f"a worker died in {crashitem}: {sentence}"))
            return
        if starting:
            wanted = [self.spec.requirements[name] for name in self.collector.selection.judged]
            words = f"a replacement worker did not start: {sentence}"
            rows = rows_for(wanted, variant, Verdict.ERROR, words, strict=self.settings.strict)
        else:
            rows = crash.rows_of(
                note,
                variant,
                self.spec,
                self.collector.selection,
                self.collector.capabilities,
                self.settings.strict,
            )
        report.longrepr = f"{variant.id}: {sentence}"
        self._take(CaseReport(variant.id, rows=rows))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Abort the run if workers keep dying before they have run a case."""
        if error is None or self._ran_something:
            return
        note = read_note(self.scratch / f"{node.gateway.id}.note")
        if note is None or note.case is None:
            # The worker died before it had a case; its replacement would die, too.
            self._early_deaths += 1
            if self._early_deaths >= STARTS:
                log = self.folder / "logs" / f"{node.gateway.id}.log"
                self.stop(EnvironmentProblem(f"worker processes cannot be started; see {log}"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr: Any) -> None:
        """Record an internal error of pytest or a plugin as the problem of the run."""
        if self.problem is None:
            last = str(excrepr).strip().splitlines()[-1]
            self.problem = EnvironmentProblem(
                f"internal error of the harness: {last} (--debug shows where)"
            )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record the interruption as the problem of the run."""
        if self.problem is None and excinfo.errisinstance(KeyboardInterrupt):
            self.problem = EnvironmentProblem("interrupted")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Any:
        """Write the reports after the workers have ended, and set the exit code."""
        try:
            return (yield)  # the workers end here
        finally:
            self.exit_code = self.finish()
            session.exitstatus = self.exit_code

    def pytest_unconfigure(self) -> None:
        """Clean up; `pytest_sessionfinish` may not have been called."""
        self.clean_up()

    # -- the rest

    def open_report(self) -> None:
        """Begin the report, if it has not begun: an earlier run's verdict is gone from then on.

        UsageError if another run is writing to the folder, or nothing can be written there.
        """
        if self._stream is not None:
            return
        try:
            self._stream = jsonl.Stream(self.folder, self.header())
            for name in VERDICTS:
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            why = why_not(self.folder, error)
            raise UsageError(f"--report-dir {self.folder}: {why}; name another folder") from None

    def for_worker(self) -> str:
        """Return what a worker needs to know, as JSON."""
        logs = str(self.folder / "logs") if self.quiet_workers else None
        settings = self.settings.model_dump(mode="json")
        return json.dumps(
            {
                "settings": settings,
                "vllm": self.vllm,
                "scratch": str(self.scratch),
                "logs": logs,
                "first": self.first,
                "traced": self.traced,
                "untraced": self.untraced,
            }
        )

    def _died_at_start(self, note: Note, sentence: str) -> None:
        """Handle the death of a worker during the first, simple run of the connector."""
        name = self.settings.connector
        if note.hook is not None and note.hook.isidentifier() and note.hook != "__init__":
            self._trouble(1, f"{name} fails hook.keeps-process in the simplest run: {sentence}")
        else:
            self._trouble(2, f"{name} cannot be used: {sentence}")

    def _trouble(self, code: int, sentence: str, *, final: bool = False) -> None:
        """Handle a worker that cannot continue.

        Abort the run if no case has run yet, or at the STARTS-th time. Otherwise only the present
        case is affected, and gets ERROR: a replacement worker may find resources that are still
        held by its predecessor. With `final`, abort in any case: it found KV of another run.
        """
        self._troubles += 1
        self.in_doubt = self.in_doubt or final
        if final or not self._ran_something or self._troubles >= STARTS:
            error = KvconformError(sentence)
            error.code = code
            self.stop(error)

    def stop(self, error: KvconformError) -> None:
        """End the run with an error. Does not return."""
        self.problem = error
        pytest.exit(error.message, returncode=error.code)

    def _take(self, found: CaseReport, lines: Lines | None = None, seconds: float = 0.0) -> None:
        """Write the results of a run to the report, and update the progress display."""
        self._ran_something = True
        assert self._stream is not None
        found = self.collector.add(found)
        self._stream.write(jsonl.lines_of(found, judged=self._listed))
        self.progress.done(found.variant, found.rows, found.refused)
        if self.listener is not None:
            self.listener(found, lines or {}, seconds)
        self._lose_patience(found)

    def _lose_patience(self, found: CaseReport) -> None:
        """Give up if hooks that hang, and processes that end, have cost more than PATIENCE.

        Those that are expected do not count.
        """
        expected = self.settings.expected_failures
        for row in found.rows:
            costs = row.requirement in (crash.HANG, crash.EXIT) and row.accuses
            if not costs or any(each.matches(row.requirement, row.case) for each in expected):
                continue
            self._lost += REPLACED
            if row.requirement == crash.HANG:
                self._lost += self.settings.hook_timeout
            if self._lost >= PATIENCE and self.collector.missing():
                self.stop(
                    GaveUp(
                        f"gave up: {row.requirement} fails again and again, which costs"
                        f" {REPLACED:g} s or more each time; mend that first (-k {row.case})"
                    )
                )

    def header(self) -> HeaderLine:
        """Return the report's first line, with what is known so far."""
        return jsonl.header_of(self.collector, self.warnings)

    def finish(self) -> int:
        """Tear down, write the reports, print the result, and return the exit code."""
        # All that could be judged is judged: a signal now would only part reports and exit code.
        before = {each: signal.signal(each, signal.SIG_IGN) for each in INTERRUPTS}
        try:
            return self._finish()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _finish(self) -> int:
        self.progress.stop()
        self.tear_down()
        code = self._report() if self._stream is not None else 3
        if self.problem is not None:
            code = self.problem.code
        elif not self.collector.reports:
            self.problem = EnvironmentProblem("nothing was run")
        self.clean_up()
        return code

    def tear_down(self) -> None:
        """Run the tear-down commands, unless they have run already.

        What went wrong with them, and with the servers of the workers, becomes a warning.
        """
        for sentence in [*self.commands.down(), *server_problems(self.scratch)]:
            if sentence not in self.warnings:
                self.warnings.append(sentence)
                self.console.print(f"[yellow]warning[/]     {escape(sentence)}", soft_wrap=True)

    def clean_up(self) -> None:
        """Remove everything but the reports; with --debug, keep temporary files. Idempotent."""
        self.progress.stop()
        self.tear_down()
        if not self.settings.debug:
            scratch.discard(self.scratch)

    def _report(self) -> int:
        """Write and print all reports, and return the exit code."""
        complete = not self.collector.missing()
        rows, found = self.collector.finish(date.today(), complete=complete)
        if isinstance(self.problem, GaveUp):
            found.verdict = "nonconformant"
        if self.problem is not None:
            found.reasons.append(self.problem.message)
        code = self.collector.exit_code(found) if self.problem is None else self.problem.code
        seconds = time.monotonic() - self.began
        assert self._stream is not None
        self._stream.close()
        footer = FooterLine(counts=found.counts, verdict=found.verdict, exit_code=code)
        try:
            jsonl.rewrite(
                self._stream.path, self.header(), rows, self.collector.ordered_reports(), footer
            )
            totals = summary.write(
                self.folder,
                self.collector,
                found,
                seconds=seconds,
                started=self.started,
                exit_code=code,
            )
            page.write(self.folder, page.make(self.collector, self.header(), totals, rows))
            statement.write(self.folder, statement.make(self.collector, found, judged=date.today()))
        except OSError as error:
            self.problem = self.problem or EnvironmentProblem(
                f"the report cannot be written to {self.folder}: {error.strerror or error}"
            )
        if self.collector.reports and not self.in_doubt:
            terminal.report(
                self.console, self.collector, rows, found, where=str(self.folder), seconds=seconds
            )
        return code
