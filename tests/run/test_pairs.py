# SPDX-License-Identifier: Apache-2.0
"""Tests of two engines in one run: how they are driven, and what both traces show together.

Correct connectors fail nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError
from vllm.v1.request import RequestStatus

from kvconform.config.target import Target
from kvconform.contract.case import Case, Variant
from kvconform.contract.events import check_event
from kvconform.contract.loader import load_spec
from kvconform.contract.requirement import Requirement
from kvconform.judge.verdict import evaluate_sides
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.variants.peer import Offer, Peer, Pull
from kvconform.refimpl.variants.routed import Routed
from kvconform.run.calibration import (
    NOTHING,
    HandOver,
    hand_over,
    hand_over_case,
    target_profile,
)
from kvconform.run.case import run_and_judge
from kvconform.run.pair import _through_json
from kvconform.run.runner import run_variant

PEER = "kvconform.refimpl.variants.peer:Peer"
PEER_TO_PEER = "kvconform.refimpl.variants.neighbours:PeerToPeer"
HYBRID_PEER = "kvconform.refimpl.variants.hybrid_peer:HybridPeer"
PUSHER = "kvconform.refimpl.variants.pusher:Pusher"
ROUTED = "kvconform.refimpl.variants.routed:Routed"
ROUTER = "kvconform.refimpl.variants.routed:Router"
ROUTER_AT_ONCE = "kvconform.refimpl.variants.routed:RouterAtOnce"
SPEC = load_spec()
CASES = [case for case in SPEC.cases.values() if case.area == "transfer"]
OPTIONS: list[dict[str, Any]] = [{}, {"lease": 4, "delay": 2}, {"whole_blocks": True}]


WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
"""Whether all variants of a case are run, or one on each engine, in turn."""


def variants(case: Case) -> list[Variant]:
    return case.variants(["reference", "vllm"])


def some(case: Case, whole: bool, engines: Sequence[str] = ("reference", "vllm")) -> list[Variant]:
    if whole:
        return case.variants(list(engines))
    """On one engine, every second case is run with each scheduling; on the other, the rest."""
    each = enumerate((case.variants([engine]) for engine in engines), CASES.index(case))
    return [found[place % len(found)] for place, found in each if found]


@WHOLE
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_correct_peer_fails_nothing(
    case: Case, options: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    engines = ("reference",) if options else ("reference", "vllm")
    for number, variant in enumerate(some(case, whole, engines)):
        report = run_and_judge(
            variant, Target(PEER, options), SPEC, seed=number, tmp=tmp_path / str(number)
        )
        assert report.harness_error is None
        assert [row for row in report.rows if row.verdict == "FAIL"] == []
        # Without a lease, the producer gives nothing up.
        late = case.id == "transfer.late"
        if late or not options:
            assert bool(report.unmet) == (late and "lease" not in options)


@WHOLE
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_producer_that_pushes_chunk_by_chunk_fails_nothing(
    case: Case, whole: bool, tmp_path: Path
) -> None:
    for number, variant in enumerate(some(case, whole)):
        report = run_and_judge(
            variant, Target(PUSHER, {}), SPEC, seed=number, tmp=tmp_path / str(number)
        )
        assert report.harness_error is None
        assert [row for row in report.rows if row.verdict == "FAIL"] == []
        # Nothing is held, so there is nothing to give up.
        assert bool(report.unmet) == (case.id == "transfer.late")


@WHOLE
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_peer_with_several_groups_fails_nothing(case: Case, whole: bool, tmp_path: Path) -> None:
    for number, variant in enumerate(some(case, whole)):
        target = Target(HYBRID_PEER, {"lease": 4})
        report = run_and_judge(variant, target, SPEC, seed=number, tmp=tmp_path / str(number))
        assert report.harness_error is None
        assert [row for row in report.rows if row.verdict == "FAIL"] == []


@WHOLE
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_pair_whose_router_makes_the_parameters_fails_nothing(
    case: Case, whole: bool, tmp_path: Path
) -> None:
    early = case.id.startswith("transfer.consumer-first")
    router, options = (ROUTER_AT_ONCE, {"patience": 30}) if early else (ROUTER, {})
    for number, variant in enumerate(some(case, whole)):
        target = Target(ROUTED, options, router=router)
        report = run_and_judge(variant, target, SPEC, seed=number, tmp=tmp_path / str(number))
        assert report.harness_error is None
        assert [row for row in report.rows if row.verdict in ("FAIL", "WARN")] == []


class KeepsWhatEndsAtItsLength(Routed):
    """Keeps nothing of a request that ends with a stop token, and returns nothing (Mooncake)."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        return super().request_finished(request, block_ids)


