# SPDX-License-Identifier: Apache-2.0
"""The parts of `kvconform gpu`, in order of worth: their commands, and how their results are read.

A part is one or more commands, which are run one after the other in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import xml.etree.ElementTree as xml
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import kvconform
from kvconform.contract.loader import load_spec
from kvconform.gpu import streams
from kvconform.gpu.result import Machine
from kvconform.pack.wheels import TESTS
from kvconform.words import many

PACKAGE = Path(kvconform.__file__).resolve().parent
GOLDEN = PACKAGE / "fixtures" / "golden"
BENCH = {
    "cuda": ("--tokens", "16,8192", "--seconds", "0.1"),
    "cpu": ("--tokens", "16", "--layouts", "LBHNC", "--seconds", "0.01", "--rounds", "3"),
}
"""Options of the benchmark by device: the bars are at 16 and 8192 tokens (docs/performance.md)."""
SHOWN = 5
"""Failures that a reason names."""
SHARE = 0.1
"""Part of a step that comparing the KV in the cache may take."""
WORKERS = 12
"""Most processes that run the kernels' tests, or cases: each has a context on the GPU."""
NO_VLLM = "vLLM is not installed"
ON_DEVICE = "cuda and not cuda-torch and not 2_31"
"""The kernels' tests that compute-sanitizer repeats: those that launch kernels on small caches."""


@dataclass(frozen=True)
class Setting:
    """What the parts depend on.

    `emulated`: there is no GPU, and the same commands run on the CPU, as tests do. `folder`: where
    all files go.
    """

    machine: Machine
    folder: Path
    emulated: bool = False
    tests: Path | None = None
    sanitizer: str | None = None

    @classmethod
    def here(cls, machine: Machine, folder: Path, emulated: bool) -> Setting:
        """Return the setting with the tests and the sanitizer that this machine has."""
        return cls(
            machine, folder, emulated, kernel_tests_of(PACKAGE), shutil.which("compute-sanitizer")
        )

    @property
    def run_device(self) -> tuple[str, ...]:
        """Options of kvconform's commands for the device."""
        return ("--emulate-cuda",) if self.emulated else ("--device", "cuda")

    def file(self, name: str) -> Path:
        """Return the path of a file of the results."""
        return self.folder / name


def kernel_tests_of(package: Path) -> Path | None:
    """Return the folder with the kernels' tests and their rigs; None if there are none."""
    for name in ("tests", TESTS):
        if (package.parent / name / "kernels").is_dir():
            return package.parent / name
    return None


@dataclass(frozen=True)
class Reading:
    """What a part's files say. `problem`: why it did not pass, as far as they say; else empty."""

    figures: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Stage(IntEnum):
    """Stages of a call, in this order. Processes that share a GPU wait for one another."""

    ALONE = 0
    """Measures time, or makes use of all processors."""
    GATES = 1
    """Long."""
    STREAMS = 2
    """Need a quick machine: a step that takes longer than a held stream hides a missing wait."""
    REST = 3


@dataclass(frozen=True)
class Part:
    """One part.

    `lacks` returns why it cannot be run, or None. `read` is called when its commands have ended, or
    were ended at the limit. `environment`: of its commands. `stage`: parts of a stage run at the
    same time, those of the first one by one.
    """

    id: str
    title: str
    commands: Callable[[Setting], list[list[str]]]
    lacks: Callable[[Setting], str | None] = lambda setting: None
    read: Callable[[Setting], Reading] = lambda setting: Reading()
    environment: Callable[[Setting], Mapping[str, str]] = lambda setting: {}
    stage: Stage = Stage.REST


def python(module: str, *words: str) -> list[str]:
    """Return the command that runs a module."""
    return [sys.executable, "-m", module, *words]


def no_vllm(setting: Setting) -> str | None:
    """Return why a part that needs vLLM cannot be run, or None."""
    return None if setting.machine.vllm else NO_VLLM


