# SPDX-License-Identifier: Apache-2.0
"""Faults of a connector's back end, as a scenario names them: data only.

Scenarios of the live engine, as read from spec/live/<id>.yaml: how vLLM is started, and what is asked of it.

A scenario takes the place of a case where the engine is `live`: it only drives. What must have happened for it to say anything is in `due`
and in `hits` of its phases, and is read from vLLM's own metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from kvconform.contract.case import Variant
from kvconform.contract.expression import Expression, compile_capability
from kvconform.contract.requirement import CapabilityExpr, Id, Model, Relation, Version, in_force

Deed = Literal["kill", "restart", "pause", "clear"]


class Fault(Model):
    """What happens to servers of the connector's settings, and when.

    It strikes in phase `phase`, after `at` steps of it (0: before its first request); with `before`, in the first step from then on in
    which the worker half is about to start loads that the engine has granted, or to finish its saves, right before it does.

    kill: the server is gone from one moment to the next, and stays away. restart: gone, and back on the same port with what it keeps on
    disk; one that is gone comes back. pause: it stands still for `still` seconds (SIGSTOP), and goes on. clear: it forgets what it stores.
    Any of them may be preceded by `still` seconds in which the server answers nothing, while the engine goes on; without them the engine
    stands still until it is done.
    """

    phase: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    at: Annotated[int, Field(ge=0)] = 0
    before: Literal["load", "save"] | None = None
    do: Deed
    still: float = Field(default=0.0, ge=0, le=60)

    @model_validator(mode="after")
    def _lasts(self) -> Fault:
        if self.do == "pause" and not self.still:
            raise ValueError("a pause takes some seconds: `still`")
        return self


def lacking(faults: Sequence[Fault], clearable: Sequence[bool]) -> str | None:
    """What a connector's settings lack for these faults; `clearable`: of each of its servers, whether it can be told to forget."""
    if faults and not clearable:
        return "a server of its own that can be made to fail ([[servers]] in the settings)"
    if any(fault.do == "clear" for fault in faults) and not all(clearable):
        return "servers that can be told to forget (`clear` or `lose` in [[servers]])"
    return None


def spared(faults: Sequence[Fault], events: Iterable[dict[str, Any]]) -> list[str]:
    """In words, the faults that never struck: their phase was over before."""
    struck = {(e["phase"], e["number"]) for e in events if e["kind"] == "live.fault"}
    return [
        f"the fault `{fault.do}` of phase {fault.phase} never struck"
        for number, fault in numbered(faults)
        if (fault.phase, number) not in struck
    ]


def numbered(faults: Sequence[Fault]) -> list[tuple[int, Fault]]:
    """The faults with their number within their phase."""
    counts: dict[str, int] = {}
    found = []
    for fault in faults:
        counts[fault.phase] = counts.get(fault.phase, -1) + 1
        found.append((counts[fault.phase], fault))
    return found


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
Count = Annotated[int, Field(ge=0)]
Due = Literal["loads", "preemptions", "drafts", "failed_loads"]
Take = Literal["same", "halves", "continued"]


class Start(Model):
    """How vLLM is started. Sizes in tokens and blocks."""

    scheduling: Literal["sync", "async"] = "sync"
    blocks: PositiveInt = Field(
        default=96, description="blocks of the KV cache, the null block included"
    )
    budget: PositiveInt = Field(default=2048, description="max_num_batched_tokens")
    max_seqs: PositiveInt = 8
    prefix_caching: bool = True
    spec_tokens: Count = Field(
        default=0, description="drafts per step, from n-grams of the request's own tokens"
    )
    processes: bool = Field(
        default=False, description="the engine in a process of its own, as a server has it"
    )
    priority: bool = Field(default=False, description="scheduling by priority")


class Prompt(Model):
    """Random token ids. With `like`, the first `shared` ones are those of an earlier prompt; with `period`, they repeat, and which they are
    depends on `draw` alone, not on the run's seed: few are such that the model's answer repeats, too."""

    name: Name
    tokens: PositiveInt
    like: Name | None = None
    shared: Count = 0
    period: PositiveInt | None = None
    draw: int = 0


class Phase(Model):
    """All prompts at once, and on until all are answered. `take`: the prompts themselves, their first halves, or the conversation so far
    (prompt, answer to it in the first phase, `more` new tokens)."""

    name: Name
    reset: bool = Field(default=False, description="vLLM's local prefix cache is emptied before")
    take: Take = "same"
    more: Count = 0
    reverse: bool = False
    hits: bool = Field(
        default=False,
        description="a connector that keeps KV has to be asked for some, and to load it",
    )


class Request(Model):
    """One request of a workload without phases: it arrives before step `at`. Its prompt is the first `shared` tokens of family `family`,
    and `tail` tokens of its own. `abort`: it is aborted so many steps after its arrival. Of a pair, requests with the same `at` are under
    way together, steps are the consumer's, and one with `early` gets no further than the producer."""

    at: Count = 0
    family: Count = 0
    shared: Count = 0
    tail: Count = 0
    own: Count | None = Field(
        default=None, description="which tokens of its own; default: its place in the list"
    )
    out: PositiveInt = 8
    abort: PositiveInt | None = None
    early: PositiveInt | None = Field(
        default=None,
        description="of a pair: aborted so many steps after its arrival at the producer",
    )
    priority: int = 0
    reset: bool = Field(
        default=False,
        description="vLLM's local prefix cache (of a pair: the consumer's) is emptied before it, once nothing runs",
    )


