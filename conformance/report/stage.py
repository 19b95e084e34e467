# SPDX-License-Identifier: Apache-2.0
"""Stages of failures on the way of KV through a connector.

The engine passes something on, a lookup finds what cannot be there, a hook raises, a transfer is
reported, a save reads blocks, a load writes them, and in the end tokens differ. What failed at one
stage may explain the later ones.
"""

from __future__ import annotations

from enum import IntEnum

from kvconform.judge.foreign import TRUTH, UNHEARD
from kvconform.judge.records import Row


class Stage(IntEnum):
    """The place of a failure on the way of KV, from its causes to what shows them."""

    ENGINE = 0
    HIT = 1
    CALL = 2
    SAVE = 3
    LOAD = 4
    SAVE_UPON_LOAD = 5
    CACHE = 6
    ANNOUNCED = 7
    TOKENS = 8
    END = 9
    FORM = 10


AT_THE_END = ("case.expected", "engine.survives", "engine.acts-on-report", "engine.load-taken-up")
"""Guarantees that show what became of something that went wrong before."""
_STAGES: tuple[tuple[Stage, tuple[str, ...]], ...] = (
    (Stage.END, ("run.quiesces", "end.", *AT_THE_END)),
    (Stage.TOKENS, ("compose.", "multi.as-alone")),
    (Stage.TOKENS, ("live.tokens", "live.likelihood", "live.embedding")),
    (Stage.ANNOUNCED, ("events.", "save.completeness", "save.as-plain", "restart.keeps")),
    (Stage.ANNOUNCED, ("lookup.truth", "transfer.delivered")),
    (Stage.CACHE, ("cache.", "identity.")),
    (Stage.FORM, ("stats.", "handshake.", "finish.", "lookup.sources-", "ranks.engine-id")),
    (Stage.FORM, ("api.", "lifecycle.threads-end", "lifecycle.shutdown")),
    (Stage.SAVE_UPON_LOAD, ("save.sound",)),
    (Stage.SAVE, ("save.", "streams.save-after-write")),
    (Stage.LOAD, ("load.errors", "load.", "layout.", "groups.", "recv.not-before-bytes")),
    (Stage.LOAD, ("live.loaded-kv", "live.same-bytes")),
)
"""Beginnings of ids by stage; everything else is about calls, reports and plans."""


def stage(row: Row) -> Stage:
    """Return the stage of a failure."""
    if row.kind == "guarantee" and row.requirement not in AT_THE_END:
        return Stage.ENGINE
    if is_unheard(row):
        return Stage.HIT
    for found, names in _STAGES:
        if row.requirement.startswith(names):
            return found
    return Stage.CALL


def is_unheard(row: Row) -> bool:
    """Return whether a failure is a hit of a request of which nothing was computed in its run."""
    return row.requirement == TRUTH and UNHEARD in row.cause
