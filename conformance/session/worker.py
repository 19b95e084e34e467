# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the plugin: runs one variant per pytest item and attaches what came of it to the item's report.

What travels to the controller is one JSON text per item, in the attribute `kvconform` of the TestReport: a Payload.


What every process with a connector begins with: a log, the connector's path and environment, a temporary directory, and its servers.
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
from pathlib import Path
from typing import Any, TypedDict

import pytest

from kvconform.config.selection import Selection, select
from kvconform.config.settings import Settings
from kvconform.errors import KvconformError
from kvconform.judge.verdict import Verdict, rows_for
from kvconform.live.baseline import FOLDER as PLAINS
from kvconform.live.random import CLAIMS, REDUCED, spec_for
from kvconform.process import watchdog
from kvconform.process.servers import Servers
from kvconform.report import timeline
from kvconform.report.ci.annotation import places_of


def settle_in(
    settings: Settings, scratch: Path, name: str, logs: Path, *, redirect: bool = True
) -> tuple[Servers, Settings]:
    """(the process's servers, not started yet; the settings with their ports filled in). Changes this process: its output goes to a log in
    `logs` (`redirect`), its path, environment and temporary directory are those of the run, below `scratch`."""
    if redirect:
        _redirect(logs / f"{name}.log")
    for folder in settings.pythonpath:
        if folder not in sys.path:
            sys.path.append(folder)
    servers = Servers(settings, scratch / f"{name}-servers", logs, f"{name}-server-")
    settings = servers.settle(settings)
    os.environ.update(settings.env)
    temporary = scratch / "tmp"  # what the connector and others leave behind goes with the run
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    return servers, settings


def _redirect(log: Path) -> None:
    """Send the process's standard output and error, also those of C code, to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)


PAYLOAD = pytest.StashKey[str]()
START = "(start of the worker)"
SPENT = "(end of the worker)"
"""What stands for a case in the note of a worker that ended after its last answer, to be replaced."""
MAIN = "main"
"""Name of the worker that is the controller's own process, and which nobody replaces."""
START_LIMIT = 300.0
LIVE_LIMIT = 7200.0
"""Seconds for what has a time limit of its own: vLLM in child processes, several times when a failing workload is reduced."""
RUNNER = "KVCONFORM_RUNNER"
"""Environment variable: `module:function` to use instead of kvconform.run.case:run_and_judge. For tests of everything around it."""


class Payload(TypedDict, total=False):
    """`abort`: (exit code, sentence), the run cannot go on. Otherwise what CaseReport has, time lines as text."""

    abort: tuple[int, str]
    variant: str
    rows: list[dict[str, Any]]
    unmet: list[str]
    timelines: dict[str, list[str]]
    trace: list[str]
    harness_error: str | None
    story: str | None
    capabilities: dict[str, Any]
    sources: dict[str, str]
    places: dict[str, str]