def test_a_producer_may_keep_nothing_of_a_stopped_request(tmp_path: Path) -> None:
    case = SPEC.cases["transfer.stopped"]
    target = Target(f"{__name__}:KeepsWhatEndsAtItsLength", {}, router=ROUTER)
    report = run_and_judge(case.variants()[0], target, SPEC, seed=0, tmp=tmp_path)
    assert [row for row in report.rows if row.verdict in ("FAIL", "WARN")] == []


class NamesOfItsOwn(Peer):
    """Calls its parameters otherwise than vLLM's connectors, so that no case can alter them."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        held, params = super().request_finished(request, block_ids)
        return held, params and {"do_remote_prefill": True, "mine": params}

    def _remote(self, request: Any) -> dict[str, Any] | None:
        params = request.kv_transfer_params
        request.kv_transfer_params = (params or {}).get("mine", params)
        found = super()._remote(request)
        request.kv_transfer_params = params
        return found


def test_parameters_that_a_case_cannot_alter_are_good(tmp_path: Path) -> None:
    case = SPEC.cases["transfer.altered"]
    target = Target(f"{__name__}:NamesOfItsOwn", {})
    report = run_and_judge(case.variants()[0], target, SPEC, seed=0, tmp=tmp_path)
    summed = {e["req"]: e["stale"] for e in report.trace if e["kind"] == "pair.request"}
    assert summed == {"d1": "", "d2": "replayed", "d3": "replayed"}


def test_what_the_engine_does_not_take_is_not_owed(tmp_path: Path) -> None:
    """It computes what the connector had promised; found by exploration."""
    case = hand_over_case().model_copy(update={"policies": ["ignore-hits"]})
    report = run_and_judge(case.variants()[0], Target(PEER, {}), SPEC, seed=0, tmp=tmp_path)
    summed = [e for e in report.trace if e["kind"] == "pair.request"]
    assert [(e["promised"] > 0, e["refused"], e["loaded"]) for e in summed] == [(True, True, 0)]
    assert [row.requirement for row in report.rows if row.verdict == "FAIL"] == []


def test_what_a_lease_gave_up_before_the_request_came_is_not_owed(tmp_path: Path) -> None:
    """The clock was set forward while no request came; found by exploration."""
    prompt = {"prompt": 7, "max_tokens": 1}
    case = Case.model_validate(
        {
            "id": "transfer.given-up",
            "area": "transfer",
            "text": "A consumer comes when the lease is over.",
            "config": {
                "prefix_caching": False,
                "engines": {"p": "kv_producer", "d": "kv_consumer"},
            },
            "engines": ["reference"],
            "relations": [],
            "steps": [
                {"add": {"req": "a", **prompt, "hand_over": True}},
                {"run": {}},
                {"add": {"req": "b", "prompt": 16, "max_tokens": 1}},
                {"run": {"until": "b"}},
                {"on": "d"},
                {"add": {"req": "c", "prompt": {"same": "a"}, "max_tokens": 4, "handed": "a"}},
                {"run": {}},
            ],
        },
        strict=False,
    )
    variant = variants(case)[0]
    declared = {"transfer": True, "store": False}
    target = Target(PEER, {"lease": 4}, capabilities=declared)
    run = run_variant(variant, target, seed=0, tmp=tmp_path / "run")
    (request,) = (event for event in run.trace if event["kind"] == "pair.request")
    assert (request["held"], request["gone"], request["loaded"]) == (True, True, 0)
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "judged")
    assert [row for row in report.rows if row.verdict == "FAIL"] == []


def test_a_producer_announces_the_end_of_a_request_while_the_consumer_is_at_work(
    tmp_path: Path,
) -> None:
    """`transfer.delivered` was wrongly reported: its workers did not know what was offered."""
    case = Case.model_validate(
        {
            "id": "transfer.steps-of-one",
            "area": "transfer",
            "text": "Only the consumer does steps.",
            "config": {"engines": {"p": "kv_producer", "d": "kv_consumer"}},
            "engines": ["reference"],
            "relations": [],
            "steps": [
                {"add": {"req": "a", "prompt": 16, "max_tokens": 1, "hand_over": True}},
                {"run": {"until": "a"}},
                {"on": "d"},
                {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 2, "handed": "a"}},
                {"step": 8},
                {"run": {}},
            ],
        },
        strict=False,
    )
    for number, variant in enumerate(case.variants()):
        report = run_and_judge(variant, Target(PEER, {}), SPEC, seed=0, tmp=tmp_path / str(number))
        assert [row for row in report.rows if row.verdict == "FAIL"] == []


def test_every_event_of_a_pair_is_as_listed_and_says_whose_it_is(tmp_path: Path) -> None:
    variant = variants(SPEC.cases["transfer.prompt"])[0]
    run = run_variant(
        variant, Target(PEER, {}, capabilities={"transfer": True}), seed=0, tmp=tmp_path
    )
    assert [problem for event in run.trace for problem in check_event(event)] == []
    assert {event.get("on") for event in run.trace} == {None, "p", "d"}
    assert {event["kind"] for event in run.trace if "on" not in event} <= {
        "run.start",
        "run.engines",
    }


def test_the_values_of_an_engine_end_with_it(tmp_path: Path) -> None:
    variant = SPEC.cases["transfer.three-engines"].variants(["reference"])[0]
    target = Target(PEER_TO_PEER, {"store": "{tmp}/meeting", "load": "async"})
    run = run_variant(variant, target, seed=0, tmp=tmp_path)
    assert run.harness_error is None
    assert not [name for name in MemoryBackend.named if name.startswith("engine ")]


def test_a_pair_gives_the_same_trace_again(tmp_path: Path) -> None:
    variant = variants(SPEC.cases["transfer.tight"])[1]
    first, second = (
        run_variant(variant, Target(PEER, {}), seed=3, tmp=tmp_path).trace for _ in range(2)
    )
    assert first == second


def test_one_engine_runs_have_no_engine_field(tmp_path: Path) -> None:
    variant = variants(SPEC.cases["lifecycle.last-token"])[0]
    target = Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "{tmp}"})
    assert all(
        "on" not in event for event in run_variant(variant, target, seed=0, tmp=tmp_path).trace
    )


def test_each_engine_is_judged_by_its_own_share() -> None:
    rule = Requirement.model_validate(
        {
            "id": "x.y",
            "text": "It MUST.",
            "event": "req.scheduled",
            "precede": {
                "before": {"event": "step.scheduled", "where": "e.step == t.step"},
                "end": {"event": "run.end"},
            },
        }
    )
    trace = [
        {"kind": "run.start", "seq": 0, "step": 0},
        {
            "kind": "run.engines",
            "seq": 1,
            "step": 0,
            "engines": {"p": "kv_producer", "d": "kv_consumer"},
        },
        {"kind": "step.scheduled", "seq": 2, "step": 1, "on": "p"},
        {"kind": "req.scheduled", "seq": 3, "step": 1, "on": "d", "req": "a"},
    ]
    monitor = evaluate_sides([rule], trace)["x.y"]
    assert monitor.exercised == 1 and [violation.seq for violation in monitor.violations] == [3]
    assert evaluate_sides([rule], [*trace[:3], {**trace[3], "on": "p"}])["x.y"].violations == []


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"a": [1, (2,)]}, None),
        ({"a": {1: 2}}, "a arrived changed"),
        ({"a": b"x"}, "TypeError"),
        ({"a": float("nan")}, "ValueError"),
    ],
)
def test_parameters_travel_as_json(params: dict[str, Any], problem: str | None) -> None:
    found = _through_json(params)[1]
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": [{"on": "q"}]}, "`on` names engine 'q'"),
        ({"config": {"engines": {"p": "kv_both"}}}, "none or several"),
        ({"config": {"engines": {"p": "kv_both", "d": {"block_size": 8}}}}, "role"),
        (
            {
                "config": {
                    "groups": ["latent"],
                    "engines": {"p": "kv_both", "d": {"role": "kv_both", "tensor_parallel": 2}},
                }
            },
            "engines: tensor_parallel needs a model without groups",
        ),
        ({"steps": [{"restart": "engine"}]}, "not possible with several engines"),
        (
            {
                "steps": [
                    {"add": {"req": "a", "prompt": 3, "hand_over": True}},
                    {"reset": {}},
                    {"on": "d"},
                    {"add": {"req": "b", "prompt": {"same": "a"}, "handed": "a"}},
                ],
            },
            "`reset` of the connector is not possible with `handed`",
        ),
        (
            {
                "config": {},
                "steps": [
                    {"add": {"req": "a", "prompt": 3}},
                    {"add": {"req": "b", "prompt": 3, "handed": "a"}},
                ],
            },
            "needs several",
        ),
    ],
)
def test_cases_that_cannot_be_driven_are_refused(change: dict[str, Any], sentence: str) -> None:
    base: dict[str, Any] = {
        "id": "x.y",
        "area": "x",
        "text": "x",
        "config": {"engines": {"p": "kv_producer", "d": "kv_consumer"}},
        "steps": [{"run": {}}],
    }
    with pytest.raises(ValidationError, match=sentence):
        Case.model_validate({**base, **change}, strict=False)


def test_a_connector_of_one_role_is_run_in_it(tmp_path: Path) -> None:
    target = Target(PEER, {}, capabilities={"roles": ["kv_consumer"]})
    variant = variants(SPEC.cases["lifecycle.last-token"])[0]
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "x")
    assert report.trace is not None and report.trace[0]["role"] == "kv_consumer"
    paired = run_and_judge(
        variants(SPEC.cases["transfer.prompt"])[0], target, SPEC, seed=0, tmp=tmp_path / "y"
    )
    assert {row.verdict for row in paired.rows} == {"UNSUPPORTED"}


class LeaseOnly(Peer):
    """Its consumer sends no notes: a lease of half a minute ends what the producer holds."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.notes = False
        self._until: dict[str, float] = {}

    def _released(self) -> set[str]:
        offers = self.board.offers
        for key in offers:
            self._until.setdefault(key, time.monotonic() + 30)
        over = [key for key in offers if time.monotonic() >= self._until[key]]
        return {offers.pop(key).req for key in over}


