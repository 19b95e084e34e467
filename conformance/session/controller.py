# SPDX-License-Identifier: Apache-2.0
"""The controller's half of the plugin: hands settings to the workers, collects what they find, survives their
deaths, writes the reports."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.markup import escape

from kvconform.compat.installed import check_vllm
from kvconform.config.catalogue import check_connector_name, lacking
from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError
from kvconform.judge.verdict import Verdict, rows_for
from kvconform.live.random import spec_for
from kvconform.process.servers import Commands
from kvconform.process.watchdog import read_note
from kvconform.report import jsonl, statement, summary, terminal
from kvconform.report.collector import Collector
from kvconform.report.html import page
from kvconform.report.models import FooterLine, HeaderLine
from kvconform.report.terminal import Progress
from kvconform.session import crash
from kvconform.session.worker import SPENT, START

STARTS = 3
"""How many workers may die before they ran anything, or have trouble later on."""


class Controller:
    """State of one run. Registered as a plugin; `exit_code` and `problem` (a sentence) are the result once pytest has ended.

    Raises KvconformError when made, if the settings name something that is not there.
    """

    def __init__(
        self, settings: Settings, console: Console, *, quiet_workers: bool = False
    ) -> None:
        self.settings, self.console, self.quiet_workers = settings, console, quiet_workers
        self.vllm, self.warnings = check_vllm()
        self.warnings += lacking(settings.catalogue)
        check_connector_name(settings.connector, settings.pythonpath)
        self.spec = spec_for(settings)
        self.collector = Collector(
            self.spec, settings, select(self.spec, settings, self.vllm), self.vllm
        )
        self.folder = Path(settings.report_dir)
        self.scratch = Path(tempfile.mkdtemp(prefix="kvconform-run-"))
        self.commands = Commands(settings, self.scratch, self.folder / "logs" / "commands.log")
        self.progress = Progress(console, len(self.collector.selection.variants))
        self.began, self.started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self.problem: KvconformError | None = None
        self.exit_code: int | None = None
        self._stream: jsonl.Stream | None = None
        self._early_deaths = self._troubles = 0
        self._ran_something = False

    # -- pytest's hooks --------------------------------------------------------------------------------------------------------------
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        terminal.header(self.console, self.collector, self.warnings)
        try:
            self._stream = jsonl.Stream(self.folder, self.header())
        except OSError as error:
            why = (
                "it is a file, not a directory"
                if self.folder.is_file()
                else error.strerror or error
            )
            self.stop(
                UsageError(f"the report cannot be written to {self.folder}: {why} (--report-dir)")
            )
        try:
            self.commands.up()
        except KvconformError as error:
            self.stop(error)
        self.progress.start()

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["kvconform"] = self.for_worker()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.collector.only({name[name.index("[") + 1 : -1] for name in ids if name.endswith("]")})
        self.progress.total = len(self.collector.selection.variants)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.pytest_xdist_node_collection_finished([item.name for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, "kvconform", None)
        if text is None:
            if report.when == "setup" and report.failed:
                self.stop(
                    EnvironmentProblem(
                        f"a case could not be set up: {str(report.longrepr).strip().splitlines()[-1]}"
                    )
                )
            return
        payload = json.loads(text)
        if "abort" in payload:
            self._trouble(*payload["abort"])
        self._take(payload["variant"], self.collector.add(payload))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        note = read_note(self.scratch / f"{report.node.gateway.id}.note")
        sentence = crash.sentence(note)
        if (
            note is not None and note.case == SPENT
        ):  # after its answer, on purpose: what xdist made up says nothing about the case
            report.outcome, report.when, report.longrepr = "passed", "setup", None
            return
        starting = note is not None and note.case == START
        if note is not None and starting:
            in_hook = note.hook is not None and note.hook.isidentifier() and note.hook != "__init__"
            self._trouble(
                1 if in_hook else 2,
                f"{self.settings.connector} fails hook.keeps-process in the plainest run there is: {sentence}"
                if in_hook
                else f"{self.settings.connector} cannot be used: {sentence}",
            )
        variant = next(
            (v for v in self.collector.selection.variants if crashitem.endswith(f"[{v.id}]")), None
        )
        if variant is None:
            self.stop(EnvironmentProblem(f"a worker died in {crashitem}: {sentence}"))
            return
        if starting:
            wanted = [self.spec.requirements[name] for name in self.collector.selection.judged]
            words = f"a worker that replaced another did not start: {sentence}"
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
        self._take(variant.id, self.collector.put(variant.id, rows))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error is None or self._ran_something:
            return
        note = read_note(self.scratch / f"{node.gateway.id}.note")
        if (
            note is None or note.case is None
        ):  # it died before it had anything to do, and its successor would too
            self._early_deaths += 1
            if self._early_deaths >= STARTS:
                log = self.folder / "logs" / f"{node.gateway.id}.log"
                self.stop(
                    EnvironmentProblem(
                        f"worker processes cannot be started; what they said is in {log}"
                    )
                )

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr: Any) -> None:
        if self.problem is None:
            last = str(excrepr).strip().splitlines()[-1]
            self.problem = EnvironmentProblem(
                f"internal error of the harness: {last} (--debug shows where)"
            )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if self.problem is None and excinfo.errisinstance(KeyboardInterrupt):
            self.problem = EnvironmentProblem("interrupted")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Any:
        try:
            return (yield)  # the workers end here
        finally:
            self.exit_code = self.finish()
            session.exitstatus = self.exit_code

    def pytest_unconfigure(self) -> None:
        self.clean_up()

    # -- the rest --------------------------------------------------------------------------------------------------------------------
    def for_worker(self) -> str:
        """What a worker needs to know, as JSON."""
        logs = str(self.folder / "logs") if self.quiet_workers else None
        settings = self.settings.model_dump(mode="json")
        return json.dumps(
            {"settings": settings, "vllm": self.vllm, "scratch": str(self.scratch), "logs": logs}
        )

    def _trouble(self, code: int, sentence: str) -> None:
        """A worker cannot go on. Ends the run if that is how it begins, or if it goes on like that; else it is the trouble of the one case,
        which has no answer: a worker that replaces another may meet what that one has not let go of yet."""
        self._troubles += 1
        if not self._ran_something or self._troubles >= STARTS:
            error = KvconformError(sentence)
            error.code = code
            self.stop(error)

    def stop(self, error: KvconformError) -> None:
        """End the run with a sentence. Does not return."""
        self.problem = error
        pytest.exit(error.message, returncode=error.code)

    def _take(self, variant: str, rows: list[Any]) -> None:
        """Write down what is known about a variant now, and show that it is done."""
        self._ran_something = True
        assert self._stream is not None
        note = self.collector.notes.get(variant)
        about = jsonl.note_line(note) if note is not None else None
        self._stream.write([*(jsonl.row_line(row) for row in rows), *([about] if about else [])])
        self.progress.done(variant, rows)

    def header(self) -> HeaderLine:
        """The report's first line, as far as it is known now."""
        return jsonl.header_of(self.collector, self.warnings)

    def finish(self) -> int:
        """Tear down, write the reports, print the result; returns the exit code."""
        self.progress.stop()
        self.tear_down()
        code = self._report() if self.collector.rows and self._stream is not None else 3
        if self.problem is not None:
            code = self.problem.code
        elif not self.collector.rows:
            self.problem = EnvironmentProblem("nothing was run")
        self.clean_up()
        return code

    def tear_down(self) -> None:
        """Run the tear-down commands, if they were not run yet."""
        for sentence in self.commands.down():
            self.console.print(f"[yellow]warning[/]     {escape(sentence)}")

    def clean_up(self) -> None:
        """Leave nothing behind but the reports (with --debug, also the temporary files). pytest_sessionfinish need not have been called."""
        self.progress.stop()
        self.tear_down()
        if not self.settings.debug:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _report(self) -> int:
        complete = not self.collector.missing()
        rows, found = self.collector.finish(date.today(), complete=complete)
        if self.problem is not None:
            found.reasons.append(self.problem.message)
        code = self.collector.exit_code(found)
        seconds = time.monotonic() - self.began
        assert self._stream is not None
        self._stream.close()
        footer = FooterLine(counts=found.counts, verdict=found.verdict)  # type: ignore[arg-type]
        try:
            jsonl.rewrite(
                self._stream.path, self.header(), rows, self.collector.ordered_notes(), footer
            )
            told = summary.write(
                self.folder,
                self.collector,
                found,
                seconds=seconds,
                started=self.started,
                exit_code=code,
            )
            page.write(self.folder, page.make(self.collector, self.header(), told, rows))
            statement.write(self.folder, statement.make(self.collector, found, judged=date.today()))
        except OSError as error:
            self.problem = self.problem or EnvironmentProblem(
                f"the report cannot be written to {self.folder}: {error.strerror or error}"
            )
        terminal.report(
            self.console, self.collector, rows, found, where=str(self.folder), seconds=seconds
        )
        return code
