# SPDX-License-Identifier: Apache-2.0
"""Tests of root causes: what explains what, and in which order they are shown."""

from __future__ import annotations

import pytest

from kvconform.judge.foreign import UNHEARD
from kvconform.judge.records import AGAIN, FAILED_LOAD, Place, Row, Verdict
from kvconform.report.roots import Root, roots
from kvconform.report.stage import Stage, stage


def row(
    requirement: str,
    case: str = "c",
    *,
    event: int | None = None,
    kind: str = "requirement",
    gating: bool = True,
    cause: str = "x",
) -> Row:
    found = Row(requirement, case, "vllm", "sync", "v1", 1, 4, Verdict.FAIL, cause=(cause,))
    found.event = event
    found.gating = gating and kind == "requirement"
    found.kind = "guarantee" if kind == "guarantee" else "requirement"
    return found


def blocked(requirement: str, by: str, case: str = "c") -> Row:
    found = row(requirement, case)
    found.verdict, found.blocked_by = Verdict.BLOCKED, by
    return found


def shape(found: list[Root]) -> list[tuple[str, list[str], list[str]]]:
    return [
        (root.row.requirement, [group[0].requirement for group in root.consequences], root.blocked)
        for root in found
    ]


def test_a_save_explains_the_load_that_shows_it_although_the_load_came_first() -> None:
    rows = [row("load.position", event=3), row("save.owned", event=7)]
    assert shape(roots(rows)) == [("save.owned", ["load.position"], [])]


def test_wrong_bytes_explain_that_nothing_good_was_delivered() -> None:
    rows = [row("transfer.delivered", event=9), row("load.position", event=7)]
    assert shape(roots(rows)) == [("load.position", ["transfer.delivered"], [])]


def told(requirement: str, case: str, side: str, outdated: tuple[str, int] | None) -> Row:
    """A failure whose bytes the block tables explain."""
    found = row(requirement, case, cause=f"{requirement} told")
    found.side = "load" if side == "load" else "save"
    found.outdated = outdated
    return found


def test_what_outdated_tables_explain_is_one_mistake() -> None:
    """What fails in most runs says most about it."""
    save = told("save.owned", "c", "save", ("a", 5))
    loads = [told("load.position", case, "load", ("a", 5)) for case in ("c", "d")]
    assert shape(roots([save, *loads])) == [("load.position", ["save.owned"], [])]
    save.outdated = ("x", 9)
    assert shape(roots([save, *loads])) == [("load.position", ["save.owned"], [])]
    save.outdated = None
    assert len(roots([save, *loads])) == 2, "no table tells of the save"
    save.outdated = ("a", 5)
    advice = [told("load.position", case, "load", ("a", 5)) for case in ("c", "d")]
    for row_ in advice:
        row_.gating = False
    assert len(roots([save, *advice])) == 2, "advice hides nothing that counts"
    elsewhere = told("lookup.truth", "z", "save", ("a", 5))
    assert len(roots([elsewhere, *loads])) == 2, "no copying of KV"


def test_saves_that_came_too_late_are_one_mistake() -> None:
    """KV of another request was read from the block, or what it holds before any is computed."""
    owned = told("save.owned", "c", "save", None)
    early = told("save.confirmed", "d", "save", None)
    assert shape(roots([early, owned])) == [("save.owned", ["save.confirmed"], [])]
    owned.suspected = ("a", 5)
    load = told("load.position", "c", "load", ("a", 5))
    more = told("load.position", "e", "load", ("a", 5))
    assert shape(roots([early, owned, load, more])) == [
        ("load.position", ["save.owned", "save.confirmed"], [])
    ], "a chain"
    early.side = None
    assert len(roots([early, owned])) == 2, "not known to be late"
    early.side, early.outdated = "save", ("a", 5)
    assert len(roots([early, owned])) == 2, "by an outdated table"
    early.outdated, owned.side, owned.suspected = None, None, None
    assert len(roots([early, owned])) == 2, "the other one is not known to be late"
    more = [told("save.owned", case, "save", None) for case in ("f", "g")]
    assert shape(roots([early, owned, *more])) == [("save.owned", ["save.confirmed"], [])], "most"
    assert len(roots([early, owned, more[0]])) == 2, "half of them"


