# SPDX-License-Identifier: Apache-2.0
"""The workloads that a connector's promises are learned from: one request, computed and asked for again, alone or in a crowd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvconform.case import Case
from kvconform.crowd import LONGEST, NOBODY, Crowd

Steps = list[dict[str, Any]]
ROOM = 100
"""So many times as many blocks as are needed, and none of them is ever about to be evicted."""


@dataclass(frozen=True)
class Plain:
    """`prompt` + `outputs` tokens are computed, then a prompt of `wanted` tokens shares the first `common` of them. Nothing is cut into
    chunks, preempted or speculated on, in a crowd neither. `groups` are the KV cache groups, if there are several; `window` is theirs;
    `caching`: whether the engine has a prefix cache of its own; `room`: how many times as many blocks as are needed there are."""

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
    needed = total + 3 * crowd.tokens + (plain.outputs + block_size) * (len(crowd.beside) + 2 * len(crowd.loads))
    steps: Steps = []
    for number, tokens in enumerate((*crowd.before, *crowd.loads)):
        steps += [_add(f"p{number}", tokens, 1), {"run": {}}]
    steps += [_add(f"q{number}", tokens, plain.outputs) for number, tokens in enumerate(crowd.beside)]
    steps += [_add("a", plain.prompt, plain.outputs), {"run": {}}]
    for number, tokens in enumerate((*crowd.after, *crowd.beside)):  # those beside it may have been saved later, too
        steps += [_add(f"r{number}", tokens, 1), {"run": {}}]
    if crowd.steps:
        steps += [_add("t", 1, crowd.steps), {"run": {}}]
    steps.append({"drop-local": {}})
    if crowd.local:
        steps += [_add("w", {"of": "a", "outputs": True, "tokens": crowd.local, "then": 0}, 1), {"run": {}}]
    for number, tokens in enumerate(crowd.loads):
        steps.append(_add(f"s{number}", {"of": f"p{len(crowd.before) + number}", "tokens": tokens, "then": 1}, 1))
    again = {"of": "a", "outputs": True, "tokens": plain.common, "then": plain.wanted - plain.common}
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
    case = {"id": "internal.calibration", "area": "internal", "text": text, "config": config, "engines": engines, "steps": steps}
    return Case.model_validate(case, strict=False)


def _add(req: str, prompt: Any, outputs: int) -> dict[str, Any]:
    return {"add": {"req": req, "prompt": prompt, "max_tokens": outputs}}
