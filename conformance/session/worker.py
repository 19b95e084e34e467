# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the pytest plugin: runs one variant per item, and reports the result.

The controller receives a compacted CaseReport (`kvconform.report.compact`) as JSON text, in the
attribute `kvconform` of the item's TestReport. Processes that run several connectors' cases call
`settle_in` first.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvconform.config.selection import Selection, select
from kvconform.config.settings import Settings
from kvconform.contract.case import Variant
from kvconform.errors import KvconformError, UsageError
from kvconform.files import replace
from kvconform.judge.foreign import ForeignKV
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.live.baseline import FOLDER as PLAINS
from kvconform.live.random import CLAIMS, REDUCED, spec_for
from kvconform.process import watchdog
from kvconform.process.servers import Servers
from kvconform.report import timeline
from kvconform.report.ci.annotation import places_of
from kvconform.report.compact import compacted, judged_of
from kvconform.report.html.story import story_of
from kvconform.run.lines import FilesBelow, Lines, Recorder, by_file
from kvconform.run.promises import MEASURED


def settle_in(
    settings: Settings, scratch: Path, name: str, logs: Path, *, redirect: bool = True
) -> tuple[Servers, Settings]:
    """Prepare this process for a connector.

    Sets the import path, the environment and the temporary directory (below `scratch`) of the
    process. With `redirect`, sends its output to the log NAME.log in `logs`. Returns the servers
    of the process, which are not started yet, and the settings with the servers' ports filled in.
    """
    if redirect:
        _redirect(logs / f"{name}.log")
    for folder in settings.pythonpath:
        if folder not in sys.path:
            sys.path.append(folder)
    servers = Servers(settings, scratch / f"{name}-servers", logs, f"{name}-server-")
    settings = servers.settle(settings)
    os.environ.update(settings.env)
    # Temporary files of the connector are removed together with the run's.
    temporary = scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    return servers, settings


def _redirect(log: Path) -> None:
    """Redirect standard output and error of the process, including those of C code, to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)


PAYLOAD = pytest.StashKey[str]()
START = "(start of the worker)"
"""Case in the note of a worker that is importing vLLM and constructing the connector."""
SPENT = "(end of the worker)"
"""Case in the note of a worker that ended on purpose after a result, to be replaced."""
PROBLEMS = ".servers.json"
"""End of the name of the file with what went wrong with a worker's servers."""
MAIN = "main"
"""Name of the worker that is the controller's own process. It cannot be replaced."""
START_LIMIT = 300.0
"""Seconds for importing vLLM, and then for the connector."""
LIVE_LIMIT = 7200.0
"""Seconds for a run on engine live.

Its child processes have time limits of their own. It starts vLLM several times when a failing
workload is reduced.
"""
RUNNER = "KVCONFORM_RUNNER"
"""Environment variable: `module:function` to use instead of kvconform.run.case:run_and_judge.

For tests of everything around it.
"""