def test_what_follows_a_root_cause_explains_as_much() -> None:
    """A late save finds wiped memory in one run, and KV of others in another."""
    owned = told("save.owned", "c", "save", None)
    early = told("save.confirmed", "d", "save", None)
    loads = [row("load.position", case) for case in ("c", "d")]
    found = [("save.owned", ["load.position", "save.confirmed"], [])]
    assert shape(roots([early, owned, *loads])) == found
    assert len(roots([early, owned, *loads, row("load.position", "e")])) == 2, "a run without them"


def test_wiped_memory_is_what_a_late_save_finds_as_well() -> None:
    late = [row("save.owned", case, cause="other_request") for case in ("c", "d")]
    wiped = row("save.owned", "e", cause="poison")
    assert shape(roots([wiped, *late])) == [("save.owned", ["save.owned"], [])]
    assert roots([wiped, *late])[0].group == late and roots([wiped, *late])[0].number == 0
    wiped.cause = ("torn",)
    assert len(roots([wiped, *late])) == 2, "not late, but written meanwhile"
    wiped.cause = ("poison",)
    for each in late:
        each.outdated = ("a", 5)
    assert len(roots([wiped, *late])) == 2, "those are by an outdated table"


def test_a_load_beyond_its_grant_writes_and_reports_beyond_it() -> None:
    def astray(case: str, hook: str, cause: str) -> Row:
        found = row("load.only-grant", case, cause=cause)
        found.hook = hook
        return found

    shared = [astray(case, "start_load_kv", "shared") for case in ("c", "d")]
    foreign = astray("e", "start_load_kv", "other_request")
    outside = [row("load.errors-within-grant", case) for case in "fghijk"]
    [root] = roots([*outside, *shared, foreign])
    assert root.group == shared and root.failed == ["load.errors-within-grant", "load.only-grant"]
    for each in outside:
        each.cause += (AGAIN,)
    assert len(roots([*outside, *shared, foreign])) == 2, "a set that is never emptied"
    for each in (*shared, foreign):
        each.hook = "save_kv_layer"
    assert len(roots([*outside, *shared, foreign])) == 3, "no load wrote there"


def test_hits_that_are_right_without_what_is_added_to_them_are_one_mistake() -> None:
    names = ("lookup.truth", "lookup.identity", "lookup.last-token")
    rows = [row(name, case) for name in names for case in ("c", "d")]
    rows += [row("lookup.truth", "e"), row("lookup.beyond-local", "e")]
    for each in rows:
        each.adds_to_itself = True
    [root] = roots(rows)
    assert root.row.requirement == "lookup.beyond-local" and root.number == 3
    [root] = roots(rows[:-1])
    assert root.row.requirement == "lookup.truth", "that of most runs, with none beyond the request"
    rows[-1].gating = False
    [root] = roots(rows)
    assert root.row.requirement == "lookup.truth", "what counts is not below what does not"
    rows[-1].gating = True
    rows[0].adds_to_itself = False
    assert len(roots(rows)) > 1, "one of them is wrong without it as well"


def test_keys_that_leave_out_what_tells_requests_apart_are_one_mistake() -> None:
    def left_out(requirement: str, case: str, kind: str) -> Row:
        found = row(requirement, case, cause=kind)
        found.differs = (kind,)
        return found

    salts = [left_out("lookup.identity", case, "salt") for case in ("c", "d")]
    adapter = left_out("lookup.identity", "e", "adapter")
    load = left_out("identity.content", "f", "salt")
    assert shape(roots([adapter, *salts, load])) == [
        ("lookup.identity", ["lookup.identity", "identity.content"], [])
    ]
    load.differs = ("items",)
    assert len(roots([adapter, *salts, load])) == 2, "no lookup leaves out items"
    load.differs = ()
    assert len(roots([adapter, *salts, load])) == 2, "nothing is known of it"
    load.differs, adapter.differs = ("salt",), ("model",)
    assert len(roots([adapter, *salts, load])) == 2, "other keys have the model"
    adapter.differs = ("adapter",)
    for each in salts:
        each.gating = False
    found = [root.group for root in roots([adapter, *salts])]
    assert found == [[adapter], salts], "what counts is not below what does not"
    assert roots([load])[0].row is load


