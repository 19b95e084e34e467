# SPDX-License-Identifier: Apache-2.0
"""Stops the engine where a real one would silently go wrong, and attributes errors."""

from __future__ import annotations

import sys
from typing import Any

from kvconform.engine.stand_ins import RemoteError
from kvconform.process.watchdog import HookTimeout
from kvconform.refimpl import faulty
from kvconform.refimpl.errors import EngineAssertion, IntegrityError


class EngineFault(AssertionError):
    """Raised where a real engine would silently compute wrong results.

    The cause is something that the connector made the engine believe.
    """


def check_starts(output: Any) -> None:
    """Raise EngineFault if a SchedulerOutput computes a request from a negative position.

    A connector whose lookup returns a negative number causes that.
    """
    cached = output.scheduled_cached_reqs
    starts = [(n.req_id, n.num_computed_tokens) for n in output.scheduled_new_reqs]
    starts += list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for req, start in starts:
        if start < 0:
            raise EngineFault(
                f"request {req} is to be computed from position {start}:"
                " the model would run on a negative position"
            )


_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "msgspec", "pydantic", "pydantic_core"}


def blame(error: BaseException) -> str:
    """Return the side that an error is attributed to, `engine` or `harness`.

    `engine`: vLLM's or the reference engine's own code refused to go on. `harness`: our code broke.
    """
    if isinstance(error, (EngineFault, HookTimeout, RemoteError)) or faulty.in_force():
        return "engine"
    culprit = ""
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "")
        # An error inside a library is attributed to the code that called the library.
        if module.partition(".")[0] not in _LIBRARIES:
            culprit = module
        frame = frame.tb_next
    # The reference engine refuses with these errors. Its other errors are bugs of ours.
    refused = isinstance(error, (EngineAssertion, IntegrityError))
    planted = culprit.startswith("kvconform.refimpl.defects.")  # stands for a connector's code
    ours = culprit.startswith("kvconform.") and not refused and not planted
    return "harness" if ours else "engine"