@pytest.mark.parametrize("name", ["transfer.prompt", "transfer.local-hit", "transfer.tight"])
def test_a_producer_without_notes_is_judged_by_its_lease(name: str, tmp_path: Path) -> None:
    for number, variant in enumerate(variants(SPEC.cases[name])):
        target = Target(f"{__name__}:LeaseOnly", {})
        report = run_and_judge(variant, target, SPEC, seed=number, tmp=tmp_path / str(number))
        verdicts = {row.requirement: row.verdict for row in report.rows}
        assert [row for row in report.rows if row.verdict == "FAIL"] == []
        assert (verdicts["send.released"], verdicts["transfer.released"]) == ("PASS", "UNSUPPORTED")


class FetchesAgain(Peer):
    """Its offers may be fetched again until a lease of eight polls ends, and so it promises again.

    What is gone by then fails to load, is reported, and is promised no more.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.notes = False
        self.lease = 8
        self._loading: dict[str, set[int]] = {}
        self._gone: set[str] = set()

    def _remote(self, request: Any) -> dict[str, Any] | None:
        self._taken.discard(request.request_id)
        return None if request.request_id in self._gone else super()._remote(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._loading[request.request_id] = set(blocks.get_block_ids()[0])

    def update_connector_output(self, connector_output: Any) -> None:
        for req in connector_output.finished_recving or ():
            if self._loading.pop(req, set()) & connector_output.invalid_block_ids:
                self._gone.add(req)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._loading.pop(request.request_id, None)
        result = super().request_finished(request, block_ids)
        self._gone.discard(request.request_id)
        return result


def test_what_may_be_fetched_again_until_a_lease_ends_may_be_promised_again(
    tmp_path: Path,
) -> None:
    """A load that comes too late is reported as failed, as that of any other late consumer."""
    target = Target(f"{__name__}:FetchesAgain", {}, capabilities={"notes": False})
    reports = [
        run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / str(number))
        for number, variant in enumerate(variants(SPEC.cases["transfer.preempted"]))
    ]
    lookups = [e for report in reports for e in report.trace or () if e["kind"] == "pair.lookup"]
    assert any(event["tokens"] and event["consumed"] and event["failed"] for event in lookups)
    assert [row for report in reports for row in report.rows if row.verdict == "FAIL"] == []


class OnlyLongPrompts(Peer):
    """Returns no parameters for short prompts: they are as quickly computed again."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.num_prompt_tokens < 16:
            return False, None
        return super().request_finished(request, block_ids)


