# SPDX-License-Identifier: Apache-2.0
"""Who is to blame, at the edges: what came before the engine lost track, and causes that are prohibitions."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_verdict import END, FakeRun, lookup, requirement, trace, verdicts

from kvconform.judge.verdict import Verdict

LOST = (
    {"kind": "transfer.failed", "req": "a", "is_async": False, "blocks": [5]},
    {
        "kind": "req.state",
        "req": "a",
        "reason": "rollback",
        "computed": 0,
        "placeholders": 2,
        "known": 13,
    },
)


def test_what_came_before_the_engine_lost_track_is_still_judged() -> None:
    before = verdicts([requirement("a.b")], lookup(False), *LOST, lookup(False))["a.b"]
    assert (before.verdict, before.event) == (Verdict.FAIL, 1)
    after = verdicts([requirement("a.b")], lookup(), *LOST, lookup(False))["a.b"]
    assert after.verdict is Verdict.UNSUPPORTED
    assert "lost count of request a" in (after.message or "")


def test_a_comparison_with_a_run_that_lost_track_is_not_judged() -> None:
    relate = {"runs": ["connector", "no-connector"], "event": "sample", "project": "e.token"}
    req = requirement("compose.null-effect", relate=relate)
    other = FakeRun(trace({"kind": "sample", "req": "b", "generation": 0, "index": 0, "token": 5}))
    sample = {"kind": "sample", "req": "b", "generation": 0, "index": 0, "token": 6}
    assert verdicts([req], sample, runs={"no-connector": other})[req.id].verdict is Verdict.FAIL
    assert (
        verdicts([req], sample, *LOST, runs={"no-connector": other})[req.id].verdict
        is Verdict.UNSUPPORTED
    )


def test_a_broken_prohibition_explains_consequences_too() -> None:
    cause = requirement("a.cause", level="MUST NOT", text="It MUST NOT be.")
    effect = requirement("a.effect", event="run.end", always="e.free_blocks", consequence=True)
    found = verdicts([effect, cause], lookup(False), {**END, "free_blocks": 0})
    assert found["a.cause"].verdict is Verdict.FAIL
    assert (found["a.effect"].verdict, found["a.effect"].blocked_by) == (Verdict.BLOCKED, "a.cause")
