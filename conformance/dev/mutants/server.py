# SPDX-License-Identifier: Apache-2.0
"""The warm process: it has vLLM and kvconform imported, and forks once per mutant.

The connector is imported in the fork only. The baseline runs, which no mutant changes, are made
here once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvconform.config.selection import select, suite_digest
from kvconform.config.settings import Settings
from kvconform.contract.loader import Spec
from kvconform.dev.mutants import result as results
from kvconform.dev.mutants.child import EXPLORING, FAR_LESS, Job, Message, serve, warm
from kvconform.dev.mutants.mutation import Mutation, Site, digest
from kvconform.dev.mutants.order import Killers
from kvconform.dev.mutants.original import Original
from kvconform.dev.mutants.result import Result
from kvconform.dev.mutants.subject import Run, Subject, path_of, runs_of, settings_of
from kvconform.files import scratch_root
from kvconform.process import scratch, watchdog
from kvconform.run.runs import PlainRuns

HOOK_TIMEOUT = 10.0
TRIES = 2
"""Times that the original makes a run again before its failure counts as that of a mutant.

A connector with threads may fail a requirement in one run of several.
"""
SPARE = 120.0
"""Seconds that a mutant may take in addition to five times the original's runs."""


class Server:
    """Judges the mutants of one subject, one at a time. A context manager.

    `explore`: seconds of random workloads for a mutant that no case kills. `cases`: the only ones
    to run; default: all of the suite. `recorded`: the first run of each mutant, by its site, which
    only the others of its case follow. `limit`: seconds of a mutant's runs, after which no further
    one begins. `hook_timeout`: seconds that a mutant's hook may take.
    """

    def __init__(
        self,
        subject: Subject,
        spec: Spec,
        vllm: str,
        root: Path,
        *,
        explore: float,
        cases: Sequence[str] = (),
        limit: float | None = None,
        recorded: Mapping[Site, str] | None = None,
        hook_timeout: float = HOOK_TIMEOUT,
    ) -> None:
        self.subject = subject
        self.explore = explore
        self._cases = tuple(cases)
        self.limit = limit
        self._hook_timeout = hook_timeout
        self.killers = Killers()
        self.suite = suite_digest()
        self._spec = spec
        self._settings: dict[str, Settings] = {
            setup.id: settings_of(subject, setup, root, cases) for setup in subject.setups
        }
        self.recorded = recorded
        their_cases = {results.case_of(run) for run in (recorded or {}).values()}
        self._runs = {
            run.id: run
            for run in runs_of(self._settings, spec, vllm)
            if run.variant.case.id not in subject.broken
            and (recorded is None or run.variant.case.id in their_cases)
        }
        first = self._settings[subject.setups[0].id]
        judged = select(spec, first, vllm).judged
        self._judged = [each for each in judged if each not in subject.unkept]
        self._paths = {name: path_of(name, subject, root) for name in subject.modules}
        self._plain: dict[str, PlainRuns] = {}
        self._scratch = scratch.make("mutants", scratch_root())
        self._number = 0
        self.original = Original("")
        self._tried: Counter[str] = Counter()
        # The random workload that killed a mutant: its number, and what it failed there.
        self._workload: tuple[int, Sequence[str]] | None = None
        # Cases in which the original, too, ended its process or the harness.
        self._unended: set[str] = set()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        scratch.discard(self._scratch)

    def source(self, module: str) -> bytes:
        """Return the original source of one of the subject's modules."""
        return self._paths[module].read_bytes()

    @property
    def key(self) -> str:
        """Identity of the original, its configurations, and the suite that judges it."""
        key = "-".join(
            [self.suite, f"{self.explore:g}", *self._cases, self.subject.model_dump_json()]
        )
        key += "".join(digest(self.source(module)) for module in self.subject.modules)
        return digest(key.encode())

    def start(self, original: Original | None = None) -> None:
        """Import vLLM, make the baseline runs, and run the original unless it is given."""
        warm()
        self._make_plain()
        gc.collect()
        gc.freeze()
        self.original = original or self._examine(self.key)

    def _make_plain(self) -> None:
        """Make the run without a connector of every variant, which all mutants share."""
        from kvconform.run import smoke
        from kvconform.run.runner import run_variant

        for run in self._runs.values():
            target = smoke.target_of(self._settings[run.setup])
            name = run.variant.id
            plain = self._plain.setdefault(name, {})
            if "no-connector" not in run.variant.case.relations or target.role in plain:
                continue
            plain[target.role] = run_variant(
                run.variant,
                target,
                seed=0,
                tmp=self._scratch / "plain" / str(len(self._plain)),
                relation="no-connector",
            )
        shutil.rmtree(self._scratch / "plain", ignore_errors=True)

    def _examine(self, key: str) -> Original:
        found = Original(key)
        job = self._job(None, list(self._runs.values()))
        for message in self._messages(job, 6 * 3600.0):
            run = str(message.get("run", ""))
            if run == EXPLORING:
                found.found += message.get("causes", ())
            elif "seconds" in message:
                found.seconds[run] = message["seconds"]
                found.failed += [f"{run} {each}" for each in message["failed"]]
                found.skipped += [run] if message["skipped"] else []
                found.errors += [f"{run}: {message['error']}"] if "error" in message else []
                for module, lines in message["lines"].items():
                    found.add_lines(run, module, set(lines))
            elif "done" not in message:
                found.errors.append(str(message))
        return found

    def judge(self, mutation: Mutation) -> Result:
        """Judge one mutant. What the original fails, too, now and then, does not kill it."""
        start = time.perf_counter()
        made = self._judged_once(mutation)
        while self._fails_without_it(made):
            made = self._judged_once(mutation)
        ends_badly = made.killed_by_a_case and not made.requirements
        if ends_badly and results.case_of(made.run) in self._unended:
            made.outcome = "undecided"
            made.note = f"the original does not end well, too: {made.run}"
        made.seconds = round(time.perf_counter() - start, 2)
        if made.killed_by_a_case:
            self.killers.add(mutation.site, made.run)
        return made

    def _judged_once(self, mutation: Mutation) -> Result:
        site = mutation.site
        reached = self.original.reaching(site.module, mutation.lines)
        apart = {name for name, run in self._runs.items() if run.has_processes}
        # A run that the original refuses in its constructor may be one that the mutant accepts.
        chosen = reached | (apart - set(self.original.skipped))
        own = None if self.recorded is None else self.recorded[site]
        if own is not None:
            chosen = {name for name in self._runs if results.case_of(name) == results.case_of(own)}
        order = self.killers.order(site, chosen, self.original.seconds)
        order.sort(key=lambda run: run != own)
        job = self._job(mutation, [self._runs[name] for name in order])
        made = Result(
            self.subject.id,
            site.module,
            site.function,
            site.operator,
            site.line,
            site.occurrence,
            digest(mutation.source),
            self.suite,
            "survived",
            reached=len(reached),
            diff=mutation.diff(),
            date=time.strftime("%Y-%m-%d"),
        )
        self._workload = None
        limit = SPARE + self.explore + 5 * sum(self.original.seconds.get(each, 0) for each in order)
        for message in self._messages(job, limit):
            self._take(made, message)
        return made

    def _fails_without_it(self, made: Result) -> bool:
        """Return whether the original, too, fails what killed a mutant.

        What it fails is excused from then on.
        """
        if self._workload is not None:
            return self._fails_in_workload(*self._workload)
        return made.killed_by_a_case and self._fails_in_run(made)

    def _fails_in_run(self, made: Result) -> bool:
        """Return whether the original fails in the run of a case what killed a mutant there.

        It makes the run TRIES times more, once per run.
        """
        run = self._runs[made.run]
        while self._tried[run.id] < TRIES:
            self._tried[run.id] += 1
            for message in self._messages(self._job(None, [run], explore=0.0), SPARE):
                self.original.failed += [f"{run.id} {each}" for each in message.get("failed", ())]
                if not {"died", "undecided", "error"}.isdisjoint(message):
                    self._unended.add(run.variant.case.id)
        excused = self._excused()
        return any(f"{run.variant.case.id} {each}" in excused for each in made.requirements)

    def _fails_in_workload(self, number: int, causes: Sequence[str]) -> bool:
        """Return whether the original fails in a random workload what killed a mutant there."""
        job = self._job(None, [], explore=SPARE, only=number)
        for message in self._messages(job, SPARE):
            self.original.found += message.get("causes", ())
        return set(causes) <= set(self.original.found)

    def _excused(self) -> frozenset[str]:
        """Return `case requirement` for all that the original fails: it may in another run, too."""
        found = (each.rpartition(" ") for each in self.original.failed)
        return frozenset(f"{results.case_of(run)} {requirement}" for run, _, requirement in found)

    def _take(self, made: Result, message: Message) -> None:
        """Add a message of the child to the result."""
        if "start" in message:
            made.outcome, made.means, made.note = "killed", "start", message["start"]
        elif "undecided" in message:
            made.outcome, made.note = "undecided", message["undecided"]
        elif "died" in message:
            made.run = str(message["run"])
            made.note = message["died"]
            made.explored = made.run == EXPLORING
            self._killed_by(made, "hang" if message["hung"] else "death")
        elif "done" in message:
            made.left = message["left"] if made.outcome == "survived" else 0
        elif "run" in message:
            made.runs += 1
            if message["failed"] or "error" in message:
                made.run, made.requirements = message["run"], message["failed"]
                made.explored = made.run == EXPLORING
                if made.explored:
                    self._workload = message["number"], message["causes"]
                made.note = message.get("error", "")
                self._killed_by(made, _means(message["failed"]))

    def _killed_by(self, made: Result, means: results.Means) -> None:
        made.outcome, made.means = "killed", means
        usual = self.original.seconds.get(made.run, 0.0)
        if means == "hang" and usual * FAR_LESS > self._hook_timeout:
            made.outcome = "undecided"
            made.note = f"did not end in time, and the original takes {usual:g} s"

    def _job(
        self,
        mutation: Mutation | None,
        runs: Sequence[Run],
        explore: float | None = None,
        only: int | None = None,
    ) -> Job:
        self._number += 1
        first = self.subject.setups[0].id
        return Job(
            mutation,
            self._paths[mutation.site.module] if mutation else Path(),
            runs,
            self._settings,
            self._scratch / str(self._number),
            self._judged,
            self._hook_timeout if mutation else 60.0,
            self.explore * (1 if mutation else 2) if explore is None else explore,
            first,
            plain=self._plain,
            seconds=self.original.seconds,
            limit=self.limit if mutation else None,
            excused=self._excused(),
            skipped=frozenset(self.original.skipped),
            known=frozenset(self.original.found),
            only=only,
            files={module: str(path) for module, path in self._paths.items()},
        )

    def _messages(self, job: Job, limit: float) -> Iterator[Message]:
        """Fork a child for a job and yield its messages, the last of which may be its death."""
        job.scratch.mkdir(parents=True)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(theirs, job, self._spec))
        process.start()
        theirs.close()
        end = time.monotonic() + limit
        ended = False
        try:
            while not ended:
                if not ours.poll(max(0.0, end - time.monotonic())):
                    yield {"undecided": f"did not end within {limit:.0f} s"}
                    return
                try:
                    message = ours.recv()
                except EOFError:
                    process.join(10)
                    yield _death(job.scratch / "note", process.exitcode)
                    return
                ended = not {"done", "start", "undecided"}.isdisjoint(message)
                yield message
        finally:
            _end(process)
            ours.close()
            shutil.rmtree(job.scratch, ignore_errors=True)


def _death(note: Path, code: int | None) -> Message:
    """Return the message about a child that ended before it was done."""
    left = watchdog.read_note(note)
    hung = code == watchdog.EXIT_HANG or (left is not None and left.hung)
    where = (left.hook if left is not None else None) or "outside of any hook"
    run = (left.case if left is not None else None) or ""
    return {"died": f"exit code {code}, {where}", "hung": hung, "run": run}


def _end(process: Any) -> None:
    """End a child and what it has started."""
    process.join(5)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(10)


def _means(failed: Sequence[str]) -> results.Means:
    """Return what a kill by these requirements shows itself by."""
    if "hook.terminates" in failed:
        return "hang"
    return "raise" if "hook.no-raise" in failed or not failed else "requirement"
