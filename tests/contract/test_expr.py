# SPDX-License-Identifier: Apache-2.0
"""Tests of check expressions: what is allowed, what is refused and where, and their speed."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.capabilities import CAPABILITIES, complete
from kvconform.contract.events import CHANNELS, EVENTS, PROVENANCE, channels_of, check_event
from kvconform.contract.expression import ExprError, compile_capability, compile_expr
from kvconform.errors import UsageError

LOOKUP = {
    "tokens": 8,
    "local": 4,
    "known": 13,
    "is_async": False,
    "req": "a",
    "type_ok": True,
}


def value(text: str, e: dict[str, Any] = LOOKUP, **scope: str | None) -> Any:
    return compile_expr(text, {"e": "lookup", **scope}).bind(
        complete({"store": True}), {"depth": 2}
    )(e)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("e.tokens", 8),
        ("e.local + e.tokens <= e.known - (0 if e.is_async else 1)", True),
        ("e.req in ('a', 'b') and not e.is_async", True),
        ("max(e.tokens, e.local) - min(3, abs(-2)) * 2 // 1 % 5", 4),
        ("sorted(x * 2 for x in [3, 1] if x != 9)[0]", 2),
        ("len({e.req, 'b'}) == 2 and any(y for x, y in [(0, e.local)])", True),
        ("min([], default=7)", 7),
        ("all([e.tokens > 0, e.tokens is not None])", True),
        ("set([1, 2]) & {2} == {2}", True),
        ("cap.store and cfg.depth == 2", True),
        ("'e.tokens'", "e.tokens"),
        ("e.tokens\n  > 7", True),
    ],
)
def test_values(text: str, wanted: object) -> None:
    assert value(text) == wanted


@pytest.mark.parametrize(
    ("text", "sentence", "column"),
    [
        ("e.tokns > 1", "event lookup has no field 'tokns'; did you mean 'tokens'?", 0),
        ("1 + e.__class__", "names that begin with an underscore", 4),
        ("().__class__", "only e, t, cap and cfg have fields", 0),
        ("e.req.upper", "only e, t, cap and cfg have fields", 0),
        ("e.req.upper()", "call of `e.req.upper`", 0),
        ("open('x')", "call of `open`", 0),
        ("getattr(e, 'x')", "call of `getattr`", 0),
        ("e['__class__']", "`e` can only be used with a field", 0),
        ("[f for f in e.req if f.x]", "only e, t, cap and cfg have fields", 21),
        ("[len for len in e.req]", "cannot be the variable", 9),
        ("[e for e in e.req]", "cannot be the variable", 7),
        ("[_x for _x in e.req]", "cannot be the variable", 8),
        ("[x for x in e.req] and x", "unknown name `x`", 23),
        ("x for x in e.req", "not a Python expression", 2),
        ("(lambda: 1)()", "call of `lambda: 1`", 0),
        ("lambda: 1", "Lambda is not allowed", 0),
        ("f'{e.req}'", "JoinedStr is not allowed", 0),
        ("2 ** 99", "Pow is not allowed", 0),
        ("(e.tokens := 1)", "not a Python expression", 0),
        ("(x := 1)", "NamedExpr is not allowed", 1),
        ("e.tokens >", "not a Python expression", 0),
        ("true", "write True, False or None", 0),
        ("t.req == 'a'", "`t` has no meaning here", 0),
        ("cap.sotre", "did you mean 'store'?", 0),
        ("cfg.tokens", "cfg (the fields of run.start) has no field", 0),
        ("has(1)", "call of `has`", 0),
        ("len(e.req, default=1)", "keyword arguments are not allowed", 0),
        ("1j", "a literal complex is not allowed", 0),
        ("   ", "the expression is empty", 0),
    ],
)
def test_refusals(text: str, sentence: str, column: int) -> None:
    with pytest.raises(ExprError) as caught:
        compile_expr(text, {"e": "lookup"})
    assert sentence in str(caught.value)
    if "not a Python" not in sentence:
        assert caught.value.column == column


def test_fields_of_the_trigger_are_those_of_its_kind() -> None:
    scope: dict[str, str | None] = {"e": "hold", "t": "alloc"}
    assert (
        compile_expr("e.req == t.req and t.external", scope).bind()(
            {"req": "a"}, {"req": "a", "external": 3}
        )
        == 3
    )
    with pytest.raises(ExprError, match="event hold has no field 'external'"):
        compile_expr("e.external", scope)


def test_fields_that_are_keywords() -> None:
    found = compile_expr("e.from == 'running' and e.to", {"e": "req.state"})
    assert found.bind()({"from": "running", "to": "preempted"}) == "preempted"
    assert ("e", "from") in found.reads


def test_no_builtins_are_in_reach() -> None:
    function = compile_expr("e.tokens", {"e": "lookup"}).bind()
    assert function.__globals__["__builtins__"] == {}


def test_reads_and_values_for_messages() -> None:
    found = compile_expr("e.tokens >= t.tokens", {"e": "lookup", "t": "lookup"})
    assert found.reads == (("e", "tokens"), ("t", "tokens"))
    assert found.values({"tokens": 1}, {"tokens": "x" * 200}).startswith(
        "e.tokens=1, t.tokens='xxx"
    )
    assert len(found.values({"tokens": 1}, {"tokens": "x" * 200})) < 120
    assert not found.constant and compile_expr("1 > 2", {"e": "lookup"}).constant


def test_the_part_that_decides_is_named() -> None:
    found = compile_expr("e.type_ok and e.tokens >= 0 and e.local >= 0", {"e": "lookup"})
    assert found.culprit(True, {}, {}, {**LOOKUP, "tokens": -1}) == ("e.tokens >= 0", "e.tokens=-1")
    either = compile_expr("e.tokens < 0 or e.local > 3", {"e": "lookup"})
    assert either.culprit(False, {}, {}, LOOKUP) == ("e.local > 3", "e.local=4")


@pytest.mark.parametrize(
    ("source", "caps", "wanted"),
    [
        ("core", {}, True),
        ([], {}, True),
        ("store", {}, False),
        ("store", {"store": True}, True),
        ("!lossy and !synthesises_kv", {}, True),
        ("!lossy", {"lossy": 0.1}, False),
        (["store", "!lossy"], {"store": True}, True),
        ("saves", {"saves": "none"}, False),
        ("saves", {"saves": "prompt"}, True),
        ("cap.saves in ('prompt', 'all')", {"saves": "all"}, True),
        ("cap.saves != 'all'", {"saves": "all"}, False),
        ("store and (hma or async_load)", {"store": True, "async_load": True}, True),
    ],
)
def test_capability_conditions(source: str | list[str], caps: dict[str, Any], wanted: bool) -> None:
    assert bool(compile_capability(source).bind(complete(caps))({})) is wanted


def test_unknown_capabilities_are_refused() -> None:
    with pytest.raises(ExprError, match="unknown name `shop`"):
        compile_capability("shop")
    with pytest.raises(UsageError, match="unknown capability 'shop'"):
        complete({"shop": True})
    with pytest.raises(UsageError, match="must be one of none, prompt, all"):
        complete({"saves": True})
    for bad, words in (
        ({"store": "yes"}, "true or false"),
        ({"chunk_tokens": 0}, "above 0"),
        ({"chunk_tokens": True}, "above 0"),
        ({"lossy": "a bit"}, "tolerance"),
        ({"roles": "kv_both"}, "list of kv_both"),
        ({"roles": ["kv_x"]}, "list of kv_both"),
    ):
        with pytest.raises(UsageError, match=words):
            complete(bad)
    assert complete({"lossy": 0.01, "roles": ["kv_both"]})["lossy"] == 0.01


def test_the_event_list_is_consistent() -> None:
    assert len(set(PROVENANCE)) == len(PROVENANCE) == 19
    assert {kind.channel for kind in EVENTS.values()} == set(CHANNELS)
    assert channels_of({"lookup", "run.end", "kv.wrong"}) == {"sched", "kv"}
    assert all(kind.doc.endswith(".") for kind in EVENTS.values())
    assert all(capability.doc for capability in CAPABILITIES.values())


def test_check_event() -> None:
    good = {
        "kind": "hold",
        "seq": 1,
        "step": 1,
        "req": "a",
        "generation": 0,
        "direction": "send",
        "transfer": None,
        "cause": "finish",
    }
    assert check_event(good) == []
    assert check_event({**good, "cause": None, "req": 3, "extra": 1}) == [
        "hold: req is 3, not str",
        "hold: cause is None",
        "hold: unknown field extra",
    ]
    assert check_event({"kind": "hold", "seq": 1}) != [] and check_event({"kind": "nope"}) == [
        "unknown event 'nope'"
    ]
    assert check_event({**good, "generation": True}) == ["hold: generation is True, not int"]
