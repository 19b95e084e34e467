# SPDX-License-Identifier: Apache-2.0
"""Runs the cases in the installed vLLM: `python -m kvconform.versions.observe JOB OUT`.

kvconform.versions.matrix starts this with the Python of each release. JOB is a JSON file (see Job).
OUT grows by a line of JSON per run, so that nothing is lost when a connector ends the process.
Started again, the process continues after the run in which it died.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvconform.config.selection import Selection, select
from kvconform.config.settings import Settings
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec, load_spec
from kvconform.errors import KvconformError
from kvconform.files import scratch_root
from kvconform.process import watchdog

EngineEvent = dict[str, Any]
"""An event of the engine: `kind`, `step`, and the fields that VIEWS names."""

VIEWS = (
    ("schedule", "step.scheduled", ("total", "new", "cached", "resumed", "preempted", "finished")),
    (
        "schedule",
        "req.scheduled",
        ("req", "listed_as", "computed", "scheduled", "placeholders", "known", "drafts"),
    ),
    ("blocks", "req.scheduled", ("req", "table")),
    ("requests", "req.state", ("req", "from", "to", "reason", "computed", "known")),
    ("requests", "req.finished", ("req", "status", "computed", "known")),
    ("requests", "cache.reset", ("phase", "returned")),
    ("requests", "engine.crash", ("error",)),
    ("requests", "engine.stall", ("waiting_on",)),
    ("tokens", "sample", ("req", "index", "token")),
)
"""Views of the engine: name, kind of event, the fields that are compared."""


class Job(BaseModel):
    """The work of one process. `note`: file for the watchdog.

    `all_runs`: not only one run per case, scheduling and model runner.
    """

    settings: Settings
    note: Path
    snapshots: bool = True
    all_runs: bool = False


def chosen(selection: Selection, *, all_runs: bool) -> list[Variant]:
    """Return the runs of a matrix: of each case one per engine, scheduling and model runner.

    That is the run with the first block size and the smallest queue depth.
    """
    first: dict[tuple[str, ...], Variant] = {}
    for variant in selection.variants:
        key = (
            (variant.id,)
            if all_runs
            else (variant.case.id, variant.engine, variant.scheduling, variant.runner)
        )
        first.setdefault(key, variant)
    return list(first.values())


class Observer:
    """One process in one release. It writes to a temporary directory and to OUT only."""

    def __init__(self, job: Job, out: Path) -> None:
        from kvconform.compat.installed import check_vllm

        self.job, self.settings = job, job.settings
        self.vllm, self.warnings = check_vllm()
        self.spec: Spec = load_spec()
        self.selection = select(self.spec, self.settings, self.vllm)
        self.done = {line["variant"] for line in lines(out) if line["type"] == "start"}
        self._out = out.open("a", encoding="utf-8")
        self._target: Any = None

    def write(self, kind: str, **data: Any) -> None:
        """Append a line and flush it."""
        self._out.write(json.dumps({"type": kind, **data}, ensure_ascii=False) + "\n")
        self._out.flush()

    def main(self) -> None:
        """Do all runs that are not done. KvconformError if the connector or vLLM is unusable."""
        from kvconform.compat import interface
        from kvconform.run import smoke

        began = time.monotonic()
        if not self.done:
            self.write(
                "release",
                vllm=self.vllm,
                warnings=self.warnings,
                signatures=interface.signatures(),
                fields=interface.fields(),
            )
        self._target = smoke.target_of(self.settings)
        with tempfile.TemporaryDirectory(prefix="kvconform-versions-", dir=scratch_root()) as name:
            tmp = Path(name)
            with watchdog.case("(start)", 180.0):
                smoke.check(self._target, tmp / "smoke", 120.0)
            for number, variant in enumerate(chosen(self.selection, all_runs=self.job.all_runs)):
                if variant.id not in self.done:
                    self.write("start", variant=variant.id)
                    with watchdog.case(variant.id, watchdog.case_limit(self.settings.hook_timeout)):
                        self.write("run", **self.run(variant, tmp / str(number)))
            if self.job.snapshots:
                for data in self.snapshots(tmp):
                    self.write("snapshot", **data)
        self.write("end", seconds=round(time.monotonic() - began, 1))

    def run(self, variant: Variant, tmp: Path) -> dict[str, Any]:
        """Return the report of a run, its hooks, and what the engine does without a connector."""
        from kvconform.run.calibration import in_its_role
        from kvconform.run.case import run_and_judge
        from kvconform.run.records import Run
        from kvconform.run.runner import run_variant
        from kvconform.session.worker import normalised

        plain: dict[str | None, Run] = {}
        report = run_and_judge(
            variant,
            self._target,
            self.spec,
            seed=self.settings.seed,
            tmp=tmp / "case",
            requirements=self.selection.judged,
            strict=self.settings.strict,
            disabled=self.selection.disabled,
            plain=plain,
        )
        role = in_its_role(self._target)
        if not plain and "no-connector" in variant.case.relations:
            plain[None] = run_variant(
                variant, role, seed=self.settings.seed, tmp=tmp / "plain", relation="no-connector"
            )
        data = {
            "variant": variant.id,
            "report": report.to_dict(),
            "hooks": hooks(report.trace),
            "engine": engine(next(iter(plain.values())).trace) if plain else {},
        }
        return dict(json.loads(normalised(json.dumps(data, ensure_ascii=False), tmp)))

    def snapshots(self, tmp: Path) -> Iterator[dict[str, Any]]:
        """Yield the snapshot of each run by kind, or the problem why it has none."""
        from kvconform.snapshots import normalise
        from kvconform.snapshots.document import KINDS, run_of
        from kvconform.snapshots.job import PROFILE
        from kvconform.snapshots.record import cells, record, suits

        rules = [
            *normalise.built_in(),
            *normalise.validated(getattr(self.settings, "snapshot_rules", []), "snapshot_rules"),
        ]
        golden = {
            v.case.id for v in select(self.spec, Settings(profile=PROFILE), self.vllm).variants
        }
        cases = {
            v.case.id: v.case
            for v in self.selection.variants
            if v.case.id in golden and suits(v.case)
        }
        for number, case in enumerate(cases.values()):
            for variant in cells(case, self.settings.engines[0]):
                with watchdog.case(variant.id, watchdog.case_limit(self.settings.hook_timeout)):
                    try:
                        found = record(
                            variant,
                            self._target,
                            rules,
                            seed=self.settings.seed,
                            tmp=tmp / f"snapshot-{number}-{variant.scheduling}",
                        )
                    except KvconformError as error:
                        yield {"variant": variant.id, "problem": error.message}
                        continue
                if found is not None:
                    kinds = {kind: run_of(kind, found) for kind in KINDS}
                    yield {"variant": variant.id, "snapshot": kinds}


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, without one that was cut short when its writer died."""
    found = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return found


