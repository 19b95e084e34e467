# SPDX-License-Identifier: Apache-2.0
"""Promises of a connector: how many tokens of stored content it must be able to load again.

Promises are declared, or learned from plain workloads: one request is computed and asked for again,
alone or in a crowd of other requests. A best-effort connector may store less in a crowd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvconform.contract.case import Case
from kvconform.contract.steps import Layout

if TYPE_CHECKING:
    from kvconform.kv.provenance import Identity  # it loads numpy, which the controller must not

MEASURED = "KVCONFORM_MEASURED"
"""Environment variable: a directory in which the workers of one run share what they measured."""
MOST = 64
"""Largest number of requests of each kind in a crowd."""
LONGEST = 256
"""Largest number of tokens or steps that a crowd counts."""


@dataclass(frozen=True)
class Crowd:
    """Other requests around a request, the source, whose content is looked up again.

    `before`, `alongside` and `after` have a length in tokens for each request that ran before the
    source, in steps of the source, or after it. `loads` has the tokens of each load in progress at
    the lookup. `local` is the number of tokens of the content that the engine's own cache had.
    `steps` counts the steps from the source's first one to the lookup: stored KV may have expired.
    """

    before: tuple[int, ...] = ()
    alongside: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    local: int = 0
    steps: int = 0

    @property
    def tokens(self) -> int:
        """Sum of all tokens, and one for each step."""
        others = (*self.before, *self.alongside, *self.after, *self.loads)
        return sum(others) + self.local + self.steps


NOBODY = Crowd()


def crowd_of(
    events: Sequence[dict[str, Any]],
    source: tuple[str, int],
    lookup: dict[str, Any],
    resumed: bool = False,
) -> Crowd:
    """Return the crowd of `source` (request id, generation) at a `lookup` event.

    A `resumed` request is one of the crowd: it was computed before.
    """
    asker = None if resumed else (lookup["req"], lookup["generation"])
    rows = [(_of(e), e) for e in events if e["kind"] == "req.scheduled" and _of(e) != asker]
    mine = [e for key, e in rows if key == source]
    steps = {(e.get("on"), e["step"]) for e in mine}
    lengths: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, int], int] = {}
    alongside: set[tuple[str, int]] = set()
    for key, e in rows:
        length = min(e["computed"] + e["scheduled"], e["known"], LONGEST)
        lengths[key] = max(lengths.get(key, 0), length)
        first.setdefault(key, e["seq"])
        if (e.get("on"), e["step"]) in steps:
            alongside.add(key)
    start = mine[0]["seq"] if mine else 0
    alone = [key for key in lengths if key != source and key not in alongside]
    return Crowd(
        before=tuple(lengths[key] for key in alone if first[key] < start)[-MOST:],
        alongside=tuple(lengths[key] for key in lengths if key != source and key in alongside)[
            -MOST:
        ],
        after=tuple(lengths[key] for key in alone if first[key] > start)[-MOST:],
        loads=tuple(_loads(events, lookup))[-MOST:],
        local=lookup["local"],
        steps=min(max(0, lookup["step"] - mine[0]["step"]), LONGEST) if mine else 0,
    )


def _of(event: dict[str, Any]) -> tuple[str, int]:
    return event["req"], event["generation"]


def _loads(events: Sequence[dict[str, Any]], lookup: dict[str, Any]) -> list[int]:
    """Return the tokens of each load in progress at a lookup.

    A synchronous load is in progress if it was granted in the step of the lookup.
    """
    pending: dict[tuple[str, int], int] = {}
    now = (lookup.get("on"), lookup["step"])
    for e in events:
        if e["kind"] == "alloc" and e["external"] > 0:
            if e["is_async"] or (e.get("on"), e["step"]) == now:
                pending[_of(e)] = min(e["external"], LONGEST)
        elif e["kind"] == "transfer.reported" and e["direction"] == "recv":
            pending.pop(_of(e), None)
    return list(pending.values())


Steps = list[dict[str, Any]]
ROOM = 100
"""Factor of blocks over those needed with which no block ever comes near eviction."""


@dataclass(frozen=True)
class Plain:
    """A plain workload: `prompt` + `outputs` tokens are computed, then asked for again.

    The second prompt has `wanted` tokens and shares the first `common` ones. No request is chunked,
    preempted or speculated on, not even in the crowd. `groups` are the KV cache groups, if there
    are several, and `window` is their sliding window. `caching` says whether the engine has a
    prefix cache. `room` is the number of blocks, as a multiple of those needed. `layout` is the
    only order of a KV tensor's axes that the attention supports. `prefix_match_unit` is the number
    of tokens per block hash, if smaller than a block. The tokens of a block are split over
    `context_parallel` ranks. The model is a `pooling` model, or generates. With `restart`, the
    engine is restarted in between, in this process or another one.
    """

    prompt: int
    outputs: int
    common: int
    wanted: int
    crowd: Crowd = NOBODY
    groups: tuple[str, ...] = ()
    window: int = 8
    caching: bool = True
    room: int = 3
    layout: Layout | None = None
    prefix_match_unit: int | None = None
    context_parallel: int = 1
    pooling: bool = False
    restart: Literal["engine", "process"] | None = None


def plain_case(plain: Plain, block_size: int) -> Case:
    """Return the case of a plain workload.

    It computes a prompt (request `a`), drops the local cache or restarts, and asks again (request
    `b`).
    """
    crowd = plain.crowd
    total = max(plain.prompt + plain.outputs, plain.wanted) + 8
    ends = (plain.outputs + block_size) * (len(crowd.alongside) + 2 * len(crowd.loads))
    needed = total + 3 * crowd.tokens + ends
    steps: Steps = []
    for number, tokens in enumerate((*crowd.before, *crowd.loads)):
        steps += [_add(f"p{number}", tokens, 1), {"run": {}}]
    steps += [
        _add(f"q{number}", tokens, plain.outputs) for number, tokens in enumerate(crowd.alongside)
    ]
    steps += [_add("a", plain.prompt, plain.outputs), {"run": {}}]
    # Those alongside the source may also have been saved after it.
    for number, tokens in enumerate((*crowd.after, *crowd.alongside)):
        steps += [_add(f"r{number}", tokens, 1), {"run": {}}]
    if crowd.steps:
        steps += [_add("t", 1, crowd.steps), {"run": {}}]
    steps.append({"restart": plain.restart} if plain.restart else {"drop-local": {}})
    if crowd.local:
        local = {"of": "a", "outputs": True, "tokens": crowd.local, "then": 0}
        steps += [_add("w", local, 1), {"run": {}}]
    for number, tokens in enumerate(crowd.loads):
        source = f"p{len(crowd.before) + number}"
        steps.append(_add(f"s{number}", {"of": source, "tokens": tokens, "then": 1}, 1))
    again = {
        "of": "a",
        "outputs": True,
        "tokens": plain.common,
        "then": plain.wanted - plain.common,
    }
    steps += [_add("b", again, 1), {"run": {}}]
    config = {
        "block_size": block_size,
        "budget": max(64, needed),
        "num_blocks": plain.room * (needed // block_size + 3),
        "max_model_len": 2 * max(total, LONGEST if crowd.tokens else 128),
        "max_seqs": 8 + len(crowd.alongside) + len(crowd.loads),
        "groups": list(plain.groups),
        "window": plain.window,
        "prefix_caching": plain.caching,
        "layout": plain.layout,
        "prefix_match_unit": plain.prefix_match_unit,
        "pooling": plain.pooling,
    }
    if plain.context_parallel > 1:
        degree = plain.context_parallel
        config |= {"groups": ["latent"], "tensor_parallel": degree, "context_parallel": degree}
    text = "A prompt is computed, the local cache dropped, the same prompt asked for again."
    engines = ["vllm"] if plain.groups else ["reference"]
    case = {
        "id": "internal.calibration",
        "area": "internal",
        "text": text,
        "config": config,
        "engines": engines,
        "steps": steps,
    }
    return Case.model_validate(case, strict=False)


def _add(req: str, prompt: Any, outputs: int) -> dict[str, Any]:
    return {"add": {"req": req, "prompt": prompt, "max_tokens": outputs}}


class Promises:
    """Numbers of tokens that a connector promises to load again.

    Declared capabilities give a formula: whole chunks, or whole blocks. What is inferred is
    calibrated, and so is what several KV cache groups, a prescribed layout or blocks that are split
    over ranks bring back, where a connector may go on without storing: of a prompt that was
    chunked, preempted or speculated on, as many tokens must come back as of a plain prompt of the
    same length. That may depend on the crowd: a connector may decline a small load, or save only so
    much per step.

    `calibrate(plain, block_size)` runs a plain workload, the same one only once, and returns how
    many tokens came back. `splits`: the capability context_parallel is declared, so the formula
    holds where ranks split blocks, too.
    """

    def __init__(
        self,
        caps: dict[str, Any],
        declared: bool,
        calibrate: Callable[[Plain, int], int],
        *,
        splits: bool = False,
    ) -> None:
        self.caps = caps
        self.splits = splits
        self.declared = declared
        self.calibrate = calibrate

    def promised(
        self,
        source: Any,
        prompt: list[int],
        request: Any,
        block_size: int,
        final: int | None,
        crowd: Crowd = NOBODY,
        identities: tuple[Identity, Identity] | None = None,
        groups: tuple[str, ...] = (),
        window: int = 8,
        caching: bool = True,
        room: int = 3,
        layout: Layout | None = None,
        prefix_match_unit: int | None = None,
        context_parallel: int = 1,
        pooling: bool = False,
        found: int = 0,
    ) -> int:
        """Return how many tokens of `request` must be loadable or local.

        `source` has computed `final` positions of this content, from the prompt `prompt`.
        `identities` are those of `source` and `request`, which have nothing in common from where
        these differ; None: they are equal. `groups`, `window`, `caching`, `room`, `layout`,
        `prefix_match_unit`, `context_parallel` and `pooling` are as in `Plain`: a connector may
        behave differently with several groups, in a layout or where ranks split blocks, need a
        prefix cache, or save only what is about to be evicted.
        `found`: tokens that came back. If they are all that could be promised, no plain run is
        made: all whole blocks, of a connector that stores nothing else.
        """
        saves = self.caps["saves"]
        if final is None or saves == "none" or not self.caps["store"]:
            return 0
        known = source.all_token_ids
        wanted = request.all_token_ids
        common = 0
        if identities is not None and identities[0] == identities[1]:
            identities = None
        while (
            common < min(len(known), len(wanted))
            and known[common] == wanted[common]
            and (identities is None or identities[0].own(common) == identities[1].own(common))
        ):
            common += 1
        # The KV of the last token may be in flight when the request finishes (R141).
        limit = min(final, len(known) - 1, common, len(wanted) - 1)
        if saves == "prompt":
            limit = min(limit, len(prompt))
        limit = min(limit, max(0, len(known) - 1 - self.caps["skip_last"]))
        chunk = self.caps["chunk_tokens"] or prefix_match_unit or block_size
        declared = limit // chunk * chunk
        if chunk > 1 and prefix_match_unit is None:
            # Most connectors claim only whole blocks of the chunks that they have.
            declared = declared // block_size * block_size
        is_as_declared = context_parallel == 1 or self.splits
        if self.declared and not groups and layout is None and is_as_declared:
            return declared
        if not self.declared and found >= limit:
            return max(0, limit)
        whole = limit // block_size * block_size
        if not self.declared and found >= whole and self._only_whole_blocks(block_size):
            return whole
        # In the plain run, too, share only what was final: a connector that stores whole chunks
        # stores nothing of an incomplete one.
        shared = common if limit >= min(common, len(wanted) - 1) else limit
        plain = Plain(
            len(prompt),
            max(1, len(known) - len(prompt)),
            shared,
            len(wanted),
            crowd,
            groups,
            window,
            caching,
            room,
            layout,
            prefix_match_unit,
            context_parallel,
            pooling,
        )
        if limit <= 0:
            return 0
        # Of several groups, what comes back also depends on what each of them still holds. In a
        # layout that it does not know, a connector may store nothing.
        return min(declared if self.declared else limit, self.calibrate(plain, block_size))

    def _only_whole_blocks(self, block_size: int) -> bool:
        """Return whether plain runs bring back whole blocks only, where a block lacks one token.

        Smaller chunks than a block would reach further, and others show in one of two lengths.
        """
        found = [
            self.calibrate(Plain(tokens, 1, tokens, tokens), block_size)
            for tokens in (8 * block_size, 10 * block_size)
        ]
        return all(each and each % block_size == 0 for each in found)