# -- the kernels
def pytest_of(name: str, setting: Setting, *words: str) -> list[str]:
    """Return a part's command that runs the kernels' tests, also where no pyproject.toml is.

    All calls draw the same examples, so that a later one finds its kernels compiled.
    """
    assert setting.tests is not None
    rigs = setting.tests / "rigs"
    options = ("-c", os.devnull, "--rootdir", str(setting.tests), "--import-mode=importlib")
    plain = ("-q", "-p", "no:cacheprovider", "--noconftest", "-o", f"pythonpath={rigs}")
    drawn = ("--hypothesis-seed=0",)
    file = f"--junit-xml={report(name, setting)}"
    folder = str(setting.tests / "kernels")
    return python("pytest", *options, *plain, *drawn, file, folder, *words)


def kernel_tests(setting: Setting) -> list[list[str]]:
    """Return the command of the kernels' tests: they take the time of their compilations."""
    return [pytest_of("kernel-tests", setting, "-n", str(min(os.cpu_count() or 1, WORKERS)))]


def no_tests(setting: Setting) -> str | None:
    """Return why the kernels' tests cannot be run, or None."""
    if setting.tests is None:
        return "this kvconform comes without its tests; run it from a checkout or a pack"
    return None


def report(name: str, setting: Setting) -> Path:
    """Return the file about the kernels' tests of a part."""
    return setting.file(f"{name}.xml")