class HalfOfIt(Peer):
    """Its consumer pulls the first half of a prompt, and computes the rest."""

    def _available(self, request: Any, remote: dict[str, Any]) -> int:
        half = super()._available(request, remote) // 2
        return half - half % self._size


class FailsLate(Peer):
    """Polls for KV that is not offered, and reports the load as failed after five seconds."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.patience = 10**6
        self._begun: dict[str, float] = {}

    def _offer(self, pull: Pull) -> Offer | None:
        found = super()._offer(pull)
        since = self._begun.setdefault(pull.req, time.monotonic())
        over = found is None and time.monotonic() > since + 5
        return Offer(pull.req, []) if over else found


@pytest.mark.parametrize("connector", [OnlyLongPrompts, HalfOfIt, FailsLate])
@pytest.mark.parametrize("name", ["transfer.local-hit", "transfer.altered", "transfer.tight"])
def test_a_peer_may_hand_over_less_or_wait_for_a_time_limit(
    name: str, connector: type[Peer], tmp_path: Path
) -> None:
    for number, variant in enumerate(variants(SPEC.cases[name])):
        target = Target(f"{__name__}:{connector.__name__}", {})
        report = run_and_judge(variant, target, SPEC, seed=number, tmp=tmp_path / str(number))
        assert report.harness_error is None
        failed = {row.requirement for row in report.rows if row.verdict == "FAIL"}
        # What a SHOULD recommends it may leave.
        assert failed <= {"transfer.params-returned"}


UNLIKE = ["transfer.other-block-size", "transfer.other-ranks"]


@pytest.mark.parametrize("connector", [PEER, f"{__name__}:LeaseOnly", f"{__name__}:Withholds"])
@pytest.mark.parametrize("name", UNLIKE)
def test_engines_that_differ_may_refuse_each_other(
    connector: str, name: str, tmp_path: Path
) -> None:
    for number, variant in enumerate(some(SPEC.cases[name], whole=False)):
        report = run_and_judge(
            variant, Target(connector, {}), SPEC, seed=number, tmp=tmp_path / str(number)
        )
        assert report.harness_error is None and report.trace is not None
        assert [row for row in report.rows if row.verdict in ("FAIL", "ERROR", "BLOCKED")] == []
        requests = [e for e in report.trace if e["kind"] == "pair.request"]
        assert bool(requests) == (not connector.endswith(":Withholds"))
        assert all(e["unlike"] and not e["loaded"] for e in requests)


def test_a_connector_that_converts_is_judged_by_what_it_loads(tmp_path: Path) -> None:
    target = Target("kvconform.refimpl.variants.converting:Converting", {})
    for number, variant in enumerate(variants(SPEC.cases[UNLIKE[0]])):
        report = run_and_judge(variant, target, SPEC, seed=number, tmp=tmp_path / str(number))
        assert [row for row in report.rows if row.verdict == "FAIL"] == []
        loaded = {e["req"]: e["loaded"] for e in report.trace or () if e["kind"] == "pair.request"}
        assert loaded == {"d1": 21, "d2": 14, "d3": 19, "d4": 2}


class Withholds(Peer):
    """Its producer knows its consumers, and returns no parameters."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class OneRankOnly(Peer):
    """Does not start with several ranks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("OneRankOnly supports one rank.")
        super().__init__(vllm_config, role, kv_cache_config)


def test_a_connector_may_refuse_to_start_an_engine_that_differs(tmp_path: Path) -> None:
    variant = variants(SPEC.cases[UNLIKE[1]])[0]
    target = Target(f"{__name__}:OneRankOnly", {}, capabilities={"transfer": True})
    run = run_variant(variant, target, seed=0, tmp=tmp_path / "run")
    asked = "tensor_parallel 2 of engine d"
    assert run.lacks == f"the connector refuses {asked}: OneRankOnly supports one rank."
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "judged")
    assert [row for row in report.rows if row.verdict in ("FAIL", "ERROR")] == []


def test_each_engine_is_judged_by_its_own_sizes() -> None:
    rule = {"id": "x.y", "text": "It MUST.", "event": "req.scheduled"}
    own = Requirement.model_validate({**rule, "always": "e.known == cfg.block_size"})
    engines = {"p": "kv_producer", "d": "kv_consumer"}
    sizes = {"d": {"block_size": 8, "hash_size": 8, "ranks": 1}}
    trace = [
        {"kind": "run.start", "seq": 0, "step": 0, "block_size": 4},
        {"kind": "run.engines", "seq": 1, "step": 0, "engines": engines, "own": sizes},
        {"kind": "req.scheduled", "seq": 2, "step": 1, "on": "p", "req": "a", "known": 4},
        {"kind": "req.scheduled", "seq": 3, "step": 1, "on": "d", "req": "b", "known": 8},
    ]
    assert evaluate_sides([own], trace, cfg=trace[0])["x.y"].violations == []
    trace[3]["known"] = 4
    found = evaluate_sides([own], trace, cfg=trace[0])["x.y"].violations
    assert [violation.seq for violation in found] == [3]


def test_only_engines_with_other_sizes_are_unlike() -> None:
    larger = {"role": "kv_both", "block_size": 8}
    config = {"engines": {"p": "kv_both", "q": {"role": "kv_both"}, "r": larger}}
    steps = [{"run": {}}]
    case = Case.model_validate(
        {"id": "x.y", "area": "x", "text": "x", "config": config, "steps": steps}, strict=False
    )
    variant = case.variants(["reference"])[0]
    assert variant.are_alike("p", "q") and not variant.are_alike("p", "r")
    assert [variant.of_engine(name).block_size for name in "pqr"] == [4, 4, 8]
    assert "unlike-sharers" in case.situations and "unlike-peers" not in case.situations


class HearsLate(Peer):
    """Its consumer reports a load three polls after it has told the producer that it has the KV."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loaded: list[set[str]] = [set(), set(), set()]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        self._loaded.append(received or set())
        return sent, self._loaded.pop(0) or None