class Worker:
    """State of one worker process, registered as a pytest plugin.

    `logs`: directory of the log that receives the output of the process; None to leave it alone.
    `first`, `traced` and `untraced`: as for `launch.run`.
    """

    def __init__(
        self,
        settings: Settings,
        vllm: str,
        scratch: Path,
        name: str,
        logs: Path | None,
        *,
        first: Sequence[str] = (),
        traced: Sequence[str] = (),
        untraced: Sequence[str] = (),
    ) -> None:
        self.scratch = scratch
        self.name = name
        self.servers, settings = settle_in(
            settings, scratch, name, logs or scratch / "logs", redirect=logs is not None
        )
        self.settings = settings
        folders = {
            PLAINS: scratch / "live",
            CLAIMS: scratch / "claims",
            MEASURED: scratch / "measured",
        }
        if settings.shrink:
            folders[REDUCED] = Path(settings.report_dir) / "cases"
        self._folders = {
            variable: str(folder)
            for variable, folder in folders.items()
            if variable in (CLAIMS, MEASURED) or variable not in os.environ
        }
        os.environ.update(self._folders)
        self.spec = spec_for(settings)
        self.selection: Selection = select(self.spec, settings, vllm)
        self.requirements = judged_of(self.spec.requirements, self.selection.judged)
        """The requirements by which reports are compacted."""
        self._first = {name: position for position, name in enumerate(first)}
        self._recorder = Recorder(FilesBelow(traced)) if traced else None
        self._untraced = frozenset(untraced)
        self._judge: Any = None
        self._refused: str | None = None
        self._target: Any = None
        self._places: dict[str, str] = {}
        self._number = 0

    def lines(self) -> Lines:
        """Return the lines of the traced files that were executed since the last call."""
        return by_file(self._recorder.taken()) if self._recorder is not None else {}

    def ordered(self) -> list[Variant]:
        """Return the selected variants in the order in which they are run."""
        last = len(self._first)
        return sorted(
            self.selection.variants, key=lambda variant: self._first.get(variant.id, last)
        )

    def pytest_sessionstart(self) -> None:
        """Start the watchdog."""
        watchdog.start(self.settings.hook_timeout, self.scratch / f"{self.name}.note")

    def pytest_sessionfinish(self) -> None:
        """Stop the watchdog and the servers, and restore the environment."""
        watchdog.stop()
        for name in self._folders:
            os.environ.pop(name, None)
        self._stop_servers()

    def _stop_servers(self) -> None:
        """Stop the servers, and write what went wrong for `server_problems`."""
        problems = self.servers.down()
        if problems:
            replace(self.scratch / f"{self.name}{PROBLEMS}", json.dumps(problems))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Attach the result of the run to the item's report."""
        report = yield
        if report.when == "call" and PAYLOAD in item.stash:
            report.kvconform = item.stash[PAYLOAD]
            if self._recorder is not None:
                report.kvconform_lines = self.lines()
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> Any:
        """End this process after a run in which a hook hung; xdist starts another worker.

        The hook may have left locks and threads behind, for which a correct hook of the next case
        could wait. The report of the run has already been sent.
        """
        done = yield
        if nextitem is not None and self.name != MAIN and watchdog.has_expired():
            self._stop_servers()
            watchdog.leave_word(SPENT)
            os._exit(0)
        return done

    def judge(self, variant: Variant) -> str:
        """Run and judge a variant; return its compacted report as JSON text.

        Whatever goes wrong is in the report. Only KeyboardInterrupt and GeneratorExit are raised.
        """
        return self._judged(variant)[1]

    def _judged(self, variant: Variant) -> tuple[CaseReport, str, str]:
        """Run and judge a variant.

        Returns the report, its JSON text, and what --debug shows of an error.
        """
        self._number += 1
        tmp = self.scratch / f"{self.name}-{self._number}"
        details = None
        try:
            if self._judge is None:
                self._prepare(tmp)
            report = self._run(variant, tmp)
        except KvconformError as error:
            details = error.details
            report = self._error(variant, error)
            report.abort = error.code, error.message
            report.foreign = isinstance(error, ForeignKV)
        except (Exception, SystemExit, watchdog.HookTimeout) as error:
            # Any exception that gets here is the harness's fault.
            report = self._error(variant, error)
        finally:
            if not self.settings.debug:
                shutil.rmtree(tmp, ignore_errors=True)
        text = json.dumps(compacted(report, self.requirements), ensure_ascii=False)
        return report, normalised(text, tmp), details or ""

    def run(self, item: pytest.Item, variant: Variant) -> None:
        """Run a variant, and fail the item if a row is ERROR, or is FAIL and counts."""
        report, item.stash[PAYLOAD], details = self._judged(variant)
        if report.abort is not None:
            pytest.fail(f"{details}{report.abort[1]}", pytrace=False)  # --debug shows it
        for row in report.rows:  # junit.xml shows what does not fail the test
            if row.verdict is Verdict.FAIL and not row.gating and row.kind == "requirement":
                kind = "risk" if row.risk else "recommendation"
                item.user_properties.append((kind, f"{row.requirement}: {row.message}"))
        bad = [
            row
            for row in report.rows
            if row.verdict is Verdict.ERROR or (row.verdict is Verdict.FAIL and row.gating)
        ]
        if bad:
            pytest.fail(
                "\n".join(f"{row.requirement}: {row.message or row.verdict}" for row in bad),
                pytrace=False,
            )

    def _error(self, variant: Any, error: BaseException) -> CaseReport:
        """Return a report with ERROR for all requirements."""
        message = f"the harness failed: {type(error).__name__}: {error}".splitlines()[0]
        text = "".join(traceback.format_exception(error))
        rows = self._same_rows(variant, Verdict.ERROR, message)
        return CaseReport(variant.id, rows=rows, harness_error=text)

    def _same_rows(self, variant: Any, verdict: Verdict, message: str) -> list[Row]:
        """Return a row with this verdict for every requirement that was selected."""
        wanted = [self.spec.requirements[name] for name in self.selection.judged]
        return rows_for(wanted, variant, verdict, message, strict=self.settings.strict)

    def _prepare(self, tmp: Path) -> None:
        """Import vLLM and the connector, and construct the connector once.

        Raises KvconformError if the connector cannot be used.
        """
        runner = os.environ.get(RUNNER)
        self.servers.up()
        limit = watchdog.start_limit(START_LIMIT)
        with watchdog.case(START, 2 * limit + 60):
            if runner:
                module, _, function = runner.partition(":")
                self._judge = getattr(importlib.import_module(module), function)
                self._target = self.settings
                return
            from kvconform.run import smoke

            self._target = smoke.target_of(self.settings)
            self._refused = smoke.check(self._target, tmp, limit, engine=self.settings.engine)
            inspected = any(each.inspects for each in self.selection.variants)
            if self._refused is not None and not inspected:
                raise UsageError(self._refused)  # no case that was selected would say it
            if self._target.connector is not None:
                self._places = places_of(self._target.resolve(), Path.cwd())
        from kvconform.run.case import run_and_judge

        self._judge = run_and_judge

    def _run(self, variant: Any, tmp: Path) -> CaseReport:
        """Run and judge a variant, and render its timelines and its story."""
        if self._refused is not None and not variant.inspects:
            rows = self._same_rows(variant, Verdict.UNSUPPORTED, self._refused)
            return CaseReport(variant.id, rows=rows, refused=self._refused)
        limit = LIVE_LIMIT
        if variant.engine != "live":
            limit = watchdog.case_limit(self.settings.hook_timeout)
        recording: AbstractContextManager[None] = nullcontext()
        if self._recorder is not None and variant.id not in self._untraced:
            recording = self._recorder.recording()
        with watchdog.case(variant.id, limit), recording:
            report: CaseReport = self._judge(
                variant,
                self._target,
                self.spec,
                seed=self.settings.seed,
                tmp=tmp / "case",
                requirements=self.selection.judged,
                strict=self.settings.strict,
                disabled=self.selection.disabled,
            )
        marks = {row.requirement: row.event for row in report.rows}
        report.timelines = {
            name: timeline.render(events, marks[name]) for name, events in report.excerpts.items()
        }
        report.story = story_of(report.trace, report.rows)
        report.places = self._places
        report.refused = self._refused
        if self.settings.trace is not None:
            report.printed = timeline.render(report.trace)
        return report


