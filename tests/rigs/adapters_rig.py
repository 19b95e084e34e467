# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of adapters: judge a catalogue entry on one case, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.adapters import registry as adapters
from kvconform.config.settings import load
from kvconform.contract.loader import load_spec
from kvconform.errors import KvconformError
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.process.servers import Servers
from kvconform.run import smoke
from kvconform.run.case import run_and_judge

SPEC = load_spec()
PLAIN = "transfer.prompt[vllm-sync-v1-d1-b4]"
BAD = (Verdict.FAIL, Verdict.ERROR, Verdict.BLOCKED)


def judged(
    entry: str, name: str, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> CaseReport | KvconformError:
    """Return the report of judging a run, or the error with which the suite refuses to begin it.

    The entry's servers run meanwhile.
    """
    settings = load({"connector": f"catalogue:{entry}"}, start=Path("/"))
    with Servers(settings, tmp / "servers", tmp / "logs") as servers:
        settings = servers.settle(settings)
        for key, value in settings.env.items():
            monkeypatch.setenv(key, value)
        adapters.install(settings.adapters)
        variant = next(v for v in SPEC.cases[name.partition("[")[0]].variants() if v.id == name)
        try:
            return run_and_judge(variant, smoke.target_of(settings), SPEC, seed=0, tmp=tmp / "case")
        except KvconformError as refused:
            return refused


def noticed(found: CaseReport | KvconformError) -> set[str]:
    """Return the suite's objections to a run.

    These are requirements that count and failed, the harness's error, or its refusal.
    """
    if isinstance(found, KvconformError):
        return {found.message}
    bad = {r.requirement for r in found.rows if r.verdict in BAD and r.gating}
    return bad | ({found.harness_error} if found.harness_error else set())


def row(found: CaseReport | KvconformError, requirement: str) -> Row:
    """One requirement's row."""
    assert isinstance(found, CaseReport), found
    return next(r for r in found.rows if r.requirement == requirement)
