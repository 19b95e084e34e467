# SPDX-License-Identifier: Apache-2.0
"""What a connector and the engine do in the vLLM that is installed here: `python -m kvconform.versions.observe JOB OUT`.

kvconform.versions.matrix starts this with the Python of each release. JOB is a JSON file (see Job). OUT grows by a line of JSON per run, so
that nothing is lost when a connector ends the process; started again, it goes on after the run in which it died.
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

SILENT = ("PASS", "NOT_EXERCISED", "UNSUPPORTED", "UNOBSERVABLE", "DISABLED")
"""Verdicts whose rows say nothing else."""


class Job(BaseModel):
    """What is to be done. `note`: file for the watchdog. `all_runs`: not only one run per case, scheduling and model runner."""

    settings: Settings
    note: Path
    snapshots: bool = True
    all_runs: bool = False


def chosen(selection: Selection, *, all_runs: bool) -> list[Variant]:
    """The runs of a matrix: of each case one per engine, scheduling and model runner, with the first block size and the smallest depth."""
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
    """One process in one release. Writes below a temporary directory and to the file of lines; changes nothing else."""

    def __init__(self, job: Job, out: Path) -> None:
        from kvconform.compat import installed
        from kvconform.compat.installed import check_vllm

        self.job, self.settings = job, job.settings
        self.vllm, self.warnings = check_vllm()
        self.spec: Spec = load_spec()
        self.selection = select(self.spec, self.settings, self.vllm)
        self.done = {line["variant"] for line in lines(out) if line["type"] == "start"}
        self._out = out.open("a", encoding="utf-8")
        self._package = installed.source_version()
        self._target: Any = None

    def write(self, kind: str, **data: Any) -> None:
        """Append a line, at once."""
        self._out.write(json.dumps({"type": kind, **data}, ensure_ascii=False) + "\n")
        self._out.flush()

    def main(self) -> None:
        """Everything that is not done yet. KvconformError if the connector or vLLM cannot be used at all."""
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
        """The verdicts of one run, its hooks step by step, and what the engine does without any connector."""
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
            keep_trace=True,
            plain=plain,
        )
        role = in_its_role(self._target)
        if not plain and "no-connector" in variant.case.relations:
            plain[None] = run_variant(
                variant, role, seed=self.settings.seed, tmp=tmp / "plain", relation="no-connector"
            )
        rows = [row for row in report.rows if row["requirement"] in self.selection.shown]
        data = {
            "variant": variant.id,
            "verdicts": {row["requirement"]: row["verdict"] for row in rows},
            "rows": [row for row in rows if row["verdict"] not in SILENT],
            "capabilities": report.capabilities,
            "sources": report.sources,
            "unmet": report.unmet,
            "harness_error": report.harness_error,
            "hooks": hooks(report.trace or []),
            "engine": engine(next(iter(plain.values())).trace) if plain else {},
        }
        return dict(json.loads(normalised(json.dumps(data, ensure_ascii=False), tmp)))

    def snapshots(self, tmp: Path) -> Iterator[dict[str, Any]]:
        """Texts of the cases that snapshots are made of, on the matrix's engine; `problem` instead where there is none."""
        from kvconform.snapshots import normalise, texts
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
                    kinds = {
                        kind: texts.render(kind, case.id, [found]).decode() for kind in texts.KINDS
                    }
                    yield {"variant": variant.id, "texts": kinds}


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines written so far; one that was cut short by the death of its writer is left out."""
    found = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return found


def hooks(trace: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """[step, names of the hooks in the order of their calls]: those that the engine calls, not those that a connector calls in them."""
    found: list[list[Any]] = []
    for event in trace:
        if event["kind"] == "hook.called" and event["depth"] == 0 and event["thread"] == "main":
            if not found or found[-1][0] != event["step"]:
                found.append([event["step"], []])
            found[-1][1].append(event["hook"])
    return found


def engine(trace: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """What the scheduler does, by aspect: `schedule`, `requests`, `blocks`, `tokens`; a line per event that begins with its step."""
    found: dict[str, list[str]] = {"schedule": [], "requests": [], "blocks": [], "tokens": []}
    for e in trace:
        match e["kind"]:
            case "step.scheduled":
                parts = [
                    f"{name} {', '.join(map(str, e[name]))}"
                    for name in ("new", "cached", "resumed", "preempted", "finished")
                    if e[name]
                ]
                found["schedule"].append(
                    f"step {e['step']}: {e['total']} tokens; {'; '.join(parts)}".rstrip("; ")
                )
            case "req.scheduled":
                counts = " ".join(
                    f"{name}={e[name]}"
                    for name in ("computed", "scheduled", "placeholders", "known", "drafts")
                )
                found["schedule"].append(f"step {e['step']}: {e['req']} {e['listed_as']} {counts}")
                found["blocks"].append(f"step {e['step']}: {e['req']} has blocks {e['table']}")
            case "req.state":
                found["requests"].append(
                    f"step {e['step']}: {e['req']} {e['from'] or '-'} -> {e['to']} ({e['reason']}) computed={e['computed']} known={e['known']}"
                )
            case "req.finished":
                found["requests"].append(
                    f"step {e['step']}: {e['req']} ends as {e['status']}, computed={e['computed']} known={e['known']}"
                )
            case "cache.reset":
                found["requests"].append(
                    f"step {e['step']}: prefix cache reset {e['phase']}, returned {e['returned']}"
                )
            case "sample":
                found["tokens"].append(
                    f"step {e['step']}: {e['req']} output {e['index']} = {e['token']}"
                )
            case "engine.crash" | "engine.stall":
                found["requests"].append(f"step {e['step']}: {e['kind']} {e.get('error', '')}")
            case _:
                pass
    return found


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or that of the error whose sentence is the last line written."""
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
