# SPDX-License-Identifier: Apache-2.0
"""Tests that a run that breaks off is never taken for one that was judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.judge.verdict import Verdict
from kvconform.run.case import run_and_judge

SPEC = load_spec()


def test_a_crash_that_breaks_no_requirement_is_the_harness_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found with a real connector: vLLM raised while the engine was built, and all was PASS."""
    import vllm.v1.attention.selector as theirs

    # Code of vLLM, as far as the harness can see.
    code = "def raises(**named): raise AssertionError('Duplicate torch object')"
    names: dict[str, Any] = {"__name__": theirs.__name__}
    exec(compile(code, theirs.__file__, "exec"), names)
    monkeypatch.setattr(theirs, "get_attn_backend", names["raises"])
    variant = SPEC.cases["layout.kernel-blocks"].variants(["vllm"], ["sync"])[0]
    target = Target(REFERENCE, {"store": "{tmp}"})
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    assert report.harness_error is not None
    assert "Duplicate torch object" in report.harness_error
    assert {row.verdict for row in report.rows} == {Verdict.ERROR}  # and so there is no verdict
