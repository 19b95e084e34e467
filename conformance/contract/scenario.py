# SPDX-License-Identifier: Apache-2.0
"""Scenarios of engine live, as read from spec/live/<id>.yaml, and the faults they plan.

A scenario says how vLLM is started and which requests it gets. It takes the place of a case and,
like a case, only drives. `due`, and `hits` of its phases, name what must have happened for its
verdicts to mean anything; this is read from vLLM's own metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from kvconform.contract.case import Sibling, Variant
from kvconform.contract.expression import Expression, compile_capability
from kvconform.contract.requirement import CapabilityExpr, Id, Model, Relation, Version, in_force
from kvconform.contract.situation import situations
from kvconform.contract.steps import NOTHING_TO_DAMAGE, Files

Deed = Literal["kill", "restart", "pause", "clear", "damage"]


class Fault(Model):
    """A fault of the servers in the connector's settings, or of its files, and its time.

    It strikes in phase `phase`, after `at` steps of the phase (0: before its first request). With
    `before`, it strikes in the first step from then on in which the worker half is about to start
    granted loads, or to finish its saves, right before it does.

    - kill: the server is killed, and stays away.
    - restart: the server is killed, and started again on the same port with its files on disk. A
      killed server is started.
    - pause: the server stops for `still` seconds (SIGSTOP), and continues.
    - clear: the server deletes what it stores.
    - damage: every file in the connector's directory ({tmp} of extra_config), and every value on a
      server that has a command for it, is damaged as `files` says, as by the step `damage` of a
      case.

    Each but the last may be preceded by `still` seconds in which the server does not reply while
    the engine continues. Without them the engine waits until the fault is done.
    """

    phase: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    at: Annotated[int, Field(ge=0)] = 0
    before: Literal["load", "save"] | None = None
    do: Deed
    files: Files | None = None
    still: float = Field(default=0.0, ge=0, le=60)

    @property
    def of_servers(self) -> bool:
        """Whether it is a fault of the servers."""
        return self.do != "damage"

    @model_validator(mode="after")
    def _damages_files(self) -> Fault:
        if self.of_servers != (self.files is None) or (self.files and self.still):
            raise ValueError("`damage` needs `files` and no `still`, and nothing else has `files`")
        return self

    @model_validator(mode="after")
    def _lasts(self) -> Fault:
        if self.do == "pause" and not self.still:
            raise ValueError("`pause` needs `still`, its duration in seconds")
        return self


def lacking(faults: Sequence[Fault], clearable: Sequence[bool]) -> str | None:
    """Return what a connector's settings lack for these faults, or None.

    `clearable`: whether it can be cleared, for each of its servers.
    """
    if any(fault.of_servers for fault in faults) and not clearable:
        return "a server of its own that can be made to fail ([[servers]] in the settings)"
    if any(fault.do == "clear" for fault in faults) and not all(clearable):
        return "servers that can be cleared (`clear` or `lose` in [[servers]])"
    return None


def spared(faults: Sequence[Fault], events: Iterable[dict[str, Any]]) -> list[str]:
    """Return a sentence for each fault that did nothing.

    Its phase ended before, or the connector has no files in the directory that is damaged.
    """
    found = list(events)
    struck = {(e["phase"], e["number"]) for e in found if e["kind"] == "live.fault"}
    idle = [
        f"the fault `{fault.do}` of phase {fault.phase} never struck"
        for number, fault in numbered(faults)
        if (fault.phase, number) not in struck
    ]
    if any(e["kind"] == "store.damaged" and not e["count"] for e in found):
        idle.append(NOTHING_TO_DAMAGE)
    return idle


def numbered(faults: Sequence[Fault]) -> list[tuple[int, Fault]]:
    """Return the faults, each with its number within its phase."""
    counts: dict[str, int] = {}
    found = []
    for fault in faults:
        counts[fault.phase] = counts.get(fault.phase, -1) + 1
        found.append((counts[fault.phase], fault))
    return found


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
Label = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$")]
Adapter = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(@[0-9]+)?$")]
Count = Annotated[int, Field(ge=0)]
Due = Literal["loads", "preemptions", "drafts", "failed_loads"]
Take = Literal["same", "halves", "continued", "sessions"]


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
    draft_model: bool = Field(
        default=False,
        description="the drafts come from a model, whose layers have KV of their own",
    )
    windows: bool = Field(
        default=False,
        description="the model's second layer sees the last 40 tokens only: a group of layers of "
        "its own, if the connector has a part in several (SupportsHMA)",
    )
    multi: list[Sibling] = Field(
        default=[],
        description="the connector runs inside of MultiConnector with these children; `self` is it",
    )
    processes: bool = Field(
        default=False, description="the engine runs in a process of its own, as in a server"
    )
    priority: bool = Field(default=False, description="scheduling by priority")

    @model_validator(mode="after")
    def _every_sequence_fits(self) -> Start:
        if self.budget < self.max_seqs:
            raise ValueError("vLLM wants a budget of one token at least for each of max_seqs")
        return self


class Prompt(Model):
    """A prompt of random token ids.

    With `like`, its first `shared` tokens are those of an earlier prompt, but for the very first
    `apart`: so the two differ early and agree later. With `period`, the tokens
    repeat, and depend on `draw` instead of the run's seed, because the model's output repeats for
    few draws only.
    """

    name: Name
    tokens: PositiveInt
    like: Name | None = None
    shared: Count = 0
    apart: Count = 0
    period: PositiveInt | None = None
    draw: int = 0


class Phase(Model):
    """A phase, which sends all prompts at once and ends when all are answered.

    `take`: the prompts themselves, their first halves, the conversation so far (prompt, answer of
    the first phase, `more` new tokens), or sessions (a third of the prompt, another one when that
    is answered, then the last).
    """

    name: Name
    reset: bool | Literal["connector"] = Field(
        default=False,
        description="empty vLLM's local prefix cache before; `connector`: the connector's, too",
    )
    take: Take = "same"
    more: Count = 0
    reverse: bool = False
    restart: bool = Field(
        default=False,
        description="before, vLLM ends and starts again in another process, whose hash seed is "
        "another one unless the environment or the settings have PYTHONHASHSEED",
    )
    interrupt: PositiveInt | None = Field(
        default=None,
        description="after so many steps of the phase, empty vLLM's local prefix cache and the "
        "connector's cache while requests run, which vLLM preempts",
    )
    hits: bool = Field(
        default=False,
        description="a connector that keeps KV must be asked for KV, and load some",
    )


Entrypoint = Literal["completions", "chat", "embeddings"]
PairPlay = Literal["handed", "aborted", "replayed", "altered", "incomplete", "killed", "requests"]
SITUATIONS: dict[PairPlay, tuple[str, ...]] = {
    "replayed": ("replayed-params",),
    "altered": ("unknown-peer",),
    "incomplete": ("incomplete-params",),
}
"""Situations (spec/situations.yaml) that a pair makes."""


class Request(Model):
    """One request of a workload without phases, which arrives before step `at`.

    Its prompt is `lead` tokens, the first `shared` tokens of family `family`, and `tail` tokens of
    its own.
    At an entrypoint, requests with the same `at` run concurrently, and the next ones are sent when
    these are answered; `salt`, `lora`, `embeds` and `image` need an entrypoint.
    `abort`: it is aborted this many steps after its arrival. In a pair, requests with the same `at`
    run concurrently, steps are the consumer's, and a request with `early` never reaches the
    consumer.
    """

    at: Count = 0
    family: Count = 0
    lead: Count = Field(
        default=0,
        description="tokens before those of the family, the same in all requests with as many",
    )
    shared: Count = 0
    tail: Count = 0
    own: Count | None = Field(
        default=None, description="selects its own tokens; default: its place in the list"
    )
    out: PositiveInt = 8
    abort: PositiveInt | None = None
    early: PositiveInt | None = Field(
        default=None,
        description="in a pair: aborted this many steps after its arrival at the producer",
    )
    priority: int = 0
    reset: bool = Field(
        default=False,
        description="before it, once nothing runs, empty vLLM's local prefix cache "
        "(in a pair: the consumer's)",
    )
    salt: Label | None = Field(default=None, description="cache_salt of the HTTP request")
    lora: Adapter | None = Field(
        default=None,
        description="name of a LoRA adapter; NAME@VERSION is loaded in place of another version",
    )
    embeds: Label | None = Field(
        default=None,
        description="content of a prompt that is sent as embeddings, `tail` tokens long",
    )
    image: Label | None = Field(
        default=None,
        description="content of an image in front of the prompt (entrypoint chat)",
    )

    @property
    def tenant(self) -> tuple[str, ...]:
        """What tells it apart from a request with the same tokens, in words."""
        named = {"salt": self.salt, "lora": self.lora, "embeds": self.embeds, "image": self.image}
        return tuple(f"{kind}-{value}" for kind, value in named.items() if value is not None)


class Workload(Model):
    """The requests of a scenario, in spec/live/workloads.yaml: prompts and phases."""

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
            if prompt.like is not None:
                if prompt.like not in known:
                    like = f"prompt {prompt.name!r} is like {prompt.like!r}"
                    raise ValueError(f"{like}, but no earlier prompt has that name")
                if prompt.shared > min(prompt.tokens, known[prompt.like].tokens):
                    raise ValueError(f"prompt {prompt.name!r} shares more tokens than there are")
            known[prompt.name] = prompt
        if len({phase.name for phase in self.phases}) < len(self.phases):
            raise ValueError("two phases have the same name")
        if self.phases[0].take == "continued":
            raise ValueError("the first phase has no conversation to continue")
        return self


class Scenario(Model):
    """One scenario.

    `workload` is the id of one in spec/live/workloads.yaml; otherwise the scenario has `requests`
    of its own, or is a pair.
    """

    id: Id
    area: str = "live"
    text: str = Field(min_length=1)
    since: Version | None = Field(
        default=None, description="first vLLM version whose engine can run it"
    )
    needs: CapabilityExpr = "core"
    start: Start = Start()
    workload: Id | None = None
    requests: list[Request] = []
    families: int | None = Field(
        default=None, description="seed of the tokens of `requests`; default: the run's seed"
    )
    entrypoint: Entrypoint | None = Field(
        default=None,
        description="requests enter by HTTP at vLLM's OpenAI-compatible server: "
        "/v1/completions, /v1/chat/completions or /v1/embeddings",
    )
    fail: bool = Field(default=False, description="the connector is asked to make loads fail")
    faults: list[Fault] = Field(
        default=[],
        description="faults of the servers in the connector's settings, or of its files, in order",
    )
    pair: PairPlay | None = Field(
        default=None,
        description="a producer and a consumer, each in its own process, "
        "and what the proxy between them does",
    )
    on_failure: Literal["recompute", "fail"] = Field(
        default="recompute", description="kv_load_failure_policy of a pair"
    )
    due: list[Due] = []
    rules: list[str] = []
    bugs: list[str] = []

    @model_validator(mode="after")
    def _one_of_them(self) -> Scenario:
        pair_is_a_workload = self.pair not in (None, "requests")
        if (self.workload is not None) + bool(self.requests) + pair_is_a_workload != 1:
            raise ValueError("needs a workload, requests of its own, or a pair")
        if self.pair == "requests" and not self.requests:
            raise ValueError("pair `requests` needs `requests`")
        places = {place for place, request in enumerate(self.requests) if request.own is None}
        if taken := places & {request.own for request in self.requests}:
            raise ValueError(
                f"`own: {min(taken)}` is the place of a request that has no `own`, "
                "and would be taken for that one"
            )
        if self.pair is None and any(request.early for request in self.requests):
            raise ValueError("`early` needs a pair: without one there is no producer")
        if "preemptions" in self.due and self.start.blocks > 64:
            raise ValueError("preemptions are due, but start.blocks is large enough to avoid them")
        if "drafts" in self.due and not self.start.spec_tokens:
            raise ValueError("accepted drafts are due, but spec_tokens is 0")
        if self.start.draft_model and not self.start.spec_tokens:
            raise ValueError("a draft model is due, but spec_tokens is 0")
        if self.start.multi and (self.start.multi.count("self") != 1 or self.pair is not None):
            raise ValueError("multi has `self` among its children, once, and no pair")
        if self.faults and (self.workload is None or self.start.processes):
            raise ValueError("faults need a workload, and start.processes false")
        if self.entrypoint is None:
            if any(request.tenant for request in self.requests):
                raise ValueError(
                    "`salt`, `lora`, `embeds` and `image` of a request need an `entrypoint`"
                )
        else:
            self._enters()
        if self.start.spec_tokens and self.start.scheduling == "async":
            raise ValueError(
                "vLLM does not do n-gram speculation on a CPU with asynchronous scheduling"
            )
        return self

    def _enters(self) -> None:
        """Raise ValueError for what a scenario with an entrypoint cannot have."""
        if not self.requests or self.pair is not None or self.fail:
            raise ValueError("an entrypoint needs `requests`, and no pair and no `fail`")
        if not self.start.processes:
            raise ValueError("an entrypoint needs start.processes: a server's engine has its own")
        if any(request.abort for request in self.requests):
            raise ValueError("`abort` counts steps, which a client of the server does not see")
        versions: dict[str, str] = {}
        at = 0
        for request in self.requests:
            if request.reset or request.at != at:
                versions.clear()
            at = request.at
            name = (request.lora or "").partition("@")[0]
            if name and versions.setdefault(name, str(request.lora)) != request.lora:
                raise ValueError(f"two versions of adapter {name!r} at the same time")
            if request.embeds and (request.shared or self.entrypoint != "completions"):
                raise ValueError("`embeds` needs entrypoint completions, and no `shared` tokens")
            if request.image and self.entrypoint != "chat":
                raise ValueError("`image` needs entrypoint chat")

    @cached_property
    def needs_expr(self) -> Expression:
        """The condition over `cap`: the declared `needs`, and what the scenario implies."""
        needs = [self.needs]
        if self.fail:
            needs.append("fault_injection")
        if self.pair:
            needs.append("transfer")
        return compile_capability(needs)

    @property
    def situations(self) -> tuple[str, ...]:
        """The situations (spec/situations.yaml) that the scenario makes."""
        damaged = ("damage",) if any(not fault.of_servers for fault in self.faults) else ()
        return (SITUATIONS.get(self.pair, ()) if self.pair else ()) + damaged

    @property
    def beyond(self) -> tuple[str, ...]:
        """The situations of the scenario that vLLM does not bring about."""
        return tuple(name for name in self.situations if not situations()[name].vllm)

    @property
    def relations(self) -> list[Relation]:
        """The related runs that its run is compared with."""
        return ["no-connector"]

    def in_force(self, vllm: str) -> bool:
        """Return whether the scenario is run with this vLLM version."""
        return in_force(self.since, None, vllm)

    def unmet(self, caps: dict[str, Any]) -> str | None:
        """Return the condition that these capabilities do not meet; None if they suit it."""
        return None if self.needs_expr.bind(caps)({}) else self.needs_expr.source

    def variants(
        self,
        engines: Sequence[str] | None = None,
        schedulings: Sequence[str] | None = None,
        slow: Sequence[str] | None = None,
    ) -> list[Variant]:
        """Return its one run, unless its engine or scheduling was not asked for.

        `slow` is ignored: streams are no axis here.
        """
        scheduling = self.start.scheduling
        if engines is not None and "live" not in engines:
            return []
        if schedulings is not None and scheduling not in schedulings:
            return []
        depth = 2 if scheduling == "async" else 1
        return [Variant(self, "live", scheduling, "v1", depth, BLOCK_SIZE)]  # type: ignore[arg-type]


BLOCK_SIZE = 32
"""Tokens per block: the least that vLLM's attention on a CPU supports."""
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
"""The kv_transfer_params that a proxy sends to a prefill engine.

They make it keep the KV for a decode engine (vLLM's examples/online_serving).
"""
