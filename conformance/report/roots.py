# SPDX-License-Identifier: Apache-2.0
"""Root causes: which failures of a connector other failures of the same runs explain.

A failure is a consequence if others, of earlier stages, failed in nearly all of its runs. What
block tables tell goes before the order of stages: saves and loads that went wrong by outdated
tables are one mistake, and those that fail in most runs say most about it. So is a load of which
one failure tells where the bytes were, and another one only that they are not there. So is a load
that wrote elsewhere and, in the same step, left out what it was to bring; or that brought the KV of
other layers. So is a hook that raises over metadata that is none, or over keywords that it does not
take. So are wrong hits that would all be right if vLLM did not add them to its own, and failures of
one kind: late saves, loads beyond their grant, keys that leave out what tells requests apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvconform.judge.identity import CLAIMED
from kvconform.judge.records import AGAIN, FAILED_LOAD, Row, Verdict
from kvconform.judge.strays import LOADING
from kvconform.judge.verdict import RAISES
from kvconform.report.causes import CONFIRMED, by_cause
from kvconform.report.stage import Stage, stage

UNANNOUNCED = "events.complete"
PICKLABLE, BLOCK_STATE = "meta.picklable", "meta.block-state-dropped"
CLAIMS = (CLAIMED, "lookup.truth")
"""Requirements on lookups: what is claimed wrongly was not announced for this request either."""
BEYOND = "lookup.beyond-local"
HITS = (BEYOND, "lookup.last-token", *CLAIMS)
"""Requirements on how much a lookup claims."""
HALVES, SWAPPED = "layout.halves", "head_swapped"
"""The requirement on loads of other heads or of other ranks' KV, and what such a load shows."""
CONTENT = "identity.content"
"""The requirement on loads of KV of others."""
TENANTS = frozenset({"salt", "adapter"})
"""What the engine never confuses, whatever else it loses."""
KEEP_APART = ("engine.entry-", "engine.hash-")
"""Guarantees by which the engine tells requests apart."""
FORMAL = ("meta.picklable", "hook.arguments-untouched")
"""Requirements on objects that are passed on: no wrong KV comes of them.

What the engine makes of a changed object is blocked by the second (kvconform.judge.verdict).
"""
NO_METADATA, NO_KEYWORDS, BOUND = "meta.returned", "api.start-load-kwargs", "worker.stays-bound"
WITH_METADATA = (
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
)
"""Hooks that use the metadata of their step."""
BY_NONE = ("AttributeError", "TypeError", "AssertionError")
"""Errors of a hook that uses metadata, if that is None."""
LAYER, SOME_LAYERS = "layout.layer", "layers"
"""The requirement on layers that are mixed up, and what is in the cause of a load that left out
some layers."""
BY_TABLE = ("IndexError", "KeyError", "ValueError")
"""Errors that a hook raises where it finds less, or something else, in a block table."""
OWNED, SOUND = "save.owned", "save.sound"
LATE = frozenset({"poison", "other_request"})
"""What a save finds that comes too late."""
OUTSIDE = "load.errors-within-grant"
ASTRAY, MISSING = "load.only-grant", "load.complete-or-failed"
MOVING = (Stage.SAVE, Stage.LOAD)
"""Stages in which a connector copies KV."""
WRONG = (Stage.HIT, *MOVING, Stage.SAVE_UPON_LOAD, Stage.CACHE, Stage.TOKENS)
"""Stages of failures that give wrong KV, or show it."""

MORE = 4
"""A root cause that fails in this many times as many runs is shown before those of earlier stages.

It says more about the connector than a crash that only few cases bring about.
"""


class Weight(IntEnum):
    """What a root cause weighs: the heaviest come first, and the first is shown at length."""

    COUNTS = 0
    ENGINE = 1
    RISK = 2
    ADVICE = 3


