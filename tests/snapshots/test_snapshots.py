# SPDX-License-Identifier: Apache-2.0
"""Tests of snapshots of real runs: deterministic, and a small change shows with its name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from kvconform.config.settings import load
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.judge.foreign import ForeignKV
from kvconform.snapshots.canonical import EncodeError
from kvconform.snapshots.compare import differences, run_differences, tensor_differences
from kvconform.snapshots.difference import Difference
from kvconform.snapshots.document import KINDS, Run, document, dumps, tensors
from kvconform.snapshots.job import Job
from kvconform.snapshots.normalise import built_in
from kvconform.snapshots.record import Recording, cells, record
from kvconform.snapshots.store import Store, explain
from kvconform.snapshots.value import Value
from places import ROOT

CASE = "placeholders.abort-in-flight"
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
GOLDEN = ROOT / "fixtures" / "golden"


def recorded(connector: str, tmp_path: Path, store: str = "{tmp}") -> Recording:
    """The synchronous run of CASE."""
    [variant] = [v for v in cells(load_spec().cases[CASE], "reference") if v.scheduling == "sync"]
    found = record(
        variant, Target(connector, {"store": store}), built_in(), seed=0, tmp=tmp_path / "run"
    )
    assert found is not None
    return found


def test_kv_of_another_run_is_not_recorded(tmp_path: Path) -> None:
    store = f"memory:{tmp_path}"
    recorded(REFERENCE, tmp_path / "first", store)
    with pytest.raises(ForeignKV, match="holds KV of an earlier run"):
        recorded(REFERENCE, tmp_path / "second", store)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return recorded(REFERENCE, tmp_path_factory.mktemp("right"))


def changes(kind: str, old: Recording, new: Recording) -> list[str]:
    found = differences(document(kind, CASE, [old]), document(kind, CASE, [new]))
    return [str(one) for one in found]


def test_the_same_run_twice_is_the_same_byte_for_byte(right: Recording, tmp_path: Path) -> None:
    again = recorded(REFERENCE, tmp_path)
    for kind in KINDS:
        assert dumps(document(kind, CASE, [right])) == dumps(document(kind, CASE, [again]))
    assert tensors([right]) == tensors([again])


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_one_form(right: Recording, kind: str) -> None:
    data = dumps(document(kind, CASE, [right]))
    loaded = json.loads(data)
    assert dumps(loaded) == data
    assert not differences(loaded, document(kind, CASE, [right]))
    assert loaded["case"] == CASE and max(map(len, data.splitlines())) <= 120


def test_what_is_read_back_is_what_was_computed(right: Recording) -> None:
    a = next(item for item in right.stored if item.req == "a")
    assert (a.tokens, a.end) == (13, 12)
    assert {block.holds for block in a.blocks} == {"a[0, 4)", "a[4, 8)", "a[8, 12)"}
    assert safetensors.numpy.load(tensors([right]))["reference-sync-v1-d1-b4/a/layer.1"].shape == (
        12,
        2,
        32,
    )


def test_a_field_that_changed_is_named(right: Recording, tmp_path: Path) -> None:
    found = changes("metadata", right, recorded("planted:OneField", tmp_path))
    assert (
        "reference-sync-v1-d1-b4: steps 1 to 8, build_connector_meta().answer.repaired: set[]"
        " -> set[29]" in found
    )
    assert all(".repaired: " in sentence for sentence in found)


def test_a_block_that_is_saved_a_step_earlier_is_named(right: Recording, tmp_path: Path) -> None:
    early = recorded("planted:OneStepEarly", tmp_path)
    [moved] = [
        sentence for sentence in changes("metadata", right, early) if "1 step earlier" in sentence
    ]
    assert (
        "build_connector_meta: saves Save(req" in moved and "is in step 3, was in step 4" in moved
    )


def test_a_byte_of_a_head_that_changed_is_named(right: Recording, tmp_path: Path) -> None:
    wrong = recorded("planted:OneByte", tmp_path)
    found = tensor_differences(tensors([right]), tensors([wrong]))
    assert any(
        "a/layer.0: 3 of 768 elements differ, in tokens 0, 4, 8, head 1;"
        " the first: token 0, head 1, K element 3" in s
        for s in found
    )
    assert any(
        "block 0, layer 0 of request a now holds 1 x WRONG" in s
        for s in changes("stored", right, wrong)
    )


def test_a_hook_that_comes_before_another_is_named(right: Recording) -> None:
    calls = list(right.calls)
    place = next(
        i for i, call in enumerate(calls) if call.hook == "build_connector_meta" and call.step == 2
    )
    calls[place], calls[place + 1] = calls[place + 1], calls[place]
    found = changes("hooks", right, dataclasses.replace(right, calls=calls))
    assert found == [
        f"reference-sync-v1-d1-b4: step 2: {calls[place].hook} is called before"
        " build_connector_meta"
    ]
    assert changes("metadata", right, dataclasses.replace(right, calls=calls)) == []


def test_hooks_that_are_called_more_than_once_are_counted() -> None:
    one: Run = {"steps": [{"at": [1, 3], "hooks": ["a", "b", "b"]}]}
    two: Run = {"steps": [{"at": [1, 3], "hooks": ["a", "a", "c"]}]}
    assert [one.sentence() for one in run_differences(one, two)] == [
        "steps 1 to 3: c is called",
        "steps 1 to 3: b is not called (it was 2 times)",
        "steps 1 to 3: calls of a: 1 -> 2",
    ]


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"holds": "b[4, 8)"}, "block 1, layer 0 of request a now holds b[4, 8); it was a[4, 8)"),
        (
            {"digest": "cd"},
            "block 1, layer 0 of request a holds the same tokens in other bytes (ab -> cd)",
        ),
        ({"start": 5}, "block 1, layer 0 of request a has the tokens [5, 8); it had [4, 8)"),
    ],
)
def test_what_changed_in_a_block_is_named(block: dict[str, Any], sentence: str) -> None:
    def stored(**changed: Any) -> Run:
        was = {"index": 1, "layer": 0, "start": 4, "end": 8, "digest": "ab", "holds": "a[4, 8)"}
        return {"requests": {"a": {"tokens": 9, "came_back": 8, "blocks": [was | changed]}}}

    (found,) = run_differences(stored(), stored(**block))
    assert found.sentence() == sentence


def run(returned: Value, *more: Value) -> Run:
    """A run with one call per step."""
    answers = (returned, *more)
    return {
        "steps": [
            {"at": [step, step], "calls": [{"call": "build_connector_meta", "returned": answer}]}
            for step, answer in enumerate(answers, 1)
        ]
    }


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (0, False, "step 1, build_connector_meta().answer: 0 -> false"),
        (1, 1.0, "step 1, build_connector_meta().answer: 1 -> 1.0"),
        ("a: [b", {"atom": "a"}, 'step 1, build_connector_meta().answer: "a: [b" -> a'),
        ([1], [1, 2], "step 1, build_connector_meta().answer: [1] -> [1, 2]"),
        ([], [[1]], "step 1, build_connector_meta().answer: [] -> list"),
        (
            {"class": "map", "pairs": [[1, 2], ["1", 2]]},
            {"class": "map", "pairs": [[1, 2]]},
            'step 1, build_connector_meta().answer."1": gone (was 2)',
        ),
        (
            {"class": "A", "fields": {"x": {"class": "B", "fields": {"y": 1}}}},
            {"class": "A", "fields": {}},
            "step 1, build_connector_meta().answer: A -> A()",
        ),
    ],
)
def test_values_are_compared_with_their_types(old: Value, new: Value, sentence: str) -> None:
    first, *_ = run_differences(run(old), run(new))
    assert first.sentence() == sentence and not run_differences(run(old), run(old))


def test_a_change_in_many_steps_is_one_difference() -> None:
    (found,) = run_differences(run(1, 1, 5, 1), run(2, 2, 5, 2))
    assert found.sentence() == "steps 1 to 2, 4, build_connector_meta().answer: 1 -> 2"


def test_the_sort_of_a_difference_does_not_depend_on_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sorts() -> list[object]:
        found = run_differences(run([1], ["a"], 3, "x1"), run([2, 3], [], "y", "z2"))
        return [one.sort() for one in found]

    before = sorts()
    monkeypatch.setattr(Difference, "sentence", lambda self: "the same for all")
    assert sorts() == before
    assert [before.index(one) for one in before] == [0, 0, 2, 3]


def test_what_cannot_be_shown_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(
        EncodeError,
        match=r"build_connector_meta returned in step 1 .*answer\.guard: a _thread\.lock has no ",
    ):
        recorded("planted:Unshowable", tmp_path)


def golden_cases() -> list[str]:
    return sorted(
        {
            name.partition("/")[0]
            for entries in Store(GOLDEN, "0.32.0").index.versions.values()
            for name in entries
        }
    )


@pytest.mark.parametrize("case", golden_cases())
def test_the_goldens_of_the_reference_connector(case: str) -> None:
    """The stored KV is the same in all releases.

    So is the metadata, but for lookahead blocks, which older releases allocate later.
    """
    job = Job(load({"select": [case]}, start=Path("/")), GOLDEN, updating=False)
    files = job.files(job.spec.cases[case])
    job.close()
    assert files is not None
    everywhere = (
        ("stored.json", "stored.safetensors")
        if job.spec.cases[case].config.spec_tokens
        else ("metadata.json", "stored.json")
    )
    for name, data in files.items():
        if job.before == job.store.version or name.endswith(everywhere):
            assert job.store.read(name) == data, "\n".join(
                explain(job.store.read(name) or b"", data)[:9]
            )


def test_every_golden_is_as_it_was_written_and_of_a_case() -> None:
    job = Job(load({}, start=Path("/")), GOLDEN, updating=False)
    job.close()
    kept = {name.partition("/")[0] for name in job.store.names()}
    assert kept <= {case.id for case in job.cases} and len(kept) > 20
    assert all(job.store.read(name) for name in job.store.names())