class Workload(Model):
    """What is asked of an engine, in spec/live/workloads.yaml: prompts and phases."""

    id: Id
    text: str = Field(min_length=1)
    prompts: list[Prompt] = Field(min_length=1)
    phases: list[Phase] = Field(min_length=1)
    output: PositiveInt = Field(default=24, description="tokens of every answer")

    @model_validator(mode="after")
    def _names(self) -> Workload:
        known: dict[str, Prompt] = {}
        for prompt in self.prompts:
            if prompt.name in known:
                raise ValueError(f"two prompts are named {prompt.name!r}")
            if prompt.like is not None and prompt.like not in known:
                raise ValueError(
                    f"prompt {prompt.name!r} is like {prompt.like!r}, which no earlier prompt is named"
                )
            if prompt.like is not None and prompt.shared > min(
                prompt.tokens, known[prompt.like].tokens
            ):
                raise ValueError(f"prompt {prompt.name!r} shares more tokens than there are")
            known[prompt.name] = prompt
        if len({phase.name for phase in self.phases}) < len(self.phases):
            raise ValueError("two phases have the same name")
        if self.phases[0].take == "continued":
            raise ValueError("the first phase has no conversation to continue")
        return self


class Scenario(Model):
    """One scenario. `workload` is the id of one in spec/live/workloads.yaml; or it has `requests` of its own."""

    id: Id
    area: str = "live"
    text: str = Field(min_length=1)
    since: Version | None = Field(
        default=None, description="first vLLM version whose engine can do it"
    )
    needs: CapabilityExpr = "core"
    start: Start = Start()
    workload: Id | None = None
    requests: list[Request] = []
    families: int | None = Field(
        default=None, description="seed of the tokens of `requests`; default: the run's"
    )
    fail: bool = Field(default=False, description="the connector is asked to let loads fail")
    faults: list[Fault] = Field(
        default=[],
        description="what happens to the servers of the connector's settings, in this order",
    )
    pair: Literal["handed", "aborted", "replayed", "altered", "killed", "requests"] | None = Field(
        default=None,
        description="a producer and a consumer in processes of their own, and what the proxy between them does",
    )
    on_failure: Literal["recompute", "fail"] = Field(
        default="recompute", description="kv_load_failure_policy of a pair"
    )
    due: list[Due] = []
    rules: list[str] = []
    bugs: list[str] = []

    @model_validator(mode="after")
    def _one_of_them(self) -> Scenario:
        if (self.workload is not None) + bool(self.requests) + (
            self.pair not in (None, "requests")
        ) != 1:
            raise ValueError("needs a workload, requests of its own, or a pair")
        if self.pair == "requests" and not self.requests:
            raise ValueError("a pair that is to play requests needs some")
        if self.pair is None and any(request.early for request in self.requests):
            raise ValueError("there is no producer where a request could end early")
        if "preemptions" in self.due and self.start.blocks > 64:
            raise ValueError("preemptions are due, and there are blocks enough for all")
        if "drafts" in self.due and not self.start.spec_tokens:
            raise ValueError("accepted drafts are due, and spec_tokens is 0")
        if self.faults and (self.workload is None or self.start.processes):
            raise ValueError(
                "faults of servers strike in phases of a workload, and where the engine is in one process"
            )
        if self.start.spec_tokens and self.start.scheduling == "async":
            raise ValueError(
                "vLLM does not do n-gram speculation on a CPU with asynchronous scheduling"
            )
        return self

    @cached_property
    def needs_expr(self) -> Expression:
        """What the connector must be able to do, over `cap`."""
        return compile_capability(
            [
                self.needs,
                *(["fault_injection"] if self.fail else []),
                *(["transfer"] if self.pair else []),
            ]
        )

    @property
    def relations(self) -> list[Relation]:
        """The runs that its run is compared with."""
        return ["no-connector"]

    def in_force(self, vllm: str) -> bool:
        """Whether it is run with this vLLM version."""
        return in_force(self.since, None, vllm)

    def unmet(self, caps: dict[str, Any]) -> str | None:
        """The condition that a connector with these capabilities does not meet, or None if the scenario suits it."""
        return None if self.needs_expr.bind(caps)({}) else self.needs_expr.source

    def variants(
        self,
        engines: Sequence[str] | None = None,
        schedulings: Sequence[str] | None = None,
        slow: Sequence[str] | None = None,
    ) -> list[Variant]:
        """Its one run, unless engine or scheduling are not asked for. `slow` streams are no axis here."""
        scheduling = self.start.scheduling
        if (engines is not None and "live" not in engines) or (
            schedulings is not None and scheduling not in schedulings
        ):
            return []
        depth = 2 if scheduling == "async" else 1
        return [Variant(self, "live", scheduling, "v1", depth, BLOCK_SIZE)]  # type: ignore[arg-type]


BLOCK_SIZE = 32
"""Tokens per block: what vLLM's attention on a CPU takes at least."""
MAX_MODEL_LEN = 384
"""Tokens that one request may have."""


HAND_OVER: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy sends a prefill engine along, so that the KV is kept for a decode engine (vLLM's examples/online_serving)."""