@dataclass
class Root:
    """A failure that no other one explains.

    `group` are its rows, `consequences` the groups of rows that it explains, and `blocked` the
    requirements that were not judged because of any of these.
    """

    group: list[Row]
    consequences: list[list[Row]] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)

    @property
    def row(self) -> Row:
        """The first row: the one that is shown."""
        return self.group[0]

    @property
    def counts(self) -> bool:
        """Whether this or a consequence of it counts against the connector."""
        return any(group[0].gating for group in (self.group, *self.consequences))

    @property
    def weight(self) -> Weight:
        """Whether it counts; if it does not, what it is instead."""
        if self.counts:
            return Weight.COUNTS
        if self.row.kind == "guarantee":
            return Weight.ENGINE
        return Weight.RISK if self.row.risk else Weight.ADVICE

    @property
    def magnitude(self) -> int:
        """In how many runs it shows, by powers of MORE: what is nearly as frequent is equal."""
        runs = {row.run for group in (self.group, *self.consequences) for row in group}
        return int(math.log(len(runs), MORE) + 1e-9)

    @property
    def failed(self) -> list[str]:
        """The requirements that fail because of this. The root cause's own may be one of them."""
        return list(dict.fromkeys(group[0].requirement for group in self.consequences))

    @property
    def number(self) -> int:
        """How many other requirements fail or were not judged because of this."""
        return len({*self.failed, *self.blocked} - {self.row.requirement})


def roots(rows: Sequence[Row]) -> list[Root]:
    """Return the root causes of all failures, those in many more runs first, then earlier stages.

    Those that do not count against the connector come last: guarantees of the engine, then risks,
    then recommendations.
    """
    groups = by_cause([row for row in rows if row.verdict is Verdict.FAIL])
    outdated = _by_outdated_tables(groups)
    leaders = _without_circles(
        {id(group): _leader(group, groups, outdated) for group in groups}, groups
    )
    found: list[Root] = []
    home: dict[tuple[str, str], Root] = {}
    holds: dict[int, Root] = {}

    def distance(group: list[Row]) -> int:
        leader = leaders[id(group)]
        return 0 if leader is None else 1 + distance(leader)

    followers = _followers(leaders, groups)
    # Those with a leader come after it, so that its root is known.
    for group in sorted(groups, key=distance):
        leader = leaders[id(group)]
        root = _explained_by(group, found, followers) if leader is None else holds[id(leader)]
        if root is None:
            root = Root(group)
            found.append(root)
        else:
            root.consequences.append(group)
        holds[id(group)] = root
        for row in group:
            home.setdefault((row.requirement, row.run), root)
    failing = {group[0].requirement for group in groups}
    for row in rows:
        if row.verdict is not Verdict.BLOCKED or row.requirement in failing:
            continue
        because = home.get((row.blocked_by or "", row.run))
        if because is not None and row.requirement not in because.blocked:
            because.blocked.append(row.requirement)

    def place(root: Root) -> tuple[Weight, int, Stage, int, bool]:
        here, is_untold = _rank(root.row)
        return root.weight, -_magnitude(root, found), here, -root.magnitude, is_untold

    return sorted(found, key=place)


def _without_circles(
    leaders: dict[int, list[Row] | None], groups: Sequence[list[Row]]
) -> dict[int, list[Row] | None]:
    """Return the leader of each group, or None where the leaders go round in a circle."""
    found = dict(leaders)
    for group in groups:
        leader, seen = found[id(group)], {id(group)}
        while leader is not None and id(leader) not in seen:
            seen.add(id(leader))
            leader = found[id(leader)]
        if leader is not None:
            found[id(group)] = None
    return found


def _followers(
    leaders: dict[int, list[Row] | None], groups: Sequence[list[Row]]
) -> dict[int, list[list[Row]]]:
    """Return by the first of their leaders, those that have none, the groups that follow these."""
    found: dict[int, list[list[Row]]] = {}
    for group in groups:
        first = group
        while (leader := leaders[id(first)]) is not None:
            first = leader
        if first is not group:
            found.setdefault(id(first), []).append(group)
    return found


