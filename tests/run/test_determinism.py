# SPDX-License-Identifier: Apache-2.0
"""Tests that the same case and seed give the same trace, byte for byte.

The trace is the same in one process, and in another with a different hash seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Case, Variant
from kvconform.contract.loader import load_spec
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.runner import run_variant

CASES = [
    "preemption.many",
    "speculation.everything",
    "lifecycle.fail-recompute",
    "identity.two-images",
    "lifecycle.thirty-requests",
]
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
SYNC, ASYNC = {"store": "{tmp}"}, {"store": "{tmp}", "load": "async", "async_saves": True}


def variants() -> list[Variant]:
    """Per case one variant per engine, the scheduling taking turns."""
    cases = load_spec().cases
    made = []
    for number, name in enumerate(CASES):
        for turn, engine in enumerate(("reference", "vllm")):
            found = cases[name].variants([engine])
            wanted = ("sync", "async")[(number + turn) % 2]
            made += [v for v in found if v.scheduling == wanted][:1] or found[:1]
    return made


def trace(variant: Variant, extra: dict[str, object], tmp: Path, seed: int = 0) -> str:
    run = run_variant(variant, Target(REFERENCE, dict(extra)), seed=seed, tmp=tmp)
    assert run.harness_error is None
    return json.dumps(run.trace)


def all_traces(tmp: Path) -> dict[str, str]:
    return {
        v.id: trace(v, ASYNC if n % 3 == 0 else SYNC, tmp / str(n))
        for n, v in enumerate(variants())
    }


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The traces of this process."""
    return all_traces(tmp_path_factory.mktemp("first"))


def same(one: dict[str, str], two: dict[str, str]) -> None:
    assert one.keys() == two.keys() and len(one) == 2 * len(CASES)
    for name in one:
        if one[name] != two[name]:  # the first event that differs, not two long strings
            pairs = zip(json.loads(one[name]), json.loads(two[name]), strict=False)
            raise AssertionError(
                f"{name}: {next((pair for pair in pairs if pair[0] != pair[1]), 'one is longer')}"
            )


def test_twice_in_one_process(first: dict[str, str], tmp_path: Path) -> None:
    same(first, all_traces(tmp_path))


def test_in_another_process_with_another_hash_seed(first: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import importlib.util, json, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('other', sys.argv[1]); "
        "other = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(other)\n"
        "pathlib.Path(sys.argv[2], 'traces').write_text("
        "json.dumps(other.all_traces(pathlib.Path(sys.argv[2]))))"
    )
    seed = "2718" if os.environ.get("PYTHONHASHSEED") != "2718" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run(
        [sys.executable, "-c", code, __file__, str(tmp_path)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    same(first, json.loads((tmp_path / "traces").read_text()))


def test_engines_that_know_each_other_by_id_say_the_same_wherever_the_run_keeps_its_files(
    tmp_path: Path,
) -> None:
    """Ids of engines are made of the run's directory, and a peer has them in its metadata."""
    case = next(
        c
        for c in load_spec().cases.values()
        if c.config.engines and any(s.op == "add" and s.arg.mentions() for s in c.steps)
    )
    for scheduling in ("sync", "async"):
        variant = next(v for v in case.variants(["reference"]) if v.scheduling == scheduling)
        runs = [
            run_variant(
                variant, Target("kvconform.refimpl.variants.peer:Peer"), seed=0, tmp=tmp_path / name
            )
            for name in ("a", "bcd")
        ]
        assert (
            any(e["kind"] == "pair.params" for e in runs[0].trace) and runs[0].harness_error is None
        )
        assert json.dumps(runs[0].trace) == json.dumps(runs[1].trace)


def test_another_seed_is_another_run(first: dict[str, str], tmp_path: Path) -> None:
    variant = variants()[0]
    assert trace(variant, ASYNC, tmp_path, seed=1) != first[variant.id]


class KeepsOverReset(ReferenceConnector):
    """Says that its store is empty, and goes on."""

    def reset_cache(self) -> bool | None:
        return True


def test_what_a_reset_should_have_forgotten_is_counted(tmp_path: Path) -> None:
    add = {"req": "a", "prompt": 13, "max_tokens": 2}
    steps = [
        {"add": add},
        {"run": {}},
        {"reset": {}},
        {"add": {**add, "req": "b", "prompt": {"same": "a"}}},
        {"run": {}},
    ]
    counted = []
    for name in (f"{__name__}:KeepsOverReset", REFERENCE):
        case = Case.model_validate(
            {"id": "test.reset", "area": "test", "text": "A test.", "steps": steps}, strict=False
        )
        run = run_variant(
            case.variants(["reference"])[0],
            Target(name, dict(SYNC)),
            seed=0,
            tmp=tmp_path / str(len(counted)),
        )
        last = [e for e in run.trace if e["kind"] == "lookup"][-1]
        counted.append(
            [
                last[k]
                for k in ("req", "tokens", "ever_computed", "computed_before_reset", "after_reset")
            ]
        )
    assert counted == [["b", 12, 13, 12, True], ["b", 0, 13, 0, True]]


def test_events_are_numbered_and_hold_no_paths_addresses_or_times(first: dict[str, str]) -> None:
    for text in first.values():
        events = json.loads(text)
        assert [e["seq"] for e in events] == list(range(len(events)))
        assert [e["step"] for e in events] == sorted(e["step"] for e in events)
        assert "/tmp" not in text and " at 0x" not in text