def test_kv_of_another_rank_may_be_that_of_no_rank() -> None:
    swapped = row("layout.halves", "c", cause="head_swapped")
    swapped.rank = 1
    zeros = [row("save.confirmed", case) for case in "de"]
    assert roots([*zeros, swapped])[0].group == zeros, "with one rank, it is a save's mistake"
    for each in zeros:
        each.rank = 0
    assert shape(roots([*zeros, swapped])) == [("layout.halves", ["save.confirmed"], [])]
    swapped.cause = ("kv_swapped",)
    assert len(roots([*zeros, swapped])) == 2, "of the same rank"


def test_leaders_that_go_round_in_a_circle_are_none() -> None:
    """Of saves with more than four causes, the last ones share a group, whatever tells of them."""
    saves = [row("save.confirmed", f"c{number}", cause=f"cause {number}") for number in range(3)]
    upon = row("save.confirmed", "q")
    upon.cause += (FAILED_LOAD,)
    later = [told("save.confirmed", case, "save", ("a", 5)) for case in "stu"]
    missing = [row("load.complete-or-failed", case) for case in "qstu"]
    for each in missing:
        each.suspected = ("a", 5)
    load = told("load.position", "z", "load", ("a", 5))
    found = roots([*saves, upon, *later, *missing, load])
    assert sum(len(root.group) + sum(map(len, root.consequences)) for root in found) == 12


def test_what_fails_in_nearly_all_runs_explains() -> None:
    saves = [row("save.confirmed", f"c{number}") for number in range(9)]
    claims = [row("lookup.truth", f"c{number}") for number in range(10)]
    assert shape(roots([*saves, *claims])) == [("save.confirmed", ["lookup.truth"], [])]
    assert len(roots([*saves[1:], *claims])) == 2


def test_of_saves_and_loads_the_more_frequent_is_first() -> None:
    rare = row("save.owned", "a")
    claims = [row("lookup.truth", f"c{number}") for number in range(20)]
    often = [row("load.position", f"d{number}") for number in range(20)]
    found = roots([rare, *claims, *often])
    assert [root.row.requirement for root in found] == [
        "load.position",
        "save.owned",
        "lookup.truth",
    ]


def test_a_save_of_what_a_load_left_out_follows_that_load() -> None:
    save = row("save.confirmed", "c", event=3)
    save.cause += (FAILED_LOAD,)
    load = row("load.complete-or-failed", "c", event=9)
    assert shape(roots([save, load])) == [("load.complete-or-failed", ["save.confirmed"], [])]
    elsewhere = row("load.complete-or-failed", "d")
    assert len(roots([save, elsewhere])) == 2
    early = [row("save.confirmed", case) for case in ("e", "f")]
    assert roots([save, *early])[0].group == early, "by chance, a load of this save failed"
    save.cause = ("x",)
    assert roots([save, load])[0].row is save, "otherwise, saves come before loads"


def test_what_most_runs_tell_of_an_outdated_table_holds_for_the_group() -> None:
    load = [told("load.position", case, "load", ("a", 5)) for case in ("c", "d", "e", "f")]
    save = [told("save.confirmed", case, "save", ("a", 5)) for case in ("c", "d")]
    unclear = row("save.confirmed", "g", cause="save.confirmed told")
    assert shape(roots([*load, *save, unclear])) == [("load.position", ["save.confirmed"], [])]
    more = row("save.confirmed", "h", cause="save.confirmed told")
    assert len(roots([*load, *save, unclear, more])) == 2, "not in most runs"


def test_what_an_outdated_table_may_explain_needs_another_failure_that_one_explains() -> None:
    """The load is suspected if another load did use an old table; a save, if one of its run did."""
    missing = [row("load.complete-or-failed", case) for case in ("e", "f", "g")]
    for each in missing:
        each.suspected = ("b", 3)
    load = told("load.position", "c", "load", ("a", 5))
    save = told("save.confirmed", "c", "save", ("a", 5))
    assert shape(roots([*missing, load])) == [("load.position", ["load.complete-or-failed"], [])]
    assert len(roots([*missing, save])) == 2, "only saves are known to use old tables"
    late = told("save.owned", "c", "save", None)
    late.suspected = ("a", 5)
    loads = [load, told("load.position", "d", "load", ("a", 5))]
    assert shape(roots([late, *loads])) == [("load.position", ["save.owned"], [])]
    late.suspected = ("a", 9)
    assert len(roots([late, *loads])) == 2, "another preemption"


