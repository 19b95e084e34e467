# SPDX-License-Identifier: Apache-2.0
"""Tests of a controller's operations, and of what is judged after them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from kvconform.contract.capabilities import complete
from kvconform.contract.loader import load_spec
from kvconform.contract.steps import Control
from kvconform.contract.trace import Event, Trace
from kvconform.errors import UsageError
from kvconform.run.controls import Controls
from kvconform.run.records import Reload

SPEC = load_spec()
PROMPTS = {"a": [*range(13)], "b": [*range(50, 60)], "c": [*range(9)]}
"""`c` repeats the start of `a`."""
REPEATS = "again"
"""The request that repeats `a`."""


class Fake:
    """A controller of two levels that finds 12 tokens, all at the last one."""

    answer: Any = {"found": 12, "at": {"host": 0, "disk": 12}}

    def lookup(self, request: Any) -> Any:
        return self.answer

    def clear(self, request: Any) -> None:
        pass

    def move(self, request: Any, level: str) -> None:
        self.moved_to = level

    def pin(self, request: Any) -> None:
        pass

    def unpin(self, request: Any) -> None:
        pass

    def compress(self, request: Any) -> Any:
        return 0.01


class World:
    """A run with some requests, and a connector with a controller."""

    def __init__(self, controller: Any, declared: Any = ("lookup", "pin", "move")) -> None:
        self.trace = Trace()
        state = SimpleNamespace(
            trace=self.trace,
            caps={"controller": declared},
            prompts=PROMPTS,
            ids={name: name for name in PROMPTS},
            requests={name: SimpleNamespace(all_token_ids=ids) for name, ids in PROMPTS.items()},
            reloads={REPEATS: Reload("a")},
            cleared=set(),
            variant=SimpleNamespace(of_engine=lambda name: SimpleNamespace(block_size=4)),
            start_alike=lambda one, other: PROMPTS[one][0] == PROMPTS[other][0],
        )
        self.controls = Controls(state)  # type: ignore[arg-type]
        self.connector = SimpleNamespace(kvconform_controller=lambda: controller)

    def do(self, do: str, of: str = "a", to: str | None = None) -> Event:
        control = Control.model_validate({"do": do, "of": of, "to": to})
        self.controls.apply(control, object(), self.connector)
        return self.trace.events[-1]

    def look_up(self, tokens: list[int] = PROMPTS["a"]) -> Event | None:
        """Look up the request that repeats `a`; return what is judged."""
        request = SimpleNamespace(request_id=REPEATS, all_token_ids=tokens, num_tokens=len(tokens))
        self.controls.looked_up(request, {"tokens": 8, "local": 0})
        last = self.trace.events[-1]
        return last if last["kind"] == "control.result" else None


@pytest.mark.parametrize(("to", "level", "there"), [("first", "host", 0), ("last", "disk", 12)])
def test_a_move_names_the_level(to: str, level: str, there: int) -> None:
    controller = Fake()
    done = World(controller).do("move", to=to)
    assert controller.moved_to == level
    assert (done["before"], done["after"], done["there"], done["error"]) == (12, 12, there, None)


@pytest.mark.parametrize(("do", "to"), [("move", None), ("pin", "first")])
def test_only_a_move_has_a_place(do: str, to: str | None) -> None:
    with pytest.raises(ValidationError, match="`move` needs `to`"):
        Control.model_validate({"do": do, "of": "a", "to": to})


@pytest.mark.parametrize(
    ("do", "between", "is_judged"),
    [
        ("pin", ("req.scheduled", {"req": "b"}), True),
        ("pin", ("clock.advanced", {}), True),
        ("pin", ("cache.reset", {"connector": False}), True),
        ("pin", ("cache.reset", {"connector": True}), False),
        ("pin", ("store.damaged", {"count": 1}), False),
        ("pin", ("transfer.failed", {}), False),
        ("pin", ("engine.lifecycle", {}), False),
        ("pin", ("control.done", {"do": "clear", "of": "c"}), False),
        ("pin", ("control.done", {"do": "lookup", "of": "c"}), True),
        ("pin", ("control.done", {"do": "clear", "of": "b"}), True),
        ("lookup", ("cache.reset", {"connector": True}), False),
        ("lookup", ("req.scheduled", {"req": "b"}), False),
        ("lookup", ("control.done", {"do": "move", "of": "a"}), False),
        ("move", ("clock.advanced", {}), False),
        ("clear", ("cache.reset", {"connector": True}), True),
        ("clear", ("req.scheduled", {"req": "b"}), True),
        ("clear", ("req.scheduled", {"req": "c"}), False),
    ],
)
def test_what_may_have_changed_is_not_judged(
    do: str, between: tuple[str, dict[str, Any]], is_judged: bool
) -> None:
    world = World(Fake())
    world.do(do, to="first" if do == "move" else None)
    kind, fields = between
    world.trace.emit(kind, **fields)
    assert (world.look_up() is not None) == is_judged


def test_the_first_lookup_is_judged() -> None:
    world = World(Fake())
    world.do("pin")
    found = world.look_up()
    assert found is not None and (found["said"], found["usable"], found["tokens"]) == (12, 12, 8)
    world.trace.emit("step.scheduled")
    assert world.look_up() is None


@pytest.mark.parametrize(
    ("tokens", "usable"),
    [
        (PROMPTS["a"], 12),
        (PROMPTS["a"][:12], 8),  # the last token is computed
        ([*PROMPTS["a"][:6], 99, *PROMPTS["a"][7:]], 4),
        ([99, *PROMPTS["a"]], 0),
    ],
)
def test_only_whole_blocks_that_the_request_has_are_usable(tokens: list[int], usable: int) -> None:
    world = World(Fake())
    world.do("lookup")
    found = world.look_up(tokens)
    assert found is not None and found["usable"] == usable


def test_what_is_unpinned_may_go() -> None:
    world = World(Fake())
    world.do("pin")
    world.do("unpin")
    world.trace.emit("req.scheduled", req="b")
    assert world.look_up() is None


@pytest.mark.parametrize("at_call", [1, 2])
def test_a_lookup_that_raises_is_an_error_of_the_controller(at_call: int) -> None:
    class Raises(Fake):
        calls = 0

        def lookup(self, request: Any) -> Any:
            self.calls += 1
            if self.calls == at_call:
                raise KeyError("gone")
            return super().lookup(request)

    world = World(Raises())
    done = world.do("move", to="last")
    assert done["error"] == "KeyError: 'gone'" and done["there"] is None
    assert world.look_up() is None


@pytest.mark.parametrize(
    "answer",
    [None, 12, {"found": 12}, {"found": 12, "at": {}}, {"found": "12", "at": {"disk": 1}}],
)
def test_a_lookup_of_another_form_is_a_usage_error(answer: Any) -> None:
    controller = Fake()
    controller.answer = answer
    with pytest.raises(UsageError, match="must return {'found': int, 'at': {level: int}}"):
        World(controller).do("pin")


def test_a_level_that_is_no_longer_named_is_a_usage_error() -> None:
    class Forgets(Fake):
        def move(self, request: Any, level: str) -> None:
            self.answer = {"found": 12, "at": {"disk": 12}}

    with pytest.raises(UsageError, match="must name level 'host'"):
        World(Forgets()).do("move", to="first")


def test_a_tolerance_that_is_no_number_is_a_usage_error() -> None:
    controller = Fake()
    controller.compress = lambda request: None  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="must return the tolerance"):
        World(controller).do("compress")


def test_each_declared_operation_needs_a_method() -> None:
    class Some:
        def lookup(self, request: Any) -> Any:
            return Fake.answer

    assert World(Some(), ["lookup"]).do("lookup")["error"] is None
    with pytest.raises(UsageError, match="Some has no method pin, unpin;"):
        World(Some(), ["lookup", "pin"]).do("lookup")
    world = World(Some())
    world.connector.kvconform_controller = None
    with pytest.raises(UsageError, match="needs a method kvconform_controller"):
        world.do("lookup")
    with pytest.raises(UsageError, match="needs a method kvconform_controller"):
        World(None).do("lookup")


def test_a_controller_is_declared_with_its_lookup() -> None:
    assert complete({"controller": ["lookup", "pin"]})["controller"] == ["lookup", "pin"]
    assert complete({"controller": []})["controller"] == []
    with pytest.raises(UsageError, match="it must have lookup"):
        complete({"controller": ["pin"]})


@pytest.mark.parametrize("operation", ["lookup", "clear", "move", "pin", "compress"])
def test_each_operation_has_a_case_that_needs_no_other(operation: str) -> None:
    caps = complete({"store": True, "controller": ["lookup", operation]})
    cases = [
        case
        for case in SPEC.cases.values()
        if any(step.op == "control" and step.arg.do == operation for step in case.steps)
    ]
    assert any(case.needs_expr.bind(caps)({}) for case in cases)
