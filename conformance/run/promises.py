# SPDX-License-Identifier: Apache-2.0
"""What else went on around a request whose KV was to be kept: a connector that does its best may do less for it then.

The workloads that a connector's promises are learned from: one request, computed and asked for again, alone or in a crowd.

What a connector promises to bring back: declared, or learned from the plainest run there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvconform.contract.case import Case

MOST = 64
LONGEST = 256


@dataclass(frozen=True)
class Crowd:
    """Tokens of the requests that ran before the source, in steps of its own (`beside`) and after it; tokens of the loads that were under
    way when its content was looked up again (`loads`), and of that content what the engine's own cache had (`local`). `steps` are those
    that went by from the source's first one to the lookup: what a connector stored may have expired.
    """

    before: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    local: int = 0
    steps: int = 0

    @property
    def tokens(self) -> int:
        """All of them together, with one for each step that must go by."""
        return (
            sum(map(sum, (self.before, self.beside, self.after, self.loads)))
            + self.local
            + self.steps
        )


NOBODY = Crowd()


def crowd_of(
    events: Sequence[dict[str, Any]], source: tuple[str, int], lookup: dict[str, Any]
) -> Crowd:
    """The crowd of `source` (request id, generation) at a `lookup` event; at most MOST requests of each kind. Reads only."""
    asker = (lookup["req"], lookup["generation"])
    rows = [(_of(e), e) for e in events if e["kind"] == "req.scheduled" and _of(e) != asker]
    mine = [e for key, e in rows if key == source]
    steps = {(e.get("on"), e["step"]) for e in mine}
    lengths: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, int], int] = {}
    beside: set[tuple[str, int]] = set()
    for key, e in rows:
        lengths[key] = max(
            lengths.get(key, 0), min(e["computed"] + e["scheduled"], e["known"], LONGEST)
        )
        first.setdefault(key, e["seq"])
        if (e.get("on"), e["step"]) in steps:
            beside.add(key)
    start = mine[0]["seq"] if mine else 0
    alone = [key for key in lengths if key != source and key not in beside]
    return Crowd(
        before=tuple(lengths[key] for key in alone if first[key] < start)[-MOST:],
        beside=tuple(lengths[key] for key in lengths if key != source and key in beside)[-MOST:],
        after=tuple(lengths[key] for key in alone if first[key] > start)[-MOST:],
        loads=tuple(_loads(events, lookup))[-MOST:],
        local=lookup["local"],
        steps=min(max(0, lookup["step"] - mine[0]["step"]), LONGEST) if mine else 0,
    )


def _of(event: dict[str, Any]) -> tuple[str, int]:
    return event["req"], event["generation"]


def _loads(events: Sequence[dict[str, Any]], lookup: dict[str, Any]) -> list[int]:
    """Tokens of each load that was granted in the step of the lookup, or earlier and is not over."""
    pending: dict[tuple[str, int], int] = {}
    now = (lookup.get("on"), lookup["step"])
    for e in events:
        if (
            e["kind"] == "alloc"
            and e["external"] > 0
            and (e["is_async"] or (e.get("on"), e["step"]) == now)
        ):
            pending[_of(e)] = min(e["external"], LONGEST)
        elif e["kind"] == "transfer.reported" and e["direction"] == "recv":
            pending.pop(_of(e), None)
    return list(pending.values())


Steps = list[dict[str, Any]]
ROOM = 100
"""So many times as many blocks as are needed, and none of them is ever about to be evicted."""


@dataclass(frozen=True)
class Plain:
    """`prompt` + `outputs` tokens are computed, then a prompt of `wanted` tokens shares the first `common` of them. Nothing is cut into
    chunks, preempted or speculated on, in a crowd neither. `groups` are the KV cache groups, if there are several; `window` is theirs;
    `caching`: whether the engine has a prefix cache of its own; `room`: how many times as many blocks as are needed there are.
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


