# SPDX-License-Identifier: Apache-2.0
"""Tests of the registry of planted defects and of their examination.

`nox -s defects` checks that each defect is caught as listed.
"""

from __future__ import annotations

import gc
import importlib
import json
import pkgutil
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvconform import commands
from kvconform.contract.loader import load_spec
from kvconform.dev import defects
from kvconform.dev.defect import (
    Defect,
    KillMatrix,
    Outcome,
    build,
    details,
    load_defects,
    summary,
)
from kvconform.dev.defects import (
    _command,
    difference,
    examine,
    examine_apart,
    main,
    named,
)
from kvconform.errors import UsageError
from kvconform.refimpl import defects as package
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.faulty import (
    Altered,
    Fault,
    Target,
    connector_of,
    in_force,
    returns,
    skipped,
    twice,
    with_arguments,
    with_keywords,
)

OWN = """
from kvconform.refimpl.defects import targets
from kvconform.refimpl.faulty import Target, skipped

OWN = 1


@targets.BUILD_OUTPUT.after
def ahead(output, engine, step):
    cached = output.scheduled_cached_reqs
    cached.num_computed_tokens = [count + 1 for count in cached.num_computed_tokens]


nothing = targets.BUILD_OUTPUT.after(lambda *arguments: None)
nowhere = Target("kvconform.refimpl.scheduler:nowhere").replaced_by(skipped)
"""
SPEC = load_spec()
DEFECTS = load_defects(SPEC)
MODULES = [
    importlib.import_module(f"{package.__name__}.{found.name}")
    for found in pkgutil.iter_modules(package.__path__)
]
PLAIN: dict[str, Any] = {
    "id": "d",
    "text": "t",
    "connector": "m:C",
    "cases": ["lifecycle.hook-order"],
    "fails": ["hook.no-raise"],
}


@pytest.mark.parametrize(
    "name", ["float-count", "loads-over-local-prefix", "engine-preempts-in-silence"]
)
def test_a_defect_is_caught_by_the_requirements_that_name_it(name: str, tmp_path: Path) -> None:
    outcome = examine(DEFECTS[name], SPEC, tmp_path)
    assert (outcome.problem, set(DEFECTS[name].fails) <= set(outcome.failed)) == ("", True)


def test_a_defect_that_is_none_is_noticed(tmp_path: Path) -> None:
    sound = Defect(**PLAIN | {"connector": "kvconform.refimpl.variants.loading:Undecided"})
    assert examine(sound, SPEC, tmp_path).problem == "not caught by hook.no-raise"


def test_every_defective_class_and_fault_is_in_the_registry() -> None:
    listed = {defect.connector for defect in DEFECTS.values()} | {
        defect.engine_fault for defect in DEFECTS.values()
    }
    for module in MODULES:
        for name, found in vars(module).items():
            bad = (
                isinstance(found, type)
                and issubclass(found, ReferenceConnector)
                and found.__module__ == module.__name__
            )
            if (bad or isinstance(found, Fault)) and name[0] != "_":
                assert f"{module.__name__}:{name}" in listed


def test_every_fault_of_the_registry_exists_and_changes_what_exists() -> None:
    faults = {name: defect.fault() for name, defect in DEFECTS.items() if defect.engine_fault}
    assert faults
    for name, found in faults.items():
        assert found is not None and found.changes, name
        for target, _ in found.changes:
            if target.name.startswith("kvconform."):  # vLLM's may be missing in an older release
                owner, attribute = target.resolve()
                assert hasattr(owner, attribute), target.name


@pytest.mark.parametrize(
    "change",
    [
        {"requirements": ["hook.no-raise"]},
        {"connector": "no colon"},
        {"connector": None},
        {"fails": []},
        {"may": ["hook.no-raise"]},
        {"cases": ["lifecycle.hook-order", "lifecycle.hook-order"]},
        {"bugs": ["B1"]},
        {"engine_fault": "no colon"},
    ],
)
def test_what_is_no_defect(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Defect(**{key: value for key, value in (PLAIN | change).items() if value is not None})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unknown": 1}, "unknown"),
        ({"cases": ["nope"]}, "names nope"),
        ({"fails": ["nope"]}, "names nope"),
        (
            {"engines": ["vllm"], "cases": ["lifecycle.hook-order"], "scheduling": ["sync"]},
            "has no run: in profile core",
        ),
        ({"engine_fault": "kvconform.refimpl.faulty:Fault"}, "neither a guarantee"),
    ],
)
def test_a_registry_that_names_what_does_not_exist(change: dict[str, Any], words: str) -> None:
    spec = load_spec()
    spec.defects = {"d": PLAIN | change}
    with pytest.raises(UsageError, match=words):
        load_defects(spec)