class Worker:
    """State of one worker process. Registered as a plugin. `quiet`: send what the process prints to a log in `logs`."""

    def __init__(
        self, settings: Settings, vllm: str, scratch: Path, name: str, logs: Path | None
    ) -> None:
        self.scratch, self.name = scratch, name
        self.servers, settings = settle_in(
            settings, scratch, name, logs or scratch / "logs", redirect=logs is not None
        )
        self.settings = settings
        folders = {
            PLAINS: scratch / "live",
            CLAIMS: scratch / "claims",
            REDUCED: Path(settings.report_dir) / "cases",
        }
        self._folders = {
            name: str(folder)
            for name, folder in folders.items()
            if name == CLAIMS or name not in os.environ
        }
        os.environ.update(self._folders)
        self.spec = spec_for(settings)
        self.selection: Selection = select(self.spec, settings, vllm)
        self._judge: Any = None
        self._target: Any = None
        self._places: dict[str, str] = {}
        self._number = 0

    def pytest_sessionstart(self) -> None:
        watchdog.start(self.settings.hook_timeout, self.scratch / f"{self.name}.note")

    def pytest_sessionfinish(self) -> None:
        watchdog.stop()
        for name in self._folders:
            os.environ.pop(name, None)
        self.servers.down()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        if report.when == "call" and PAYLOAD in item.stash:
            report.kvconform = item.stash[PAYLOAD]
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> Any:
        """A process in which a hook hung is not trusted with another case (locks that nobody releases, threads in the middle of something:
        a correct hook of the next case may wait for those). Once its report is sent it ends, and xdist starts another."""
        done = yield
        if nextitem is not None and self.name != MAIN and watchdog.has_expired():
            self.servers.down()
            watchdog.leave_word(SPENT)
            os._exit(0)
        return done

    def run(self, item: pytest.Item, variant: Any) -> None:
        """Run a variant; fails the item if a row that counts is FAIL or ERROR."""
        self._number += 1
        tmp = self.scratch / f"{self.name}-{self._number}"
        payload: Payload
        details = None
        try:
            if self._judge is None:
                self._prepare(tmp)
            payload = self._run(variant, tmp)
        except KvconformError as error:
            details = error.details
            payload = Payload({**self._error(variant, error), "abort": (error.code, error.message)})
        except (
            Exception,
            SystemExit,
            watchdog.HookTimeout,
        ) as error:  # whatever comes through here is the harness's fault
            payload = self._error(variant, error)
        finally:
            if not self.settings.debug:
                shutil.rmtree(tmp, ignore_errors=True)
        item.stash[PAYLOAD] = normalised(json.dumps(payload, ensure_ascii=False), tmp)
        if "abort" in payload:
            pytest.fail(f"{details or ''}{payload['abort'][1]}", pytrace=False)  # --debug shows it
        bad = [
            row
            for row in payload["rows"]
            if row["verdict"] == "ERROR" or (row["verdict"] == "FAIL" and row.get("gating", True))
        ]
        if bad:
            pytest.fail(
                "\n".join(
                    f"{row['requirement']}: {row.get('message') or row['verdict']}" for row in bad
                ),
                pytrace=False,
            )

    def _error(self, variant: Any, error: BaseException) -> Payload:
        """ERROR for all requirements."""
        message = f"the harness failed: {type(error).__name__}: {error}".splitlines()[0]
        requirements = [self.spec.requirements[name] for name in self.selection.judged]
        rows = rows_for(requirements, variant, Verdict.ERROR, message, strict=self.settings.strict)
        text = "".join(traceback.format_exception(error))
        return Payload(variant=variant.id, rows=[row.to_dict() for row in rows], harness_error=text)

    def _prepare(self, tmp: Path) -> None:
        """Import vLLM and the connector, construct it once. KvconformError if that cannot be."""
        runner = os.environ.get(RUNNER)
        self.servers.up()
        limit = float(os.environ.get(watchdog.START_SECONDS) or START_LIMIT)
        with watchdog.case(START, 2 * limit + 60):
            if runner:
                module, _, function = runner.partition(":")
                self._judge = getattr(importlib.import_module(module), function)
                self._target = self.settings
                return
            from kvconform.run import smoke

            self._target = smoke.target_of(self.settings)
            smoke.check(self._target, tmp, limit, engine=self.settings.engine)
            if self._target.connector is not None:
                self._places = places_of(self._target.resolve(), Path.cwd())
        from kvconform.run.case import run_and_judge

        self._judge = run_and_judge

    def _run(self, variant: Any, tmp: Path) -> Payload:
        limit = (
            LIVE_LIMIT
            if variant.engine == "live"
            else watchdog.case_limit(self.settings.hook_timeout)
        )
        with watchdog.case(variant.id, limit):
            report = self._judge(
                variant,
                self._target,
                self.spec,
                seed=self.settings.seed,
                tmp=tmp / "case",
                requirements=self.selection.judged,
                strict=self.settings.strict,
                disabled=self.selection.disabled,
                keep_trace=self.settings.trace is not None,
            )
        marks = {row["requirement"]: row.get("event") for row in report.rows}
        payload = Payload(
            variant=variant.id,
            rows=report.rows,
            unmet=report.unmet,
            timelines={
                name: timeline.render(events, marks.get(name))
                for name, events in report.timelines.items()
            },
            harness_error=report.harness_error,
            story=report.story,
            capabilities=report.capabilities,
            sources=report.sources,
            places=self._places,
        )
        if report.trace is not None:
            payload["trace"] = timeline.render(report.trace)
        return payload


def normalised(text: str, tmp: Path) -> str:
    """JSON without what differs from run to run and means nothing (the run's own directory, addresses of objects), nor what cannot be
    written or would command a terminal: control characters, and halves of surrogate pairs as in a file name that is no UTF-8."""
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\u00([01][0-9a-f])", r"\1\\\\x\2", text)
    text = re.sub("[\ud800-\udfff]", lambda found: f"\\\\x{ord(found[0]) & 0xFF:02x}", text)
    relations = (
        "connector|no-connector|pickled-metadata|second-process|hash-seed|repeat|inside-multi|alone"
    )
    text = re.sub(rf"{re.escape(str(tmp))}(/case(/({relations}))?)?", "{tmp}", text)
    return re.sub(r"\b0x[0-9a-f]{8,}\b", "0x…", text)