def hooks(trace: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Return [step, names of the hooks in their order], without hooks that a connector calls."""
    found: list[list[Any]] = []
    for event in trace:
        if event["kind"] == "hook.called" and event["depth"] == 0 and event["thread"] == "main":
            if not found or found[-1][0] != event["step"]:
                found.append([event["step"], []])
            found[-1][1].append(event["hook"])
    return found


def engine(trace: Iterable[dict[str, Any]]) -> dict[str, list[EngineEvent]]:
    """Return what the scheduler does, by view: `schedule`, `requests`, `blocks`, `tokens`."""
    found: dict[str, list[EngineEvent]] = {view: [] for view, _, _ in VIEWS}
    for event in trace:
        for view, kind, names in VIEWS:
            if event["kind"] == kind:
                shown = {name: event.get(name, "") for name in names}
                found[view].append({"kind": kind, "step": event["step"], **shown})
    return found


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or the exit code of the error that the last line of OUT reports."""
    job_file, out = map(Path, sys.argv[1:] if arguments is None else arguments)
    job = Job.model_validate_json(job_file.read_text(encoding="utf-8"))
    os.environ.update(job.settings.env)
    sys.path += [folder for folder in job.settings.pythonpath if folder not in sys.path]
    watchdog.start(job.settings.hook_timeout, job.note)
    try:
        Observer(job, out).main()
    except KvconformError as error:
        with out.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"type": "problem", "sentence": error.message, "code": error.code})
                + "\n"
            )
        return error.code
    finally:
        watchdog.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