def plain_case(plain: Plain, block_size: int) -> Case:
    """The plainest round trip: compute a prompt (request `a`), drop the local cache, ask again (`b`)."""
    crowd = plain.crowd
    total = max(plain.prompt + plain.outputs, plain.wanted) + 8
    needed = (
        total
        + 3 * crowd.tokens
        + (plain.outputs + block_size) * (len(crowd.beside) + 2 * len(crowd.loads))
    )
    steps: Steps = []
    for number, tokens in enumerate((*crowd.before, *crowd.loads)):
        steps += [_add(f"p{number}", tokens, 1), {"run": {}}]
    steps += [
        _add(f"q{number}", tokens, plain.outputs) for number, tokens in enumerate(crowd.beside)
    ]
    steps += [_add("a", plain.prompt, plain.outputs), {"run": {}}]
    for number, tokens in enumerate(
        (*crowd.after, *crowd.beside)
    ):  # those beside it may have been saved later, too
        steps += [_add(f"r{number}", tokens, 1), {"run": {}}]
    if crowd.steps:
        steps += [_add("t", 1, crowd.steps), {"run": {}}]
    steps.append({"drop-local": {}})
    if crowd.local:
        steps += [
            _add("w", {"of": "a", "outputs": True, "tokens": crowd.local, "then": 0}, 1),
            {"run": {}},
        ]
    for number, tokens in enumerate(crowd.loads):
        steps.append(
            _add(
                f"s{number}",
                {"of": f"p{len(crowd.before) + number}", "tokens": tokens, "then": 1},
                1,
            )
        )
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
        "max_seqs": 8 + len(crowd.beside) + len(crowd.loads),
        "groups": list(plain.groups),
        "window": plain.window,
        "prefix_caching": plain.caching,
    }
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
    """Promised reloadable tokens. Declared capabilities give a formula; inferred ones are calibrated: a prompt that was chunked, preempted
    or speculated on must come back as far as the same number of tokens does when nothing of that happened. What comes back then may depend
    on the crowd, on what else there was to save and to load: who may decline a small load, or saves so much per step and no more, does.

    `calibrate(plain, block_size)` runs that plain workload and returns how many tokens came back.
    """

    def __init__(
        self, caps: dict[str, Any], declared: bool, calibrate: Callable[[Plain, int], int]
    ) -> None:
        self.caps, self.declared, self.calibrate = caps, declared, calibrate

    def promised(
        self,
        source: Any,
        prompt: list[int],
        request: Any,
        block_size: int,
        final: int | None,
        crowd: Crowd = NOBODY,
        groups: tuple[str, ...] = (),
        window: int = 8,
        caching: bool = True,
        room: int = 3,
    ) -> int:
        """Tokens of `request` that must be loadable or local, given that `source` computed `final` positions. Reads only.

        `groups`: several KV cache groups, with that `window`. What a connector does with one says nothing about several. `caching`: whether
        the engine has a prefix cache; a connector may want one. `room`: how many times as many blocks as are needed there are; a connector
        may save only what is about to be evicted.
        """
        saves = self.caps["saves"]
        if final is None or saves == "none" or not self.caps["store"]:
            return 0
        known, wanted = source.all_token_ids, request.all_token_ids
        common = 0
        while common < min(len(known), len(wanted)) and known[common] == wanted[common]:
            common += 1
        limit = min(
            final, len(known) - 1, common, len(wanted) - 1
        )  # the last token's KV may be in flight at the finish (R141)
        if saves == "prompt":
            limit = min(limit, len(prompt))
        if self.declared:
            chunk = max(1, int(self.caps["chunk_tokens"]))
            return limit // chunk * chunk
        # What was not final is not shared in the plain run either: a connector that keeps whole chunks has none of a chunk cut short.
        shared = common if limit >= min(common, len(wanted) - 1) else limit
        plain = Plain(
            len(prompt),
            len(known) - len(prompt),
            shared,
            len(wanted),
            crowd,
            groups,
            window,
            caching,
            room,
        )
        return min(limit, self.calibrate(plain, block_size)) if limit > 0 else 0
