# SPDX-License-Identifier: Apache-2.0
"""The JSON documents of a case's snapshot.

`metadata`: what the scheduler's hooks got and returned. `stored`: the KV that comes back.
`hooks`: the order of all hooks. `answers`: what the other hooks returned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import safetensors.numpy

from kvconform.snapshots.value import Value, identity

if TYPE_CHECKING:
    from kvconform.snapshots.record import HookCall, Recording

KINDS = ("metadata", "stored", "hooks", "answers")
WIDTH = 120
METADATA = {
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "request_finished_all_groups",
    "get_block_ids_with_load_errors",
}
"""Hooks whose calls are in `metadata`. The types of what others return change with vLLM."""
NO_ERRORS = {"class": "set", "items": []}


class Call(TypedDict, total=False):
    """A call of a hook, or a report that transfers of `requests` have `finished`.

    `of`: the request that the call is about, if any. `given`: some of its arguments.
    """

    call: str
    of: str
    given: dict[str, Value]
    returned: Value
    raised: str
    finished: str
    requests: list[str]


class Step(TypedDict, total=False):
    """The steps `at[0]` to `at[1]`, which are equal: their calls, or the names of their hooks."""

    at: list[int]
    calls: list[Call]
    hooks: list[str]


class Stored(TypedDict):
    """What came back of a request: the first `came_back` of its tokens.

    `blocks`: the fields of kvconform.snapshots.readback.Block.
    """

    tokens: int
    came_back: int
    blocks: list[dict[str, Any]]


class Run(TypedDict, total=False):
    """One run of a case. `ended`: crash or stall. `unread`: why nothing was read back."""

    ended: str
    unread: str
    steps: list[Step]
    requests: dict[str, Stored]


class Document(TypedDict):
    """One file: all runs of a case, by name."""

    case: str
    kind: str
    runs: dict[str, Run]


def document(kind: str, case: str, recordings: Sequence[Recording]) -> Document:
    """Return the document of one kind. kvconform.snapshots.tensors has the bytes of stored KV."""
    return {
        "case": case,
        "kind": kind,
        "runs": {recording.cell: run_of(kind, recording) for recording in recordings},
    }


def run_of(kind: str, recording: Recording) -> Run:
    """Return one run of a document."""
    run: Run = {}
    if recording.ended is not None:
        run["ended"] = recording.ended
    if kind != "stored":
        run["steps"] = _steps(kind, recording.calls)
    elif recording.unread is not None:
        run["unread"] = recording.unread
    else:
        run["requests"] = {
            item.req: {
                "tokens": item.tokens,
                "came_back": item.end,
                "blocks": [vars(block) for block in item.blocks],
            }
            for item in recording.stored
        }
    return run


def _steps(kind: str, calls: Iterable[HookCall]) -> list[Step]:
    """Return the steps in which something happens; equal steps in a row are one entry."""
    found: list[Step] = []
    for number, group in groupby(calls, key=lambda call: call.step):
        step: Step = {"at": [number, number]}
        if kind == "hooks":
            step["hooks"] = [call.hook for call in group]
        else:
            step["calls"] = [
                entry for call in group if _kind(call) == kind for entry in _entries(call)
            ]
            if not step["calls"]:
                continue
        if found and found[-1]["at"][1] == number - 1:
            first = found[-1]["at"][0]
            if identity({**step, "at": [first, number - 1]}) == identity(found[-1]):
                found[-1]["at"] = [first, number]
                continue
        found.append(step)
    return found


def _kind(call: HookCall) -> str | None:
    """Return the document that shows a call; None if it is only part of `hooks`."""
    if call.hook in METADATA or call.completed is not None:
        return "metadata"
    return None if call.returned is None and call.raised is None else "answers"


def _entries(call: HookCall) -> list[Call]:
    if call.completed is not None:
        return [{"finished": name, "requests": ids} for name, ids in call.completed.items() if ids]
    if call.hook == "get_block_ids_with_load_errors" and call.returned == NO_ERRORS:
        return []
    entry: Call = {"call": call.hook}
    if call.of:
        entry["of"] = call.of
    if call.given:
        entry["given"] = call.given
    if call.returned is not None:
        entry["returned"] = call.returned
    if call.raised is not None:
        entry["raised"] = call.raised
    return [entry]


def dumps(found: Document) -> bytes:
    """Return the file of a document: sorted keys, one line for whatever fits into WIDTH columns."""
    return (_written(found, 0, 0) + "\n").encode()


def _written(value: Any, depth: int, used: int) -> str:
    """Return a JSON value as text. `used`: columns of its first line before it."""
    line = json.dumps(value, sort_keys=True)
    if used + len(line) < WIDTH or not isinstance(value, (dict, list)):
        return line
    margin = " " * (depth + 1)
    if isinstance(value, dict):
        rows = [(f"{margin}{json.dumps(key)}: ", value[key]) for key in sorted(value)]
    else:
        rows = [(margin, item) for item in value]
    body = ",\n".join(start + _written(item, depth + 1, len(start)) for start, item in rows)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{body}\n{' ' * depth}{last}"


def tensors(recordings: Sequence[Recording]) -> bytes:
    """Return the safetensors file: `run/request/layer` -> [tokens, heads, 2 * head_dim].

    The elements are uint8 where all values of the tensor are whole numbers up to 255, else float32.
    """
    found: dict[str, np.ndarray] = {}
    for recording in recordings:
        for item in recording.stored:
            found |= {
                f"{recording.cell}/{item.req}/layer.{layer}": rows
                for layer, rows in sorted(item.rows.items())
            }
    return safetensors.numpy.save(dict(sorted(found.items())))