def test_a_load_of_which_the_bytes_are_explained_explains_what_it_left_out() -> None:
    first = row("load.complete-or-failed", event=3)
    first.step, first.req = 13, "b"
    second = told("load.position", "c", "load", ("b", 11))
    second.step, second.req, second.event = 13, "b", 4
    assert shape(roots([first, second])) == [("load.position", ["load.complete-or-failed"], [])]
    first.req = "x"
    assert len(roots([first, second])) == 2, "another load"


def test_a_load_that_wrote_elsewhere_explains_what_is_missing() -> None:
    """One mistake about the place of blocks, such as one about smaller kernel blocks."""
    missing = row("load.complete-or-failed", event=9)
    missing.step, missing.req = 14, "c"
    astray = row("load.only-grant", event=7)
    astray.step, astray.req, astray.hook = 14, "c", "start_load_kv"
    assert shape(roots([missing, astray])) == [("load.only-grant", ["load.complete-or-failed"], [])]
    for name, value in (("req", "x"), ("req", None), ("step", 13), ("hook", "wait_for_save")):
        before = getattr(astray, name)
        setattr(astray, name, value)
        assert len(roots([missing, astray])) == 2, f"another {name}"
        setattr(astray, name, before)
    elsewhere = row("load.complete-or-failed", "another run", event=9)
    elsewhere.step, elsewhere.req = 14, "c"
    assert len(roots([missing, elsewhere, astray])) == 2, "a run in which nothing went astray"


def test_a_load_of_other_layers_explains_the_layers_that_are_missing() -> None:
    missing = row("load.complete-or-failed", event=9)
    layer = row("layout.layer", event=10)
    for each in (missing, layer):
        each.step, each.req = 14, "c"
    assert len(roots([missing, layer])) == 2, "positions that are missing in all layers"
    missing.cause = ("missing", "layers")
    assert shape(roots([missing, layer])) == [("layout.layer", ["load.complete-or-failed"], [])]
    layer.req = "x"
    assert len(roots([missing, layer])) == 2, "another load"


def test_a_hook_raises_over_metadata_that_is_none() -> None:
    raised = row("hook.no-raise", event=9, cause="AttributeError")
    returned = row("meta.returned", event=7)
    lost = row("worker.stays-bound", event=8)
    raised.step = returned.step = lost.step = 3
    raised.hook = "start_load_kv"
    found = [("meta.returned", ["worker.stays-bound", "hook.no-raise"], [])]
    assert shape(roots([raised, returned, lost])) == found
    for name, value in (("hook", "update_connector_output"), ("cause", ("KeyError",)), ("step", 4)):
        before = getattr(raised, name)
        setattr(raised, name, value)
        assert len(roots([raised, returned])) == 2, f"another {name}"
        setattr(raised, name, before)
    returned.gating = False
    assert len(roots([raised, returned])) == 2, "advice hides nothing that counts"


def test_start_load_kv_raises_over_keywords_that_it_does_not_take() -> None:
    raised, form = row("hook.no-raise", cause="TypeError"), row("api.start-load-kwargs", "d")
    raised.hook, raised.runner = "start_load_kv", "v2"
    found = [("api.start-load-kwargs", ["hook.no-raise"], [])]
    assert shape(roots([raised, form])) == found
    here = Place("mine.py", 3, "start_load_kv", "sum(1)")
    others = (("hook", "bind"), ("cause", ("KeyError",)), ("place", here))
    for name, value in others:
        before = getattr(raised, name)
        setattr(raised, name, value)
        assert len(roots([raised, form])) == 2, f"another {name}"
        setattr(raised, name, before)
    older = row("hook.no-raise", "e", cause="TypeError")
    older.hook = "start_load_kv"
    assert len(roots([raised, older, form])) == 2, "V1 passes none"


def test_what_a_wrong_lookup_finds_was_announced_for_others() -> None:
    """Each missing announcement belongs to one lookup or another that claims what is not there."""

    def at(requirement: str, case: str, req: str, event: int) -> Row:
        found = row(requirement, case, event=event)
        found.step, found.req = 6, req
        return found

    silent = [at("events.complete", case, "b", 3) for case in ("c", "d")]
    claims = [at("lookup.identity", "c", "b", 4), at("lookup.truth", "d", "b", 4)]
    assert sorted(shape(roots([*silent, *claims])), key=lambda one: -len(one[1])) == [
        ("lookup.identity", ["events.complete"], []),
        ("lookup.truth", [], []),
    ]
    claims[1].req = "x"
    assert len(roots([*silent, *claims])) == 3, "another lookup"
    claims[1].event = 2
    assert len(roots([*silent, *claims])) == 2, "an earlier one"


