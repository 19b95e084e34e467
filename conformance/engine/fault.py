# SPDX-License-Identifier: Apache-2.0
"""Where a real engine would go on silently and wrongly, ours stops."""

from __future__ import annotations

import sys
from typing import Any

from kvconform.engine.stand_ins import RemoteError
from kvconform.process.watchdog import HookTimeout
from kvconform.refimpl import faulty
from kvconform.refimpl.errors import EngineAssertion, IntegrityError


class EngineFault(AssertionError):
    """The engine cannot go on because of what the connector made it believe."""


def check_starts(output: Any) -> None:
    """EngineFault if a SchedulerOutput computes a request from a negative position (after a negative lookup answer)."""
    cached = output.scheduled_cached_reqs
    starts = [(n.req_id, n.num_computed_tokens) for n in output.scheduled_new_reqs]
    starts += list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for req, start in starts:
        if start < 0:
            raise EngineFault(
                f"request {req} is to be computed from position {start}: the model would run on a negative position"
            )


_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "msgspec", "pydantic", "pydantic_core"}


def _blame(error: BaseException) -> str:
    """`engine` if vLLM's or the reference engine's own code refused to go on, `harness` if ours broke."""
    if isinstance(error, (EngineFault, HookTimeout, RemoteError)) or faulty.in_force():
        return "engine"
    culprit, frame = "", error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "")
        if (
            module.partition(".")[0] not in _LIBRARIES
        ):  # an error inside a library is the fault of whoever called it
            culprit = module
        frame = frame.tb_next
    refused = isinstance(
        error, (EngineAssertion, IntegrityError)
    )  # the reference engine refuses; its other errors are faults of ours
    bad_on_purpose = culprit.startswith(
        "kvconform.refimpl.defects."
    )  # what comes from there is a connector's
    return (
        "harness"
        if culprit.startswith("kvconform.") and not refused and not bad_on_purpose
        else "engine"
    )
