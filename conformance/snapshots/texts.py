# SPDX-License-Identifier: Apache-2.0
"""The texts of snapshots: per case one of the metadata, one of the order of hooks, one that is the index of the stored KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy

if TYPE_CHECKING:
    from kvconform.snapshots.record import HookCall, Recording

KINDS = ("metadata", "stored", "hooks", "answers")
FORMAT = "kvconform snapshot 1"
ASKED = {
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "request_finished_all_groups",
    "get_block_ids_with_load_errors",
}
"""Whose answers are the metadata; those of other hooks, whose types vLLM changes with most releases, are `answers`."""
COMPLETIONS = ("get_finished", "get_transfer_results")
"""One of these is asked, depending on the release; what they answer is the same."""


def render(kind: str, case: str, recordings: Sequence[Recording]) -> bytes:
    """One file of a case: its runs one after the other. `stored` has a second file, see `tensors`."""
    body = {"metadata": _metadata, "hooks": _hooks, "stored": _stored, "answers": _answers}[kind]
    out = [f"{FORMAT}: {kind} of {case}"]
    for recording in recordings:
        out += [
            "",
            f"== {recording.cell}",
            *([f"ended by: {recording.ended}"] if recording.ended else []),
            *body(recording),
        ]
    return ("\n".join(out) + "\n").encode()


def tensors(recordings: Sequence[Recording]) -> bytes:
    """The safetensors file: `cell/request/layer` -> [tokens, heads, 2 * head_dim], uint8 where all values are whole, else float32."""
    found: dict[str, np.ndarray] = {}
    for recording in recordings:
        for item in recording.stored:
            found |= {
                f"{recording.cell}/{item.req}/layer.{layer}": rows
                for layer, rows in sorted(item.rows.items())
            }
    return safetensors.numpy.save(dict(sorted(found.items())))


def _metadata(recording: Recording) -> list[str]:
    return _steps(c for c in recording.calls if c.hook in ASKED or c.hook in COMPLETIONS)


def _answers(recording: Recording) -> list[str]:
    return _steps(
        c for c in recording.calls if c.answer and c.hook not in ASKED and c.hook not in COMPLETIONS
    )


def _steps(calls: Iterable[HookCall]) -> list[str]:
    steps = [
        (step, [line for call in group for line in _call(call)])
        for step, group in groupby(calls, key=lambda c: c.step)
    ]
    return [
        line
        for title, body in _runs(steps)
        if body
        for line in (title, *(f"  {text}" for text in body))
    ]


def _call(call: HookCall) -> list[str]:
    if call.hook in COMPLETIONS:
        return [f"finished {name}: {', '.join(ids)}" for name, ids in call.completed.items() if ids]
    if call.hook == "get_block_ids_with_load_errors" and call.answer == ["answer: set[]"]:
        return []
    return [f"{call.hook}({call.of})", *(f"  {line}" for line in (*call.arguments, *call.answer))]


def _hooks(recording: Recording) -> list[str]:
    """The order of calls."""
    orders = groupby(recording.calls, key=lambda c: c.step)
    return [
        f"{title}: {body[0]}"
        for title, body in _runs(
            [(step, [", ".join(call.hook for call in calls)]) for step, calls in orders]
        )
    ]


def _runs(steps: Sequence[tuple[int, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """(title, body): steps one after the other that say the same become one."""
    for (_, body), group in groupby(
        enumerate(steps), key=lambda item: (item[1][0] - item[0], item[1][1])
    ):
        run = [step for _, (step, _) in group]
        yield (f"step {run[0]}" if len(run) == 1 else f"steps {run[0]} to {run[-1]}"), body


def _stored(recording: Recording) -> list[str]:
    if recording.unread is not None:
        return [f"nothing was read back: {recording.unread}"]
    out: list[str] = []
    for item in recording.stored:
        out += [f"request {item.req}", f"  came back: {item.end} of {item.tokens} tokens"]
        out += [
            f"  block {b.index}, layer {b.layer}: {b.digest} [{b.start}, {b.end}) {b.holds}"
            for b in item.blocks
        ]
    return out
