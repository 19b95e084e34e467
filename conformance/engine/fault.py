# SPDX-License-Identifier: Apache-2.0
"""Stops the engine where a real one would silently go wrong, and attributes errors."""

from __future__ import annotations

import ast
import linecache
import sys
from types import TracebackType
from typing import Any

from kvconform.compat.vllm_api import KVConnectorBase_V1
from kvconform.engine.stand_ins import RemoteError
from kvconform.process.watchdog import HookTimeout
from kvconform.refimpl import faulty
from kvconform.refimpl.cache.backend import MissingPackage
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

    `engine`: vLLM's or the reference engine's own code refused to go on, or a connector lacks a
    package. `harness`: our code broke.
    """
    reported = (EngineFault, HookTimeout, RemoteError, MissingPackage)
    if isinstance(error, reported) or faulty.in_force():
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


_REFUSES = (NotImplementedError, ValueError, RuntimeError, AssertionError)
_NOT_THE_CONNECTOR = ("kvconform.", "vllm.")
_CONNECTORS = (
    "kvconform.refimpl.",
    "vllm.distributed.kv_transfer.kv_connector.v1.",
    "vllm.v1.kv_offload.",
    "vllm.v1.simple_kv_offload.",
)
"""Packages below those that hold connectors."""


def refusal(error: BaseException) -> str | None:
    """Return the sentence with which a connector's own code refuses to start, or None.

    A refusal is raised on purpose, by a `raise` or `assert` statement, and has words; an error that
    a call or an operation raises is a bug.
    """
    sentence = " ".join(str(error).split())
    at = _raised_at(error)
    of_its_own = type(error).__module__ != "builtins"
    if at is None or not (of_its_own or isinstance(error, _REFUSES)) or len(sentence.split()) < 3:
        return None
    return sentence if _is_connectors(at) and _on_purpose(at) else None


def is_connectors(error: BaseException) -> bool:
    """Return whether the connector's own code raised an error."""
    at = _raised_at(error)
    return at is not None and _is_connectors(at)


def within_a_connector(error: BaseException) -> bool:
    """Return whether an error came through a method of a connector."""
    at = error.__traceback__
    while at is not None:
        if isinstance(at.tb_frame.f_locals.get("self"), KVConnectorBase_V1):
            return True
        at = at.tb_next
    return False


def _raised_at(error: BaseException) -> TracebackType | None:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at


def _is_connectors(at: TracebackType) -> bool:
    module = at.tb_frame.f_globals.get("__name__", "")
    if module.startswith(_NOT_THE_CONNECTOR) and not module.startswith(_CONNECTORS):
        return False
    return module.partition(".")[0] not in _LIBRARIES


def _on_purpose(at: TracebackType) -> bool:
    """Return whether a `raise` or `assert` statement of that frame is being executed."""
    lines = linecache.getlines(at.tb_frame.f_code.co_filename, at.tb_frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return False
    return any(
        isinstance(node, (ast.Raise, ast.Assert))
        and node.lineno <= at.tb_lineno <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree)
    )