def _magnitude(root: Root, found: Sequence[Root]) -> int:
    """Return in how many runs a root cause fails, as `Root.magnitude` has it.

    Wrong KV counts for at least as many runs as missing KV does: what goes wrong with a save also
    loses what it saves, and says more about it. It also counts for as many runs as failures of form
    do. Those change no answer; an example is a thread that is left behind.
    """
    here = stage(root.row)
    if here not in WRONG and root.row.requirement not in CLAIMS:
        return root.magnitude
    lighter = (Stage.ANNOUNCED, Stage.FORM) if here in MOVING else (Stage.FORM,)
    alike = [other for other in found if other.weight == root.weight]
    return max([root.magnitude, *(each.magnitude for each in alike if stage(each.row) in lighter)])


def _rank(row: Row) -> tuple[Stage, bool]:
    """Return the stage of a root cause, and whether nothing tells where a save or load went wrong.

    Wrong saves and loads have one stage. Of equally frequent ones, the told one is first.
    """
    here = stage(row)
    return (Stage.SAVE, row.side is None) if here in MOVING else (here, False)


def _by_outdated_tables(groups: Sequence[list[Row]]) -> list[list[Row]]:
    """Return the groups that outdated tables explain in most runs, that of most runs first.

    The rows of a group have one cause; what the block tables of some runs tell holds for all.
    """
    known = [
        group
        for group in groups
        if stage(group[0]) in MOVING and _in_most(group, lambda row: row.outdated is not None)
    ]
    return sorted(known, key=lambda group: -len({row.run for row in group}))


def _is_by_table(group: Sequence[Row], known: Sequence[Sequence[Row]]) -> bool:
    """Return whether outdated tables explain a group: for sure, or as far as others show.

    A load that did not write may have used such a table if another load did. A save that read a
    block too late may have done so if one of the same run and step did. A hook that raises only in
    steps of requests with another table, as one that finds too little there, may have done so, too.
    """
    if group[0].requirement == RAISES:
        is_search = not set(BY_TABLE).isdisjoint(group[0].cause)
        return is_search and all(row.suspected is not None for row in group)
    if stage(group[0]) not in MOVING:
        return False
    if any(group is one for one in known):
        return True
    rows = [row for one in known for row in one]
    loads = any(row.side == "load" for row in rows)
    tables = {_by_table(row, row.outdated) for row in rows}
    return all(
        row.outdated is not None
        or (row.suspected is not None and row.side is None and loads)
        or (row.suspected is not None and _by_table(row, row.suspected) in tables)
        for row in group
    )


def _by_table(row: Row, table: tuple[str, int] | None) -> tuple[object, ...] | None:
    """Return the run of a failure and an outdated table; None without one."""
    return None if table is None else (row.run, *table)


def _leader(
    group: Sequence[Row], groups: Sequence[list[Row]], outdated: Sequence[list[Row]]
) -> list[Row] | None:
    """Return the group that tells more of the same mistake as `group` in each of its runs.

    That is the first of `outdated`, the groups that outdated tables explain, for what these
    explain, too; or a load of which `group` does not tell what went wrong, or saves of what was not
    there, or lookups that find what was stored, and announced, for others, or metadata that does
    not pickle because of the block state in it, or what a hook raises over, or a load that wrote
    elsewhere what it left out, or hits that are too long because vLLM adds them to its own, or
    others of the same mistake (`_of_others`, `_of_other_ranks`, `_alike`).
    """
    first = group[0]
    if first.requirement in HITS and (added := _added_to_its_own(groups)) is not None:
        return None if added is group else added
    if (found := _of_others(group, groups)) is not None:
        return found
    if (found := _of_other_ranks(group, groups)) is not None:
        return found
    if first.requirement == UNANNOUNCED:
        return _wrong_claims(group, groups)
    if first.requirement == PICKLABLE:
        state = (one for one in groups if one[0].requirement == BLOCK_STATE)
        return next((one for one in state if _all_in(group, one, _of_event)), None)
    if first.requirement in (RAISES, BOUND) and (form := _told_by_form(group, groups)) is not None:
        return form
    is_stored = first.requirement == CONFIRMED or FAILED_LOAD in first.cause
    if is_stored and (known := _early_or_late(group, groups)) is not None:
        return known
    if first.requirement == MISSING and (astray := _written_elsewhere(group, groups)) is not None:
        return astray
    if outdated and _is_by_table(group, outdated) and _may_hide(outdated[0][0], first):
        return None if outdated[0] is group else outdated[0]
    if (alike := _alike(first, groups, outdated)) and (most := _most(group, alike)) is not None:
        return most
    for other in groups:
        tells = stage(other[0]) is Stage.LOAD and _is_told(other)
        if other is group or not tells or not _may_hide(other[0], first):
            continue
        if stage(first) is Stage.LOAD and first.side is None and _all_in(group, other, _of_load):
            return other
    return None


