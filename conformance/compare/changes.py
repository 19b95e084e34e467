# SPDX-License-Identifier: Apache-2.0
"""What two reports say differently, by requirement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvconform.compare.reports import Report
from kvconform.report.causes import signature

SILENT = {"NOT_EXERCISED", "UNSUPPORTED", "UNOBSERVABLE", "DISABLED", "BLOCKED"}
KINDS = ("fails now", "fails otherwise", "holds now", "is expected to fail", "says nothing any more", "says something now", "other")
"""Kinds of change, the worst first."""


@dataclass
class Flip:
    """A change of one requirement: `kind` of KINDS, the runs, the verdicts there, and what the later report says."""

    requirement: str
    kind: str
    was: str
    now: str
    runs: list[str] = field(default_factory=list)
    message: str = ""
    counts: bool = True


@dataclass
class Comparison:
    """`old` against `new`. `only_old`, `only_new`: runs that the other has not."""

    old: Report
    new: Report
    settings: list[tuple[str, str, str]]
    flips: list[Flip]
    only_old: list[str]
    only_new: list[str]

    @property
    def worse(self) -> list[Flip]:
        """What fails now and did not, counting requirements only."""
        return [flip for flip in self.flips if flip.kind in KINDS[:2] and flip.counts]


def compare(old: Report, new: Report) -> Comparison:
    """Everything that differs. Runs that only one of them has are listed, and not compared."""
    runs_old, runs_new = ({run for _, run in report.verdicts} for report in (old, new))
    flips: dict[tuple[str, str, str, str], Flip] = {}
    for key, now in sorted(new.verdicts.items()):
        was = old.verdicts.get(key)
        if was is None or (was == now and (now != "FAIL" or _same(old.messages.get(key), new.messages.get(key)))):
            continue
        requirement, run = key
        kind = kind_of(was, now)
        counts = bool(new.gating.get(requirement)) and requirement not in new.guarantees
        flip = flips.setdefault((requirement, kind, was, now), Flip(requirement, kind, was, now, counts=counts))
        flip.runs.append(run)
        flip.message = flip.message or (new.messages if now == "FAIL" else old.messages).get(key, "")
    found = sorted(flips.values(), key=lambda flip: (not flip.counts, KINDS.index(flip.kind), flip.requirement))
    return Comparison(old, new, _settings(old, new), found, sorted(runs_old - runs_new), sorted(runs_new - runs_old))


def kind_of(was: str, now: str) -> str:
    """One of KINDS."""
    if now in ("FAIL", "ERROR"):
        return "fails otherwise" if was == now else "fails now"
    if now == "XFAIL":
        return "is expected to fail"
    if was in ("FAIL", "ERROR"):
        return "holds now" if now == "PASS" else "says nothing any more"
    if now in SILENT and was not in SILENT:
        return "says nothing any more"
    if was in SILENT and now not in SILENT:
        return "says something now"
    return "other"


def _same(old: str | None, new: str | None) -> bool:
    return signature(old) == signature(new)


def _settings(old: Report, new: Report) -> list[tuple[str, str, str]]:
    """What was judged, and with what, where it differs."""
    found = []
    for name in ("connector", "suite", "vllm", "engines", "scheduling", "device", "adapters", "seed", "profile"):
        was, now = getattr(old.header, name), getattr(new.header, name)
        if was != now:
            found.append((name, _text(was), _text(now)))
    names = sorted({*old.header.capabilities, *new.header.capabilities})
    for name in names:
        was, now = old.header.capabilities.get(name), new.header.capabilities.get(name)
        if was != now and None not in (was, now):  # an older suite knew fewer
            found.append((f"capability {name}", _text(was), _text(now)))
    return found


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