def test_a_producer_may_hear_of_a_load_before_the_consumers_engine_does(tmp_path: Path) -> None:
    target = Target(f"{__name__}:HearsLate", {})
    assert hand_over(target, tmp_path / "calibration").notes
    variant = variants(SPEC.cases["transfer.prompt"])[0]
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "run")
    verdicts = {row.requirement: row.verdict for row in report.rows}
    assert verdicts["transfer.released"] == "PASS" and "FAIL" not in {*map(str, verdicts.values())}


def test_notes_are_found_out_where_the_two_roles_are_declared(tmp_path: Path) -> None:
    declared = {"transfer": True, "roles": ["kv_producer", "kv_consumer"]}
    variant = variants(SPEC.cases["transfer.prompt"])[0]
    target = Target(PEER, {}, capabilities=declared)
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    assert (report.capabilities["notes"], report.sources["notes"]) == (True, "inferred")
    verdicts = {row.requirement: row.verdict for row in report.rows}
    assert verdicts["transfer.released"] == "PASS"


class OrdersRoles(Peer):
    """Names its roles in an order of its own."""

    kvconform_capabilities: ClassVar = {"roles": ["kv_consumer", "kv_both", "kv_producer"]}


class LacksRole(Peer):
    """Does not name a role that it has."""

    kvconform_capabilities: ClassVar = {"roles": ["kv_consumer", "kv_producer"]}