def test_a_fault_that_does_not_exist() -> None:
    for symbol in (
        "kvconform.nope:x",
        "kvconform.refimpl.faulty:nope",
        "kvconform.refimpl.faulty:Fault",
    ):
        with pytest.raises(UsageError):
            Defect(**PLAIN | {"engine_fault": symbol}).fault()


class _Adder:
    connector: Any = None

    def add(self, a: int, b: int) -> int:
        return a + b

    def sub(self, a: int, b: int) -> int:
        return a - b


ADD = Target(f"{__name__}:_Adder.add")
SUB = Target(f"{__name__}:_Adder.sub")


def test_a_fault_is_in_force_for_a_while_only() -> None:
    @ADD.replaced_by
    def wrong(add: Any, adder: _Adder, a: int, b: int) -> int:
        return int(add(adder, a, b)) + 1

    with (wrong + SUB.replaced_by(returns(0))).active():
        assert in_force()
        assert (_Adder().add(1, 2), _Adder().sub(5, 2)) == (4, 0)
    assert not in_force()
    assert (_Adder().add(1, 2), _Adder().sub(5, 2)) == (3, 3)


def test_a_fault_can_be_that_something_is_there() -> None:
    missing = Target(f"{__name__}:_Adder.mul", missing=True)
    with missing.replaced_by(lambda absent, adder, a, b: (absent(adder, a, b), a * b)).active():
        assert _Adder().mul(2, 3) == (None, 6)  # type: ignore[attr-defined]
    assert not hasattr(_Adder, "mul")


@pytest.mark.parametrize("name", ["kvconform.nope:f", "kvconform.errors:Nope.f"])
def test_a_target_that_does_not_exist(name: str) -> None:
    with pytest.raises((ImportError, AttributeError)), Target(name).replaced_by(skipped).active():
        pass
    assert not in_force()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (skipped, None),
        (returns(7), 7),
        (with_arguments(lambda adder, a, b: (adder, b, a)), -3),
        (with_keywords(b=1), 4),
    ],
)
def test_a_change_takes_the_place_of_a_method(change: Any, found: Any) -> None:
    with SUB.replaced_by(change).active():
        assert _Adder().sub(5, b=2) == found


def test_a_fault_stays_in_force_without_a_reference_to_it() -> None:
    activation = ADD.replaced_by(returns(-1)).active()
    activation.__enter__()
    left = weakref.ref(activation)
    del activation
    gc.collect()
    assert in_force() and _Adder().add(1, 1) == -1
    still = left()
    assert still is not None
    still.__exit__()
    assert not in_force() and _Adder().add(1, 1) == 2
    with pytest.raises(RuntimeError, match="call active"):
        still.__enter__()


def test_a_fault_that_was_never_in_force_is_loud() -> None:
    with pytest.warns(RuntimeWarning, match=r"_Adder\.add was never in force: write `with fault"):
        ADD.replaced_by(returns(-1)).active()


def test_a_function_can_be_called_before_or_after_a_target() -> None:
    calls: list[Any] = []
    with (
        ADD.before(lambda adder, a, b: calls.append((a, b))).active(),
        SUB.after(lambda found, adder, a, b: calls.append((found, a, b))).active(),
    ):
        assert (_Adder().add(1, 2), _Adder().sub(5, 2)) == (3, 3)
    assert calls == [(1, 2), (3, 5, 2)]


class _Owner:
    def __init__(self) -> None:
        self.connector: Any = _Adder()

    def total(self, numbers: list[int]) -> list[Any]:
        return [self.connector.add(number, 1) for number in numbers]


def test_hooks_can_be_changed_during_a_target() -> None:
    calls: list[Any] = []

    def noted(add: Any, a: int, b: int) -> int:
        calls.append(a)
        return int(add(a, b))

    def noted_twice(add: Any, a: int, b: int) -> Any:
        return twice(lambda: noted(add, a, b))

    owner, total = _Owner(), Target(f"{__name__}:_Owner.total")
    with total.during(when=lambda owner, numbers: len(numbers) > 1, add=noted_twice).active():
        assert (owner.total([1]), owner.total([2, 3])) == ([2], [3, 4])
        assert owner.connector.add(1, 1) == 2
    assert calls == [2, 2, 3, 3]


def test_an_altered_object_is_otherwise_the_same() -> None:
    owner = _Adder()
    owner.connector = inner = _Adder()
    with connector_of(owner, add=lambda original, a, b: -original(a, b)):
        assert isinstance(owner.connector, _Adder)
        assert (owner.connector.add(1, 2), owner.connector.sub(5, 2)) == (-3, 3)
        owner.connector.name = "set on the original"
    assert owner.connector is inner
    assert inner.name == "set on the original"  # type: ignore[attr-defined]
    assert Altered(inner).sub(1, 1) == 0