def _of_other_ranks(group: Sequence[Row], groups: Sequence[list[Row]]) -> list[Row] | None:
    """Return loads of KV of other ranks, if `group` is wrong KV of runs with several ranks only.

    Where ranks have other layers or tokens, KV of another rank is that of no rank there.
    """
    if any(row.rank is None for row in group):
        return None
    mixed = [
        one
        for one in groups
        if one[0].requirement == HALVES and SWAPPED in one[0].cause
        if all(row.rank is not None for row in one)
    ]
    return None if any(one is group for one in mixed) else _most(group, mixed)


def _of_others(group: Sequence[Row], groups: Sequence[list[Row]]) -> list[Row] | None:
    """Return the hits on KV of others in most runs, if `group` are others, or loads of such KV.

    Keys that leave out what tells requests apart leave out more than one thing, as a rule. A load
    shows it where the lookup does not, as its request was computed before; but not what no lookup
    leaves out.
    """
    first = group[0]
    if first.requirement not in (CLAIMED, CONTENT):
        return None
    hits = [one for one in groups if one[0].requirement == CLAIMED and _is_of_request(one)]
    left_out = {kind for one in hits for row in one for kind in row.differs}
    here = {kind for row in group for kind in row.differs}
    if not _is_of_request(group) or not here <= left_out:
        return None
    return _most(group, hits)


def _is_of_request(group: Sequence[Row]) -> bool:
    """Return whether it is known what tells the requests of a group apart, all of it of requests.

    The model is none of it: other keys have that.
    """
    return all(row.differs and "model" not in row.differs for row in group)


def _added_to_its_own(groups: Sequence[list[Row]]) -> list[Row] | None:
    """Return the hits that say best that all are too long because vLLM adds them to its own.

    None if that is not so. Hits that are too long for another reason may look alike where vLLM has
    a hit of its own; but then others are too long where it has none.
    """
    hits = [group for group in groups if group[0].requirement in HITS]
    if not all(row.adds_to_itself for group in hits for row in group):
        return None
    return min(hits, key=lambda one: (not one[0].gating, one[0].requirement != BEYOND, -len(one)))


def _alike(
    first: Row, groups: Sequence[list[Row]], outdated: Sequence[list[Row]]
) -> list[list[Row]]:
    """Return the groups of the same mistake as a group with the row `first`, whatever they found.

    A save that comes too late finds KV of others or wiped memory; which of them is up to the
    engine. So it is where a load writes that goes beyond its grant. What this cannot bring, it
    reports as failed beyond the grant. What outdated tables explain is none of these.
    """
    beyond = first.requirement == OUTSIDE and AGAIN not in first.cause
    if first.requirement == OWNED and not LATE.isdisjoint(first.cause):
        found = [
            one
            for one in groups
            if one[0].requirement == OWNED and not LATE.isdisjoint(one[0].cause)
        ]
    elif beyond or (first.requirement == ASTRAY and first.hook in LOADING):
        found = [one for one in groups if one[0].requirement == ASTRAY and one[0].hook in LOADING]
    else:
        return []
    return [one for one in found if not any(one is known for known in outdated)]


