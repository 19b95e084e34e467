# SPDX-License-Identifier: Apache-2.0
"""Tests of the list of events: it has no field that nothing reads."""

from __future__ import annotations

import re

from kvconform.contract.events import EVENTS
from kvconform.contract.loader import load_spec
from kvconform.report.timeline import _QUIET, _SPECIAL
from places import ROOT

READERS = ("judge", "report", "explore", "run", "session", "snapshots", "versions", "live")
"""Packages that read events."""


def test_every_field_is_read_by_a_requirement_a_timeline_or_code() -> None:
    """Timelines show all fields of a kind that they have no line of its own for."""
    by_requirements: dict[str, set[str]] = {kind: set() for kind in EVENTS}
    for req in load_spec().requirements.values():
        for expression in req.expressions.values():
            for base, field in expression.reads:
                for kind in ("run.start",) if base == "cfg" else req.kinds:
                    by_requirements[kind].add(field)
    code = "".join(
        file.read_text(encoding="utf-8")
        for package in READERS
        for file in (ROOT / "conformance" / package).rglob("*.py")
    )
    by_code = set(re.findall(r"[\"'](\w+)[\"']", code))
    counters = (ROOT / "conformance" / "observe" / "seen.py").read_text(encoding="utf-8")
    by_code |= set(re.findall(r"\be\[\"(\w+)\"\]", counters))  # compared with what was loaded
    unread = [
        f"{kind}.{field}"
        for kind, about in EVENTS.items()
        for field in about.fields
        if kind in _QUIET or kind in _SPECIAL
        if field not in by_requirements[kind] | by_code
    ]
    assert unread == []