def server_problems(scratch: Path) -> list[str]:
    """Return sentences about what went wrong with the servers of workers that have ended."""
    found: list[str] = []
    for file in sorted(scratch.glob(f"*{PROBLEMS}")):
        try:
            found += json.loads(file.read_bytes())
        except (OSError, ValueError):
            worker = file.name.removesuffix(PROBLEMS)
            found.append(f"what went wrong with the servers of worker {worker} cannot be read")
    return found


RELATIONS = (
    "connector|no-connector|pickled-metadata|second-process|hash-seed|repeat|inside-multi|alone"
)


def normalised(text: str, tmp: Path) -> str:
    """Return JSON text without meaningless differences between runs, and safe to print.

    Replaces the run's own directory and addresses of objects. Escapes control characters, and lone
    surrogates (from file names that are not UTF-8), which cannot be encoded.
    """
    # A report has megabytes of text, and seldom any of these: to look for them first is cheaper.
    if "\\u00" in text:
        text = re.sub(r"(?<!\\)((?:\\\\)*)\\u00([01][0-9a-f])", r"\1\\\\x\2", text)
    if not text.isascii():
        text = re.sub("[\ud800-\udfff]", lambda found: f"\\\\x{ord(found[0]) & 0xFF:02x}", text)
    if str(tmp) in text:
        text = re.sub(rf"{re.escape(str(tmp))}(/case(/({RELATIONS}))?)?", "{tmp}", text)
    return re.sub(r"\b0x[0-9a-f]{8,}\b", "0x…", text) if "0x" in text else text