def _most(group: Sequence[Row], alike: Sequence[list[Row]]) -> list[Row] | None:
    """Return the group of most runs among `alike`, unless it is `group` or may not be above it."""
    known = [one for one in alike if _may_hide(one[0], group[0])]
    most = max(known, key=lambda one: (len(one), one[0].cause), default=None)
    return None if most is group else most


def _early_or_late(group: Sequence[Row], groups: Sequence[list[Row]]) -> list[Row] | None:
    """Return the group that tells why KV was stored that was not there yet, or no longer.

    These are saves that read blocks after their request had lost them, saves upon failed loads,
    loads that left out what was saved then, or more saves that came too early.
    """
    for other in groups:
        if not _may_hide(other[0], group[0]):
            continue
        if other[0].requirement == OWNED and _is_late(group) and _is_late(other):
            return other
        if FAILED_LOAD not in group[0].cause:
            continue
        if other[0].requirement == SOUND:
            return other
        if other[0].requirement == MISSING and _all_in(group, other, _of_run):
            return other
    if FAILED_LOAD not in group[0].cause:
        return None
    # A save that is too early may meet a load that failed by chance.
    return _most(
        group, [one for one in groups if one[0].requirement == CONFIRMED and not _is_told(one)]
    )


def _is_told(group: Sequence[Row]) -> bool:
    """Return whether most of these failures say whether the save or the load went wrong."""
    return _in_most(group, lambda row: row.side is not None)


def _is_late(group: Sequence[Row]) -> bool:
    """Return whether saves are known, in most runs, to have read blocks that were lost before."""
    return _in_most(group, lambda row: row.side == "save" and row.outdated is None)


def _in_most(group: Sequence[Row], holds: Callable[[Row], bool]) -> bool:
    return 2 * sum(map(holds, group)) > len(group)


def _written_elsewhere(group: Sequence[Row], groups: Sequence[list[Row]]) -> list[Row] | None:
    """Return what the loads of all of `group` wrote beyond their grants, or into other layers.

    Only one load was going on then, so what it wrote elsewhere is what is missing. Layers that are
    mixed up explain only that some are missing.
    """
    by_layer = all(SOME_LAYERS in row.cause for row in group)
    for other in groups:
        if not _may_hide(other[0], group[0]):
            continue
        if other[0].requirement == LAYER and by_layer and _all_in(group, other, _of_load):
            return other
        loads = [row for row in other if row.hook in LOADING]
        if other[0].requirement == ASTRAY and _all_in(group, loads, _of_load):
            return other
    return None


def _told_by_form(group: Sequence[Row], groups: Sequence[list[Row]]) -> list[Row] | None:
    """Return the mistake of form over which a hook raises, or what it binds is lost, in `group`.

    Metadata that is none, in the same steps, or keywords that start_load_kv does not take: then the
    call raises, and no line of the connector.
    """
    by_none = group[0].requirement == BOUND or (
        group[0].hook in WITH_METADATA and not set(BY_NONE).isdisjoint(group[0].cause)
    )
    by_keywords = group[0].hook == "start_load_kv" and "TypeError" in group[0].cause
    # Model runner V2 passes some.
    by_keywords &= all(row.runner == "v2" and row.place is None for row in group)
    for other in groups:
        if not _may_hide(other[0], group[0]):
            continue
        if other[0].requirement == NO_METADATA and by_none and _all_in(group, other, _of_step):
            return other
        if other[0].requirement == NO_KEYWORDS and by_keywords:
            return other
    return None


