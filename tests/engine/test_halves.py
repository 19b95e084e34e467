# SPDX-License-Identifier: Apache-2.0
"""Tests of what is recorded when the halves of a connector start and end."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

from kvconform.contract.trace import Trace
from kvconform.engine.halves import noted
from kvconform.process.watchdog import HookTimeout


@pytest.mark.parametrize(
    ("op", "error"),
    [("start", "HookTimeout: __init__ did not return within 1 s"), ("shutdown", None)],
)
def test_a_constructor_that_hangs_has_failed_and_a_shutdown_is_seen_as_a_hook(
    op: str, error: str | None
) -> None:
    trace = Trace()
    with pytest.raises(HookTimeout), noted(trace, op):
        raise HookTimeout("__init__" if op == "start" else op, 1.0)
    assert trace.events[-1]["error"] == error
