# SPDX-License-Identifier: Apache-2.0
"""Faults of a connector's back end, as a scenario names them: data only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvconform.requirement import Model

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
    struck = {(e["phase"], e["number"]) for e in events if e["k"] == "live.fault"}
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