def test_an_outcome_that_is_not_as_listed_is_a_problem() -> None:
    defect = DEFECTS["no-salt-in-key"]
    assert difference(defect, set(defect.fails)) == ""
    assert difference(defect, set()) == "not caught by identity.content, lookup.identity"
    assert difference(defect, {*defect.fails, "hook.no-raise"}) == (
        "also caught by hook.no-raise, which its entry does not list"
    )


def test_only_the_runs_that_the_gate_makes_are_made() -> None:
    defect = DEFECTS["looks-up-another-key"]
    assert [each.id for each in defect.variants(SPEC)] == [
        "lifecycle.local-recomputed[reference-sync-v1-d1-b4]"
    ]
    left_out = defect.model_copy(update={"scheduling": ["async"]})
    assert list(left_out.variants(SPEC)) == []
    # Of a case that the gate does not have, all are.
    full = DEFECTS["negative-count-granted"]
    assert len(list(full.variants(SPEC))) == sum(
        len(list(SPEC.cases[case].variants(full.engines))) for case in full.cases
    )


def test_what_was_never_at_stake_is_told_from_what_passed(tmp_path: Path) -> None:
    defect = Defect(**PLAIN | {"fails": ["hook.no-raise", "reset.answer"]})
    verdicts = {
        "hook.no-raise": {"PASS": 1, "NOT_EXERCISED": 1},
        "reset.answer": {"NOT_EXERCISED": 2},
    }
    wanted = (
        "not caught by hook.no-raise; reset.answer was NOT_EXERCISED in all 2 runs of "
        "lifecycle.hook-order"
    )
    assert difference(defect, set(), verdicts) == wanted
    assert difference(defect, {"reset.answer"}, verdicts) == "not caught by hook.no-raise"
    sound = Defect(
        **PLAIN
        | {"connector": "kvconform.refimpl.variants.loading:Undecided", "fails": ["reset.answer"]}
    )
    outcome = examine(sound, SPEC, tmp_path)
    assert outcome.problem.startswith("reset.answer was NOT_EXERCISED in ") and list(
        outcome.passed_by
    ) == ["reset.answer"]


def test_a_defect_that_is_not_caught_says_what_was_exercised(tmp_path: Path) -> None:
    fails = ["hook.no-raise", "reset.answer", "lookup.answer-type"]
    known = Defect(**PLAIN | {"connector": DEFECTS["float-count"].connector, "fails": fails})
    outcome = examine(known, SPEC, tmp_path)
    matrix = build([outcome], {known.id: known}, [], complete=False)
    lines = summary(matrix)
    runs = r"\d+ runs, first lifecycle\.hook-order\[reference-"
    assert lines[0].startswith(f"{known.id}: not caught by hook.no-raise; reset.answer was NOT_EXE")
    assert any(
        re.match(rf"  hook\.no-raise was exercised \d+ times and held in {runs}", line)
        for line in lines
    )
    assert any(re.match(rf"  reset\.answer was NOT_EXERCISED in {runs}", line) for line in lines)
    assert any(
        re.match(rf"  lookup\.answer-type failed in {runs}.*: asked for", line) for line in lines
    )
    sound = Defect(**PLAIN | {"connector": "kvconform.refimpl.variants.loading:Undecided"})
    assert details(examine(sound, SPEC, tmp_path))[-1] == "no requirement failed"


def test_a_defect_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert commands.defects(["mine:ahead"], 1, None, ["chunked.boundaries"], strict=False) == 0
    said = capfd.readouterr()
    assert said.out.startswith("mine:ahead: found by ") and "engine.meta-before-advance" in said.out
    assert said.err == ""  # nothing of vLLM's about Triton
    assert commands.defects(["mine:nothing"], 1, None, ["chunked.boundaries"], strict=False) == 1
    assert re.match(
        r"mine:nothing: nothing finds it; \d+ requirements exercised in 1 case",
        capfd.readouterr().out,
    )
    for name, why in (
        ("mine:nowhere", "changes what does not exist"),
        ("mine:absent", "cannot be imported"),
        ("mine:OWN", "is neither a Fault"),
    ):
        with pytest.raises(UsageError, match=why):
            commands.defects([name], 1, None, ["chunked.boundaries"], strict=False)
    with pytest.raises(UsageError, match="is no planted defect"):
        commands.defects(["mine:ahead", "float-count"], 1, None, [], strict=False)
    with pytest.raises(UsageError, match="-k is for a defect of your own"):
        commands.defects(["float-count"], 1, None, ["chunked"], strict=False)


