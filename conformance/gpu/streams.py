# SPDX-License-Identifier: Apache-2.0
"""Cases of area `streams` on a device, with the correct connector or with planted defects.

`python -m kvconform.gpu.streams --device cuda --into FILE.jsonl [--defects] [CASE...]` makes the
runs in one process, with either kind of stream slow, and adds a line per run to the file. A device
that was brought down by an illegal access so costs only the runs that come after it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from kvconform.contract.case import SLOW, Device
from kvconform.contract.loader import Spec, load_spec
from kvconform.files import scratch_root

AREA = "streams"
CORRECT = "kvconform.refimpl.streamed:StreamedConnector"
OPTIONS = {"async_saves": True}
HOOK_LIMIT = 60.0
"""Seconds that a hook may take: the first ones on a device also start it up."""


@dataclass(frozen=True)
class Made:
    """One run: the planted defect (empty: the correct connector), and its verdicts.

    `verdicts` are by requirement. `error`: of the harness, empty without one.
    """

    run: str
    defect: str
    verdicts: dict[str, str]
    error: str = ""


@dataclass(frozen=True)
class Subject:
    """A connector, its options, and the cases that it is run on."""

    defect: str
    connector: str
    extra_config: Mapping[str, Any]
    cases: Sequence[str]
    engines: Sequence[str]


@dataclass(frozen=True)
class Found:
    """What the runs of one planted defect have found.

    `status`: found; found otherwise, by none of the requirements that find it on the emulated
    device; unobservable, if nothing fails and all of these need to see what the device does; or
    missed. `by`: requirements that failed.
    """

    defect: str
    status: Literal["found", "found otherwise", "missed", "unobservable"]
    by: list[str]


def defects(spec: Spec) -> dict[str, dict[str, Any]]:
    """Return the planted defects that need a device, by id (see `kvconform defects`)."""
    return {name: raw for name, raw in spec.defects.items() if raw.get("emulate_cuda")}


def subjects(spec: Spec, planted: bool, cases: Sequence[str] = ()) -> list[Subject]:
    """Return what is run: the correct connector, or each planted defect.

    `cases`: only these.
    """
    area = [case.id for case in spec.cases.values() if case.area == AREA]
    if not planted:
        engines = ("reference", "vllm")
        return [Subject("", CORRECT, OPTIONS, list(cases or area), engines)]
    found = (
        Subject(
            name,
            raw["connector"],
            raw.get("extra_config", {}),
            [case for case in raw["cases"] if not cases or case in cases],
            raw.get("engines", ("reference",)),
        )
        for name, raw in defects(spec).items()
    )
    return [subject for subject in found if subject.cases]


def runs(
    subject: Subject, spec: Spec, device: Device, tmp: Path, few: bool = False
) -> Iterator[Made]:
    """Make and judge all runs of a subject; if `few`, one of each case. Writes below `tmp`."""
    from kvconform.config.target import Target
    from kvconform.run.case import run_and_judge

    for case in subject.cases:
        variants = spec.cases[case].variants(subject.engines, None, SLOW)
        for variant in variants[:1] if few else variants:
            declared = {
                "store": True,
                "saves": "all",
                "chunk_tokens": variant.block_size,
                "async_load": subject.extra_config.get("load") == "async",
            }
            target = Target(
                subject.connector,
                {"store": "{tmp}/store", **subject.extra_config},
                capabilities=declared,
                device=device,
            )
            report = run_and_judge(variant, target, spec, seed=0, tmp=tmp / "run")
            verdicts = {row.requirement: str(row.verdict) for row in report.rows}
            error = (report.harness_error or "").strip().splitlines()
            yield Made(variant.id, subject.defect, verdicts, error[-1] if error else "")


def read(path: Path) -> list[Made]:
    """Return the runs of a file, of one that was cut off all complete lines."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [Made(**json.loads(line)) for line in text.splitlines(True) if line.endswith("\n")]


def failures(made: Sequence[Made]) -> list[str]:
    """Return what the correct connector failed, as `requirement in run`."""
    return [
        f"{name} in {each.run}"
        for each in made
        for name, verdict in each.verdicts.items()
        if verdict == "FAIL"
    ] + [f"{each.run}: {each.error}" for each in made if each.error]


def outcome(name: str, wanted: Sequence[str], made: Sequence[Made]) -> Found:
    """Return whether the requirements `wanted` have found a planted defect in its runs.

    One is enough, and so is another: when wrong bytes arrive, and whose they are, depends on a real
    device's speed. A copy that nothing waits for is late there, and missing on the emulated device.
    """
    mine = [each.verdicts for each in made if each.defect == name]
    failed = sorted({rule for run in mine for rule, verdict in run.items() if verdict == "FAIL"})
    if any(rule in failed for rule in wanted):
        return Found(name, "found", failed)
    if failed:
        return Found(name, "found otherwise", failed)
    blind = bool(mine) and all(
        run.get(rule) in ("UNOBSERVABLE", "UNSUPPORTED") for run in mine for rule in wanted
    )
    return Found(name, "unobservable" if blind else "missed", failed)


def differences(one: Sequence[Made], other: Sequence[Made]) -> list[str]:
    """Return where two devices' verdicts on the same runs differ.

    A requirement that one of them cannot observe is left out.
    """
    theirs = {each.run: each.verdicts for each in other}
    found = []
    for each in one:
        if each.run not in theirs:
            found.append(f"{each.run} was made on one device only")
            continue
        for name, verdict in each.verdicts.items():
            there = theirs[each.run].get(name)
            if verdict != there and "UNOBSERVABLE" not in (verdict, there):
                found.append(f"{name} in {each.run}: {verdict}, {there}")
    missing = theirs.keys() - {each.run for each in one}
    return found + [f"{run} was made on one device only" for run in sorted(missing)]


def main(arguments: list[str] | None = None) -> int:
    """Make the runs; return 1 if the correct connector fails or the harness breaks."""
    parser = argparse.ArgumentParser(prog="kvconform.gpu.streams", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "emulated"), required=True)
    parser.add_argument("--defects", action="store_true", help="the planted defects")
    parser.add_argument("--few", action="store_true", help="one run of each case")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    given = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    spec = load_spec()
    from kvconform.process import watchdog

    bad = []
    given.into.unlink(missing_ok=True)
    watchdog.start(HOOK_LIMIT)
    try:
        with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
            device = cast(Device, given.device)
            if given.defects:
                # Loading a kernel for its first use takes longer than a stream is held.
                for subject in subjects(spec, planted=False):
                    list(runs(subject, spec, device, Path(tmp), few=True))
            for subject in subjects(spec, given.defects, given.cases):
                for made in runs(subject, spec, device, Path(tmp), given.few):
                    with given.into.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(made)) + "\n")
                    bad += [made.error] if made.error else []
                    bad += failures([made]) if not given.defects else []
    finally:
        watchdog.stop()
    for sentence in bad:
        print(sentence)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