@pytest.mark.parametrize("requirement", ["lookup.identity", "identity.content"])
def test_where_keys_leave_something_out_what_was_announced_for_others_is_found(
    requirement: str,
) -> None:
    """In the third run, KV of others is found by another request, or loaded."""

    def at(requirement: str, case: str, req: str, event: int) -> Row:
        found = row(requirement, case, event=event)
        found.step, found.req, found.differs = 6, req, ("salt",)
        return found

    def unannounced(*rows: Row) -> bool:
        return "events.complete" in [root.row.requirement for root in roots(rows)]

    silent = [at("events.complete", case, "b", 3) for case in ("c", "d", "e")]
    claims = [at("lookup.identity", case, "b", 4) for case in ("c", "d")]
    mixed = at(requirement, "e", "x", 5)
    assert not unannounced(*silent, *claims, mixed)
    assert unannounced(*silent, *claims), "nothing explains the third run"
    assert unannounced(*silent, claims[0], mixed), "most runs have a reason of their own"
    mixed.differs = ("model",)
    assert unannounced(*silent, *claims, mixed), "keys that leave out the model are others"


def test_of_wrong_saves_and_loads_the_explained_one_comes_first() -> None:
    plain = row("save.confirmed")
    explained = told("load.position", "other", "load", ("b", 11))
    assert [root.row for root in roots([plain, explained])] == [explained, plain]
    early = row("hook.no-raise", "third")
    assert roots([plain, explained, early])[0].row is early


def test_a_load_that_failed_in_silence_explains_what_was_stored_upon_it() -> None:
    silent, stored = row("load.complete-or-failed", event=3), row("save.sound", event=9)
    assert shape(roots([stored, silent])) == [("load.complete-or-failed", ["save.sound"], [])]
    other, lost = row("save.confirmed", event=3), row("save.completeness", event=9)
    assert len(roots([other, stored])) == 2
    poison = row("save.confirmed", "another run", event=3)
    poison.cause = ("kv.wrong", FAILED_LOAD)
    assert shape(roots([poison, stored])) == [("save.sound", ["save.confirmed"], [])]
    assert shape(roots([other, lost])) == [("save.confirmed", ["save.completeness"], [])]


def test_a_load_that_also_fails_elsewhere_is_a_root_cause_of_its_own() -> None:
    rows = [row("load.position"), row("load.position", "other"), row("save.owned")]
    assert shape(roots(rows)) == [("save.owned", [], []), ("load.position", [], [])]
    both = [*rows, row("recv.exactly-once", "other", event=1)]
    assert shape(roots(both))[0][0] == "recv.exactly-once"
    assert len(roots(both)) == 2, "together, the two explain all runs"


@pytest.mark.parametrize("most", ["save.owned", "recv.exactly-once"])
def test_of_several_explanations_the_one_of_most_runs_is_taken(most: str) -> None:
    """The other one comes first in one of the cases, and explains a run that the first does not."""
    few = ({"save.owned", "recv.exactly-once"} - {most}).pop()
    causes = [row(few, "a", event=1), *(row(most, case, event=1) for case in ("b", "c"))]
    shown = [row("load.position", case, event=9) for case in ("a", "b", "c")]
    for rows in ([*causes, *shown], [*causes[::-1], *shown]):
        explains = {root.row.requirement: len(root.consequences) for root in roots(rows)}
        assert explains == {most: 1, few: 0}


def test_a_report_explains_only_what_comes_after_it() -> None:
    before = [row("recv.exactly-once", event=5), row("load.complete-or-failed", event=9)]
    assert shape(roots(before)) == [("recv.exactly-once", ["load.complete-or-failed"], [])]
    before[0].event = 12
    assert len(roots(before)) == 2


