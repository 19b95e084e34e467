# SPDX-License-Identifier: Apache-2.0
"""Small engines for tests of the core.

One is a worker without a scheduler; the other runs whole cases written as lists of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.case import Case, Variant
from kvconform.contract.trace import Trace
from kvconform.engine.batch import Batch, Script
from kvconform.engine.worker import Worker
from kvconform.kernels.codes import CodeBook
from kvconform.kv.cache import Group, PagedCache
from kvconform.kv.oracle import Grant, Oracle
from kvconform.kv.provenance import HandedOut, Identity, Memory, Registry
from kvconform.run.records import Run
from kvconform.run.runner import run_variant

Event = dict[str, Any]
BLOCK = 4
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
ROUND_TRIP = [
    {"add": {"req": "a", "prompt": 13, "max_tokens": 3}},
    {"run": {}},
    {"drop-local": {}},
    {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 3}},
    {"run": {}},
]
"""Computes a prompt, drops the local cache, asks again: 12 tokens come back."""
RESTART = [*ROUND_TRIP[:2], {"restart": "process"}, ROUND_TRIP[3], {"run": {}}]
"""The same over a restart in a new process."""


def output(
    *, new: Any = (), cached: Any = (), finished: Any = (), drafts: dict[str, int] | None = None
) -> SimpleNamespace:
    """Return the parts of a SchedulerOutput that the worker reads.

    `new`: (req, tokens, table, computed, count[, prefill tokens]).
    `cached`: dicts with req, blocks, computed, count, outputs[, tokens if resumed].
    """
    counts = {item[0]: item[4] for item in new} | {item["req"]: item["count"] for item in cached}
    made = SimpleNamespace(
        req_ids=[c["req"] for c in cached],
        new_block_ids=[None if c["blocks"] is None else (c["blocks"],) for c in cached],
        num_computed_tokens=[c["computed"] for c in cached],
        num_output_tokens=[c["outputs"] for c in cached],
        resumed_req_ids={c["req"] for c in cached if c.get("resumed")},
        all_token_ids={c["req"]: c["tokens"] for c in cached if "tokens" in c},
    )
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=req,
                prompt_token_ids=tokens,
                block_ids=(table,),
                num_computed_tokens=computed,
                prefill_token_ids=more[0] if more else None,
            )
            for req, tokens, table, computed, _, *more in new
        ],
        scheduled_cached_reqs=made,
        finished_req_ids=set(finished),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={req: [-1] * count for req, count in (drafts or {}).items()},
    )


@dataclass
class Machine:
    """A worker with two layers, its oracle and its trace; the test itself is the connector.

    `tables` are the live block tables.
    """

    tables: dict[str, list[int]] = field(default_factory=dict)
    scripts: dict[str, Script] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    blocks: int = 12
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        self.book = CodeBook(2, 2, 16)
        self.trace, self.registry = Trace(), Registry(self.book)
        self.cache = PagedCache(self.book, self.blocks, BLOCK, groups=self.groups)
        self.oracle = Oracle(self.cache, self.registry, self.trace, lambda: self.tables)
        self.batch = Batch(BLOCK, self.lookup, self.groups)
        self.worker = Worker(
            self.cache, self.registry, self.trace, self.oracle, self.batch, Memory()
        )

    def lookup(self, req: str) -> tuple[int, Identity, Script]:
        return (
            self.generations.get(req, 0),
            self.identities.get(req, Identity()),
            self.scripts.setdefault(req, Script()),
        )

    def grant(
        self, req: str, table: list[int], start: int, end: int, *, is_async: bool = False
    ) -> Grant:
        """Open a grant as the observer does."""
        transfer = f"{req}#{self.generations.get(req, 0)}.{len(self.oracle.grants) + 1}"
        made = Grant(
            transfer,
            req,
            self.generations.get(req, 0),
            start,
            end,
            is_async,
            [table],
            self.cache.groups,
        )
        self.oracle.grants.append(made)
        self.tables[req] = table
        return made

    def put(self, slot: int, value: float | None = None, layers: Any = (0, 1)) -> None:
        """Write one slot as the connector does.

        Every lane gets `value`, or keeps its content with new nonces.
        """
        for layer in layers:
            here = self.cache.tensors[layer][slot // BLOCK, :, slot % BLOCK]
            if value is None:
                here[:, [12, 13, 14, 15, 28, 29, 30, 31]] = (
                    here[:, [12, 13, 14, 15, 28, 29, 30, 31]] + 1
                ) % 16
            else:
                here[:] = value

    def load(self, chain: Any, start: int, end: int, slots: Any, layers: Any = (0, 1)) -> None:
        """The connector writes the right bytes of positions [start, end)."""
        rows = self.book.rows(chain.array(start, end), nonce=0x5A5A)
        for index, slot in enumerate(slots):
            for layer in layers:
                self.put_row(layer, int(slot), rows[index, layer])

    def put_row(self, layer: int, slot: int, row: Any) -> None:
        """The connector writes one row [heads, width]."""
        import torch

        self.cache.tensors[layer][slot // BLOCK, :, slot % BLOCK] = torch.from_numpy(row).float()

    def step(
        self,
        made: SimpleNamespace,
        *,
        fresh: Any = (),
        before: Callable[[], None] | None = None,
        attention: Callable[[int], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> dict[str, list[int]]:
        """Run one step with a forward pass and return the sampled tokens.

        `before`, `attention(layer)` and `after` are the connector's part.
        """
        worker = self.worker
        self.trace.step += 1
        worker.begin(made, [HandedOut(*each) for each in fresh])
        worker.poison_fresh()
        if before:
            before()
        self.oracle.check_writes("start_load_kv")

        def attend(name: str) -> None:
            if attention:
                attention(self.cache.names.index(name))
            worker.attend(name)

        worker.forward(attend)
        if after:
            after()
        self.oracle.check_writes("wait_for_save")
        for grant in self.oracle.open_grants():
            if grant.req in made.num_scheduled_tokens:
                self.oracle.due(grant, self.batch.requests[grant.req].chain)
        self.oracle.settle_reads()
        result = worker.sample()
        return dict(zip(result.req_ids, result.sampled_token_ids, strict=True))

    def events(self, kind: str, **where: Any) -> list[Event]:
        return select(self.trace.events, kind, **where)


def select(trace: list[Event], kind: str, **where: Any) -> list[Event]:
    """Events of a kind with these field values."""
    return [
        e
        for e in trace
        if e["kind"] == kind and all(e[name] == value for name, value in where.items())
    ]


def make_case(steps: list[dict[str, Any]], **more: Any) -> Case:
    """A case of these steps; `more` are its other keys."""
    return Case.model_validate(
        {"id": "test.case", "area": "test", "text": "A test.", **more, "steps": steps}, strict=False
    )


def run_case(
    connector: str | None,
    steps: list[dict[str, Any]],
    tmp: Path,
    *,
    engine: str = "reference",
    scheduling: str = "sync",
    runner: str = "v1",
    depth: int = 2,
    relation: str = "connector",
    extra: dict[str, Any] | None = None,
    seed: int = 0,
    may_fork: bool = False,
    stall: float = 0.1,
    **more: Any,
) -> Run:
    """Run a case with a connector (`module:Class`, or None). `stall`: the setting stall_seconds."""
    case = make_case(steps, **more)
    variant = Variant(
        case,
        engine,
        scheduling,
        runner,
        depth if scheduling == "async" else 1,
        case.config.block_size,
    )
    target = Target(connector, {"store": "{tmp}"} if extra is None else extra, stall_seconds=stall)
    return run_variant(variant, target, seed=seed, tmp=tmp, relation=relation, may_fork=may_fork)


def check_ok(run: Run) -> None:
    """The run went through, and nothing in it was wrong."""
    assert run.harness_error is None, run.harness_error
    assert not select(run.trace, "engine.crash") and not select(run.trace, "engine.stall")
    assert not select(run.trace, "kv.wrong")
    assert run.trace[-1]["kind"] in ("run.end", "hook.returned", "engine.lifecycle")