def test_the_order_in_which_roles_are_declared_does_not_matter(tmp_path: Path) -> None:
    for cls, is_doubted in ((OrdersRoles, False), (LacksRole, True)):
        profile = target_profile(Target(f"{__name__}:{cls.__name__}", {}), tmp_path / cls.__name__)
        assert profile.caps["transfer"] and ("roles" in profile.doubts) is is_doubted


def test_what_a_router_has_to_do_is_found_out(tmp_path: Path) -> None:
    """Whether a producer hands over, and is told that its KV was loaded; how much is loaded."""
    found = hand_over(Target(PEER, {}), tmp_path / "peer")
    assert found == HandOver(hands_over=True, notes=True, partial=False)
    leased = hand_over(Target(f"{__name__}:LeaseOnly", {}), tmp_path / "leased")
    assert leased == HandOver(hands_over=True, notes=False, partial=False)
    routed = hand_over(Target(ROUTED, {}, router=ROUTER), tmp_path / "routed")
    assert routed == HandOver(hands_over=True, notes=True, partial=False)
    assert hand_over(Target(ROUTED, {}), tmp_path / "unrouted") == NOTHING


class Eager(Peer):
    """Reads at once, as the target of a push is written at once, and reports it two steps later.

    So the producer's report of the release comes before the consumer's load is due.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._arrived: list[tuple[int, str]] = []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        waiting = self._arrived + [(2, req) for req in received or ()]
        self._arrived = [(left - 1, req) for left, req in waiting if left]
        return sent, {req for left, req in waiting if not left} or None


class EagerFromTheEnd(Eager):
    """Reads the blocks in reverse order, while they are held."""

    def _copy(self, pull: Pull, offer: Offer) -> None:
        super()._copy(pull, Offer(offer.req, offer.blocks[::-1], offer.left))


def released_before_due(connector: type[Peer], tmp: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the pair.request event, and the verdicts of the requirements on it."""
    variant = variants(SPEC.cases["transfer.prompt"])[0]
    name = f"{__name__}:{connector.__name__}"
    report = run_and_judge(variant, Target(name, {}), SPEC, seed=0, tmp=tmp)
    request = next(e for e in report.trace if e["kind"] == "pair.request" and e["held"])
    dues = [e for e in report.trace if e["kind"] == "load.due" and e["req"] == request["req"]]
    reports = [
        e
        for e in report.trace
        if e["kind"] == "transfer.reported"
        and (e["req"], e["direction"]) == (request["of"], "send")
    ]
    assert reports[0]["seq"] < dues[0]["seq"]
    return request, {row.requirement: str(row.verdict) for row in report.rows}


def test_what_was_read_while_it_was_held_is_not_gone(tmp_path: Path) -> None:
    """The release before the load is due is the normal order of a push."""
    request, verdicts = released_before_due(Eager, tmp_path)
    assert (request["gone"], request["wrong"]) == (False, False)
    assert verdicts["transfer.delivered"] == "PASS"


def test_wrong_bytes_that_were_read_while_they_were_held_do_not_count_as_gone(
    tmp_path: Path,
) -> None:
    request, verdicts = released_before_due(EagerFromTheEnd, tmp_path)
    assert (request["gone"], request["wrong"]) == (False, True)
    assert verdicts["load.position"] == "FAIL"
    assert verdicts["transfer.fail-closed"] != "FAIL"