def test_the_engines_relay_comes_before_what_the_connector_seems_to_do() -> None:
    rows = [
        row("recv.completes", event=9),
        row("engine.relays-reports", kind="guarantee", event=4),
    ]
    assert shape(roots(rows)) == [("engine.relays-reports", ["recv.completes"], [])]
    rows[0].case = "elsewhere"
    assert [root.row.requirement for root in roots(rows)] == [
        "recv.completes",
        "engine.relays-reports",
    ], "a guarantee that explains nothing comes after what counts"


@pytest.mark.parametrize(
    ("guarantee", "explains"),
    [("engine.placeholders-bounded", False), ("engine.entry-salt", True)],
)
def test_the_engine_never_confuses_tenants_unless_it_drops_what_tells_them_apart(
    guarantee: str, explains: bool
) -> None:
    mixed = row("lookup.identity", event=9)
    mixed.differs = ("salt",)
    found = roots([mixed, row(guarantee, kind="guarantee", event=4)])
    assert (found[0].row.requirement == guarantee) == explains


def test_blocked_requirements_are_consequences_of_what_blocked_them() -> None:
    rows = [row("save.owned"), row("load.position", event=1)]
    rows += [blocked("compose.null-effect", "load.position"), blocked("x.y", "save.owned", "other")]
    (root,) = roots(rows)
    assert (root.blocked, root.number) == (["compose.null-effect"], 2)
    failing = [*rows, row("compose.null-effect", "other")]
    assert "compose.null-effect" not in roots(failing)[0].blocked, "it has a section of its own"


def test_a_failure_that_counts_is_never_hidden_below_advice() -> None:
    rows = [row("save.owned", gating=False), row("load.position")]
    assert [root.row.requirement for root in roots(rows)] == ["load.position", "save.owned"]
    rows = [row("save.owned"), row("load.position", gating=False)]
    assert shape(roots(rows)) == [("save.owned", ["load.position"], [])]


@pytest.mark.parametrize("form", ["stats.fresh", "handshake.typed", "api.signatures"])
def test_what_is_about_form_explains_nothing_and_needs_no_explanation(form: str) -> None:
    rows = [row(form, event=1), row("hook.no-raise", event=0), row("load.position", event=2)]
    assert shape(roots(rows)) == [("hook.no-raise", ["load.position"], []), (form, [], [])]


def test_nothing_fails() -> None:
    assert roots([]) == [] and roots([blocked("a.b", "engine.crash")]) == []


@pytest.mark.parametrize(
    ("requirement", "kind", "expected"),
    [
        ("engine.relays-metadata", "guarantee", Stage.ENGINE),
        ("case.expected", "guarantee", Stage.END),
        ("run.quiesces", "requirement", Stage.END),
        ("save.completeness", "requirement", Stage.ANNOUNCED),
        ("save.owned", "requirement", Stage.SAVE),
        ("save.sound", "requirement", Stage.SAVE_UPON_LOAD),
        ("recv.not-before-bytes", "requirement", Stage.LOAD),
        ("recv.exactly-once", "requirement", Stage.CALL),
        ("lookup.sources-add-up", "requirement", Stage.FORM),
        ("lookup.truth", "requirement", Stage.ANNOUNCED),
        ("lookup.identity", "requirement", Stage.CALL),
        ("identity.content", "requirement", Stage.CACHE),
        ("live.tokens", "requirement", Stage.TOKENS),
    ],
)
def test_stages(requirement: str, kind: str, expected: Stage) -> None:
    assert stage(row(requirement, kind=kind)) is expected


def test_failures_of_one_stage_do_not_explain_each_other() -> None:
    rows = [row("save.owned", event=1), row("save.confirmed", event=2)]
    assert shape(roots(rows)) == [("save.owned", [], []), ("save.confirmed", [], [])]


def test_a_requirement_that_is_blocked_in_several_runs_is_named_once() -> None:
    rows = [row("save.owned"), row("save.owned", "other")]
    rows += [blocked("compose.null-effect", "save.owned", case) for case in ("c", "other")]
    (root,) = roots(rows)
    assert (root.blocked, root.number) == (["compose.null-effect"], 1)


def test_what_fails_in_many_more_runs_comes_before_a_rare_crash() -> None:
    crash = [row("hook.no-raise", f"crash-{number}") for number in range(8)]
    wrong = [row("load.position", f"wrong-{number}") for number in range(82)]
    assert [root.row for root in roots([*crash, *wrong])] == [wrong[0], crash[0]]
    nearly = wrong[:12]
    assert [root.row for root in roots([*crash, *nearly])] == [crash[0], wrong[0]], "stages decide"


