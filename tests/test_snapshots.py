# SPDX-License-Identifier: Apache-2.0
"""Snapshots of real runs: they are the same every time, and a small change shows, with its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import safetensors.numpy

from kvconform.config.settings import load
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.snapshots import texts
from kvconform.snapshots.canonical import EncodeError
from kvconform.snapshots.compare import differences, tensor_differences
from kvconform.snapshots.extension import explain
from kvconform.snapshots.job import Job
from kvconform.snapshots.normalise import built_in
from kvconform.snapshots.record import Recording, cells, record
from kvconform.snapshots.store import Store

CASE = "placeholders.abort-in-flight"
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


def recorded(connector: str, tmp_path: Path) -> Recording:
    """The synchronous run of CASE."""
    [variant] = [v for v in cells(load_spec().cases[CASE], "reference") if v.scheduling == "sync"]
    found = record(
        variant, Target(connector, {"store": "{tmp}"}), built_in(), seed=0, tmp=tmp_path / "run"
    )
    assert found is not None
    return found


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return recorded(REFERENCE, tmp_path_factory.mktemp("right"))


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # planted.py


def changes(kind: str, old: Recording, new: Recording) -> list[str]:
    return differences(
        texts.render(kind, CASE, [old]).decode(), texts.render(kind, CASE, [new]).decode()
    )


def test_the_same_run_twice_is_the_same_byte_for_byte(right: Recording, tmp_path: Path) -> None:
    again = recorded(REFERENCE, tmp_path)
    for kind in texts.KINDS:
        assert texts.render(kind, CASE, [right]) == texts.render(kind, CASE, [again])
    assert texts.tensors([right]) == texts.tensors([again])


def test_what_is_read_back_is_what_was_computed(right: Recording) -> None:
    a = next(item for item in right.stored if item.req == "a")
    assert (a.tokens, a.end) == (13, 12)
    assert {block.holds for block in a.blocks} == {"a[0, 4)", "a[4, 8)", "a[8, 12)"}
    assert safetensors.numpy.load(texts.tensors([right]))[
        "reference-sync-v1-d1-b4/a/layer.1"
    ].shape == (12, 2, 32)


def test_a_field_that_changed_is_named(right: Recording, tmp_path: Path) -> None:
    found = changes("metadata", right, recorded("planted:OneField", tmp_path))
    assert (
        "reference-sync-v1-d1-b4: steps 1 to 8, build_connector_meta().answer.repaired: set[] -> set[29]"
        in found
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
    found = tensor_differences(texts.tensors([right]), texts.tensors([wrong]))
    assert any(
        "a/layer.0: 3 of 768 elements differ, in tokens 0, 4, 8, head 1; the first: token 0, head 1, K element 3"
        in s
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
        f"reference-sync-v1-d1-b4: step 2: {calls[place].hook} is called before build_connector_meta now"
    ]
    assert changes("metadata", right, dataclasses.replace(right, calls=calls)) == []


def test_what_cannot_be_shown_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(
        EncodeError,
        match=r"build_connector_meta returned in step 1 .*answer\.guard: a _thread\.lock has no canonical",
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
    """The stored KV is the same in all releases; so is the metadata, but for lookahead blocks, which older releases allocate later."""
    job = Job(load({"select": [case]}, start=Path("/")), GOLDEN, updating=False)
    files = job.files(job.spec.cases[case])
    job.close()
    assert files is not None
    everywhere = (
        ("stored.txt", "stored.safetensors")
        if job.spec.cases[case].config.spec_tokens
        else ("metadata.txt", "stored.txt")
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