def read_tests(name: str) -> Callable[[Setting], Reading]:
    """Return the function that reads numbers of tests, and names of those that failed."""

    def read(setting: Setting) -> Reading:
        file = report(name, setting)
        if not file.exists():
            return Reading()
        [suite] = xml.parse(file).getroot().iter("testsuite")
        outcomes = ("tests", "failures", "errors", "skipped")
        numbers = {outcome: int(suite.get(outcome, 0)) for outcome in outcomes}
        bad = [
            case.get("name", "")
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        ran = numbers["tests"] > numbers["skipped"]
        return Reading(numbers, some(bad) if ran else "all tests were skipped")

    return read


def bench(setting: Setting) -> list[list[str]]:
    """Return the command of the benchmark."""
    device = "cpu" if setting.emulated else "cuda"
    file = str(setting.file("kernel-bench.json"))
    return [python("kvconform.kernels.bench", "--device", device, *BENCH[device], "--json", file)]


def read_bench(setting: Setting) -> Reading:
    """Read the measurements, rounded."""
    file = setting.file("kernel-bench.json")
    if not file.exists():
        return Reading()
    found = json.loads(file.read_text(encoding="utf-8"))
    names = ("kernel", "by", "layout", "dtype", "tokens", "gbps", "ratio", "launches")
    rows = [
        {name: round(row[name], 3) if isinstance(row[name], float) else row[name] for name in names}
        for row in found["rows"]
    ]
    return Reading({"rows": rows, "not measured": found["notes"]})


def steps(setting: Setting) -> list[list[str]]:
    """Return the commands that time steps of the engine on the device, and on the CPU."""
    devices = ("emulated" if setting.emulated else "cuda", "cpu")
    return [
        python("kvconform.gpu.steps", "--device", device, "--into", str(step_file(setting, device)))
        for device in devices
    ]


def step_file(setting: Setting, device: str) -> Path:
    """Return the file about the steps on a device."""
    return setting.file(f"verified-step-{'cpu' if device == 'cpu' else 'device'}.json")


def read_steps(setting: Setting) -> Reading:
    """Read the time of a step, and the share of it that is comparing; the share has a bar."""
    found = {
        where: json.loads(file.read_text(encoding="utf-8"))
        for where in ("device", "cpu")
        if (file := step_file(setting, where)).exists()
    }
    figures = {
        f"{name} {where}": value
        for where, values in found.items()
        for name, value in values.items()
    }
    share = found.get("device", {}).get("share", 0.0)
    problem = f"comparing takes {share:.0%} of a step, and may take {SHARE:.0%}"
    return Reading(figures, problem if share >= SHARE else "")


# -- the suite
def gate(engine: str) -> Callable[[Setting], list[list[str]]]:
    """Return the function that makes the command for the gate on one engine."""

    def commands(setting: Setting) -> list[list[str]]:
        folder = ("--report-dir", str(setting.file(f"gate-{engine}")))
        # The other engine's gate runs at the same time.
        workers = ("--workers", str(min(WORKERS // 2, max(1, (os.cpu_count() or 1) * 3 // 8))))
        on = ("--engine", engine, *setting.run_device)
        return [python("kvconform", "run", *on, *workers, *folder)]

    return commands


def read_statement(name: str) -> Callable[[Setting], Reading]:
    """Return the function that reads the statement of a report (kvconform.report.statement)."""

    def read(setting: Setting) -> Reading:
        file = setting.file(name) / "statement.json"
        if not file.exists():
            return Reading()
        said = json.loads(file.read_text(encoding="utf-8"))
        figures = {key: said[key] for key in ("verdict", "passed", "core", "profile")}
        return Reading(figures, some(said["failed"]))

    return read


def stream_runs(name: str, device: str, *words: str) -> Callable[[Setting], list[str]]:
    """Return the function that makes the command for runs of kvconform.gpu.streams."""

    def command(setting: Setting) -> list[str]:
        there = "emulated" if setting.emulated else device
        file = str(setting.file(f"{name}.jsonl"))
        return python("kvconform.gpu.streams", "--device", there, "--into", file, *words)

    return command


def defects(setting: Setting) -> list[list[str]]:
    """Return the command for the planted defects of area streams."""
    return [stream_runs("stream-defects", "cuda", "--defects")(setting)]


def read_defects(setting: Setting) -> Reading:
    """Read which planted defects were found, and by what."""
    made = streams.read(setting.file("stream-defects.jsonl"))
    ran = {each.defect for each in made}
    found = [
        streams.outcome(name, raw["fails"], made)
        for name, raw in streams.defects(load_spec()).items()
        if name in ran
    ]
    rows = [{"defect": each.defect, "status": each.status, "by": each.by} for each in found]
    missed = [f"{each.defect} was not found" for each in found if each.status == "missed"]
    return Reading({"defects": rows} if rows else {}, some(missed))


def both_devices(setting: Setting) -> list[list[str]]:
    """Return the commands for the cases of area streams on the device and on the emulated one."""
    return [
        stream_runs("stream-cases", "cuda")(setting),
        stream_runs("stream-cases-emulated", "emulated")(setting),
    ]


def read_both_devices(setting: Setting) -> Reading:
    """Read the numbers of runs, and compare the verdicts."""
    real = streams.read(setting.file("stream-cases.jsonl"))
    emulated = streams.read(setting.file("stream-cases-emulated.jsonl"))
    failed = streams.failures(real)
    different = streams.differences(real, emulated) if emulated else []
    figures = {"runs": len(real), "emulated runs": len(emulated), "differences": different}
    return Reading(figures if real else {}, some([*failed, *different]))


def goldens(setting: Setting) -> list[list[str]]:
    """Return the command that compares the snapshots made on a CPU."""
    return [python("kvconform", "snapshot", "check", "--dir", str(GOLDEN), *setting.run_device)]


def no_goldens(setting: Setting) -> str | None:
    """Return why the snapshots cannot be compared, or None."""
    return no_vllm(setting) or (None if GOLDEN.is_dir() else "there are no snapshots")


# -- compute-sanitizer
def sanitized(tool: str, *what: str) -> Callable[[Setting], list[list[str]]]:
    """Return the function that makes the command of kernels or cases under compute-sanitizer."""

    def commands(setting: Setting) -> list[list[str]]:
        tested = (
            stream_runs(f"{tool}-cases", "cuda", "--few")(setting)
            if what == ("cases",)
            else pytest_of(f"{tool}-kernels", setting, "-k", ON_DEVICE)
        )
        program = setting.sanitizer or "compute-sanitizer"
        return [[program, "--tool", tool, "--error-exitcode", "1", *tested]]

    return commands


def no_sanitizer(*more: Callable[[Setting], str | None]) -> Callable[[Setting], str | None]:
    """Return the function that says why a part with compute-sanitizer cannot be run."""

    def lacks(setting: Setting) -> str | None:
        if setting.sanitizer is None:
            return "compute-sanitizer is not on the path"
        return next(filter(None, (each(setting) for each in more)), None)

    return lacks


def every_tensor_ends(setting: Setting) -> Mapping[str, str]:
    """Return the variable without which memcheck does not see the end of a tensor."""
    return {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


# -- the complete vLLM
LIVE = ("live.base", "live.preempt")


def live(setting: Setting) -> list[list[str]]:
    """Return the command that judges the reference connector on engine live."""
    folder = ("--report-dir", str(setting.file("live")))
    on = ("--engine", "live", "--device", "cuda")
    return [python("kvconform", "run", *on, "-k", ",".join(LIVE), *folder)]


def no_live(setting: Setting) -> str | None:
    """Return why engine live cannot be run, or None."""
    if setting.emulated:
        return "engine live on a GPU needs one"
    if (lacking := no_vllm(setting)) is not None:
        return lacking
    if not setting.machine.compiled:
        return "this vLLM is without its compiled parts, as in a pack"
    return None


def some(sentences: Sequence[str]) -> str:
    """Return the first sentences, and the number of others."""
    first = "; ".join(sentences[:SHOWN])
    more = len(sentences) - SHOWN
    return f"{first}; and {many(more, 'other')}" if more > 0 else first


PARTS = (
    Part(
        "kernel-tests",
        "Tests of the kernels, compiled",
        kernel_tests,
        no_tests,
        read_tests("kernel-tests"),
        lambda setting: {"TRITON_INTERPRET": "1"} if setting.emulated else {},
        stage=Stage.ALONE,
    ),
    Part("kernel-bench", "Benchmark of the kernels", bench, read=read_bench, stage=Stage.ALONE),
    Part(
        "verified-step",
        "Time of a step, and of comparing the KV in it",
        steps,
        no_vllm,
        read_steps,
        stage=Stage.ALONE,
    ),
    Part(
        "gate-reference",
        "Reference connector, engine reference",
        gate("reference"),
        no_vllm,
        read_statement("gate-reference"),
        stage=Stage.GATES,
    ),
    Part(
        "gate-vllm",
        "Reference connector, engine vllm",
        gate("vllm"),
        no_vllm,
        read_statement("gate-vllm"),
        stage=Stage.GATES,
    ),
    Part(
        "stream-defects",
        "Planted defects of area streams",
        defects,
        no_vllm,
        read_defects,
        stage=Stage.STREAMS,
    ),
    Part(
        "stream-cases",
        "Cases of area streams, also on the emulated device",
        both_devices,
        no_vllm,
        read_both_devices,
        stage=Stage.STREAMS,
    ),
    Part("goldens", "Snapshots made on a CPU", goldens, no_goldens),
    *(
        Part(
            f"{tool}-kernels",
            f"Tests of the kernels under {tool}",
            sanitized(tool),
            no_sanitizer(no_tests),
            read_tests(f"{tool}-kernels"),
            environment=every_tensor_ends,
        )
        for tool in ("memcheck", "racecheck")
    ),
    *(
        Part(
            f"{tool}-cases",
            f"Three cases under {tool}",
            sanitized(tool, "cases"),
            no_sanitizer(no_vllm),
            environment=every_tensor_ends,
        )
        for tool in ("memcheck", "racecheck")
    ),
    Part("live", "Reference connector, complete vLLM", live, no_live, read_statement("live")),
)
"""All parts, in order of worth."""