def _wrong_claims(group: Sequence[Row], groups: Sequence[list[Row]]) -> list[Row] | None:
    """Return the wrong lookups behind most missing announcements, if there are some behind most.

    In the other runs, KV of others is found later, or loaded where a lookup does not show it: keys
    that leave something out find KV there that was announced for others, too.
    """
    claims = [one for one in groups if one[0].requirement in CLAIMS and _may_hide(one[0], group[0])]
    told = [{row.run for row in group if _claimed(row, one)} for one in claims]
    of_others = (one for one in groups if one[0].requirement in (CLAIMED, CONTENT))
    mixed = {row.run for one in of_others if _is_of_request(one) for row in one}
    runs, known = {row.run for row in group}, set[str]().union(*told)
    if 2 * len(known) <= len(runs) or runs - known - mixed:
        return None
    return max(zip(claims, told, strict=True), key=lambda one: len(one[1]))[0]


def _claimed(missed: Row, claims: Sequence[Row]) -> bool:
    """Return whether one of the wrong claims is in the run of a missing announcement.

    It is about the same lookup, which is recorded after what was announced for it, or came before.
    """
    return any(
        claim.run == missed.run
        and (_of_load(claim) == _of_load(missed) is not None or _before(claim.event, missed.event))
        for claim in claims
    )


def _all_in(
    group: Sequence[Row], other: Sequence[Row], fact: Callable[[Row], tuple[object, ...] | None]
) -> bool:
    """Return whether each row of `group` has a fact that a row of `other` has, too."""
    known = {fact(row) for row in other} - {None}
    return all(fact(row) in known for row in group)


def _of_run(row: Row) -> tuple[object, ...]:
    """Return the run of a failure."""
    return (row.run,)


def _of_step(row: Row) -> tuple[object, ...]:
    """Return the run and the step of a failure."""
    return row.run, row.step


def _of_event(row: Row) -> tuple[object, ...]:
    """Return the run and the event of a failure."""
    return row.run, row.event


def _of_load(row: Row) -> tuple[object, ...] | None:
    """Return the run, the step and the request of a failure; None if it is about no request."""
    return None if row.step is None or row.req is None else (row.run, row.step, row.req)


def _explained_by(
    group: Sequence[Row], known: Sequence[Root], followers: dict[int, list[list[Row]]]
) -> Root | None:
    """Return the root cause that explains a group, if the known ones fail in nearly all its runs.

    These are nine of ten. `followers` of a root cause are the same mistake, and explain as much. Of
    several, the one with most of the runs is returned.
    """
    runs = {row.run for row in group}
    candidates = []
    for root in known:
        alike = [root.group, *followers.get(id(root.group), ())]
        may_hide = _may_hide(root.row, group[0])
        explained = set().union(*(_explains(one, group) for one in alike)) if may_hide else set()
        candidates.append((root, runs & explained))
    unexplained = runs - set().union(*(common for _, common in candidates))
    if len(unexplained) * 10 > len(runs):
        return None
    return max(candidates, key=lambda pair: len(pair[1]))[0]


def _explains(one: Sequence[Row], group: Sequence[Row]) -> set[str]:
    """Return the runs in which failures of one kind can explain a group."""
    first = one[0]
    if first.requirement in (group[0].requirement, *FORMAL):
        return set()
    mixed = all(not TENANTS.isdisjoint(row.differs) for row in group)
    if mixed and first.kind == "guarantee" and not first.requirement.startswith(KEEP_APART):
        return set()
    here = stage(first)
    there = stage(group[0])
    if here in (Stage.ANNOUNCED, Stage.TOKENS, Stage.END, Stage.FORM) or there is Stage.FORM:
        return set()
    if here >= there or (here is Stage.SAVE and there is Stage.SAVE_UPON_LOAD):
        return set()
    when = {row.run: row.event for row in one}
    # A wrong save may show after a wrong load; all else is caused by what came before it.
    in_time = here in (Stage.SAVE, Stage.LOAD)
    return {
        row.run
        for row in group
        if row.run in when and (in_time or _before(when[row.run], row.event))
    }


def _before(one: int | None, other: int | None) -> bool:
    return one is None or other is None or one <= other


def _may_hide(root: Row, other: Row) -> bool:
    """Return whether a failure may be shown below another: never one that counts below advice."""
    if root.kind == "guarantee":
        return True
    return other.kind == "requirement" and (root.gating or not other.gating)