def test_wrong_kv_comes_before_missing_kv_however_often_that_fails() -> None:
    missing = [row("save.completeness", f"missing-{number}") for number in range(79)]
    wrong = [row("save.owned", f"wrong-{number}") for number in range(5)]
    crash = [row("hook.no-raise", "crash")]
    order = [root.row for root in roots([*missing, *wrong, *crash])]
    assert order == [wrong[0], missing[0], crash[0]]


@pytest.mark.parametrize("requirement", ["load.position", "identity.content", "lookup.identity"])
def test_wrong_kv_comes_before_threads_however_often_these_are_left(requirement: str) -> None:
    threads = [row("lifecycle.threads-end", f"left-{number}") for number in range(79)]
    wrong = [row(requirement, f"wrong-{number}") for number in range(2)]
    assert roots([*threads, *wrong])[0].row.requirement == requirement


def test_metadata_that_holds_the_block_state_does_not_pickle_for_that_reason() -> None:
    held = row("meta.block-state-dropped", event=4)
    unpicklable = row("meta.picklable", event=4)
    assert shape(roots([unpicklable, held])) == [
        ("meta.block-state-dropped", ["meta.picklable"], [])
    ]
    elsewhere = row("meta.picklable", "d", event=4)
    assert len(roots([unpicklable, elsewhere, held])) == 2


def test_a_hit_before_anything_was_computed_explains_what_follows() -> None:
    hit = row("lookup.truth", cause=UNHEARD, event=3)
    follows = [row("hook.no-raise", event=5), row("load.position", event=6)]
    explained = [("lookup.truth", ["hook.no-raise", "load.position"], [])]
    assert shape(roots([*follows, hit])) == explained
    hit.cause = ("x",)
    assert len(roots([*follows, hit])) == 2, "a claim that goes too far is no such hit"


def test_a_hook_that_raises_in_steps_with_another_table_follows_outdated_tables() -> None:
    raised = [row("hook.no-raise", case, cause="IndexError") for case in ("one", "two")]
    for each in raised:
        each.suspected = ("a", 3)
    load = told("load.position", "three", "load", ("b", 4))
    assert shape(roots([*raised, load])) == [("load.position", ["hook.no-raise"], [])]
    assert [root.row for root in roots(raised)] == raised[:1], "no table is proved to be outdated"
    raised[1].suspected = None
    assert len(roots([*raised, load])) == 2
    other = row("hook.no-raise", "one", cause="AssertionError")
    other.suspected = ("a", 3)
    assert len(roots([other, load])) == 2, "not what a search in a table raises"


@pytest.mark.parametrize("formal", ["meta.picklable", "hook.arguments-untouched"])
def test_what_is_only_passed_on_explains_no_wrong_kv(formal: str) -> None:
    rows = [row(formal, event=1), row("save.owned", event=2), row("load.position", event=3)]
    assert [root.row.requirement for root in roots(rows)] == [formal, "save.owned"]


def test_what_shows_in_the_end_explains_nothing() -> None:
    """Neither events that were not published, nor what was left over."""
    for name in ("events.complete", "end.released"):
        rows = [row(name, event=1), row("stats.fresh", event=2), row("run.quiesces", event=3)]
        assert len(roots(rows)) == 3


def test_a_risk_weighs_more_than_advice_and_less_than_what_counts() -> None:
    risk = row("load.position", "one", gating=False)
    risk.beyond = ("abort-during-load",)
    advice = row("stats.fresh", "two", gating=False)
    advice.level = "SHOULD"
    counts = row("finish.once", "three")
    found = roots([advice, risk, counts])
    assert [root.weight.name for root in found] == ["COUNTS", "RISK", "ADVICE"]


def test_only_what_counts_alike_raises_the_magnitude_of_a_save() -> None:
    """A save in one run comes before what is missing in many, but not for what is only advised."""
    save = row("save.owned", "one", event=5)
    many_missing = [row("save.completeness", f"c{n}", gating=False) for n in range(20)]
    for each in many_missing:
        each.level = "SHOULD"
    call = [row("lookup.stable", f"d{n}") for n in range(8)]
    assert roots([save, *many_missing, *call])[0].row.requirement == "lookup.stable"