def test_a_requirement_stands_for_its_defects() -> None:
    assert named(["float-count"]) == ["float-count"]
    found = named(["load.only-grant", "loads-over-local-prefix"])
    assert (
        found == [name for name, each in DEFECTS.items() if "load.only-grant" in each.fails]
        and len(found) > 1
    )
    with pytest.raises(
        UsageError,
        match=r"^there is no defect or requirement 'flat-count'; did you mean float-count",
    ):
        named(["flat-count"])
    lists = r"^there is no defect or requirement 'zzzz'; spec/defects\.yaml lists the defects$"
    with pytest.raises(UsageError, match=lists):
        named(["zzzz"])


def test_the_matrix_says_what_nothing_kills() -> None:
    requirements = [
        SPEC.requirements[name]
        for name in ("hook.no-raise", "lookup.identity", "engine.meta-once", "lookup.repeatable")
    ]
    outcomes = [
        Outcome(
            defect="d",
            failed={"hook.no-raise": ["v"], "lookup.identity": ["v"]},
            problem="also caught by lookup.identity, which its entry does not list",
        )
    ]
    matrix = build(
        outcomes, {"d": Defect(**PLAIN | {"bugs": ["B001"]})}, requirements, complete=True
    )
    # a SHOULD needs no defect; one that was not listed kills nothing
    assert matrix.unkilled == ["lookup.identity", "engine.meta-once"]
    assert matrix.bugs == {"B001": ["d"]}
    text = "\n".join(summary(matrix))
    assert "0 of 1 defects are caught as listed; 1 otherwise\n" in text
    assert "MUST requirements killed: 1 of 2" in text
    assert "MUST guarantees killed: 0 of 1" in text
    assert build(outcomes, {"d": Defect(**PLAIN)}, requirements, complete=False).unkilled == []


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("flat-count", "there is no defect or requirement 'flat-count'; did you mean float-count"),
        ("--help", "this command takes ids only; `kvconform defects` takes options"),
    ],
)
def test_a_mistake_is_one_sentence(
    argument: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command([argument]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvconform: {sentence}") and said.count("\n") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="there is no defect or requirement 'nope'"):
        main(["nope"])
    assert main(["float-count"], jobs=1, report_dir=str(tmp_path / "report")) == 0
    assert "1 of 1 defects are caught as listed" in capsys.readouterr().out
    matrix = KillMatrix.model_validate(
        json.loads((tmp_path / "report" / "kill-matrix.json").read_text())
    )
    assert [row.id for row in matrix.requirements if row.by] == ["lookup.answer-type"]
    assert (
        "| `lookup.answer-type` | MUST | `float-count` |"
        in (tmp_path / "report" / "kill-matrix.md").read_text()
    )


def test_what_is_no_defect_is_run_too() -> None:
    planned = defects.plan(
        [DEFECTS["float-count"], DEFECTS["engine-finishes-twice"], DEFECTS["keys-by-id"]], SPEC
    )
    assert {control.connector for control in planned} == {
        "kvconform.refimpl.connector:ReferenceConnector"
    }
    runs = [name for control in planned for _, name in control.runs]
    assert len(runs) == len(set(runs)) > len(planned)
    assert (
        defects.sound("kvconform.refimpl.defects.transfer:OwnIds")
        == "kvconform.refimpl.variants.peer:Peer"
    )


def test_a_control_run_that_fails_is_a_problem(tmp_path: Path) -> None:
    runs = (("lifecycle.hook-order", "lifecycle.hook-order[reference-sync-v1-d1-b4]"),)
    bad = defects.Control(DEFECTS["float-count"].connector, {}, {}, runs)
    outcome = defects.run(bad, SPEC, tmp_path)
    assert "is no defect, and fails lookup.answer-type in lifecycle.hook-order[" in outcome.problem
    matrix = build([], {}, [], [outcome, Outcome(defect="control")], complete=False)
    assert summary(matrix)[0] == f"{outcome.defect} {outcome.problem}"


def test_a_defect_that_ends_its_process(tmp_path: Path) -> None:
    outcome = examine_apart(DEFECTS["kills-process"], SPEC, tmp_path)
    assert (outcome.problem, list(outcome.failed)) == ("", ["hook.keeps-process"])


def test_a_defect_that_does_not_end_its_process_is_examined_as_any_other(tmp_path: Path) -> None:
    outcome = examine_apart(DEFECTS["float-count"], SPEC, tmp_path)
    assert (outcome.problem, list(outcome.failed)) == ("", ["lookup.answer-type"])
