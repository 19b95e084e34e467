# SPDX-License-Identifier: Apache-2.0
"""What two reports say differently, by requirement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvconform.report.causes import signature
from kvconform.report.compare.reports import Key, Report

SILENT = {"NOT_EXERCISED", "UNSUPPORTED", "UNOBSERVABLE", "DISABLED", "BLOCKED", "ERROR"}
KINDS = (
    "fails now",
    "fails otherwise",
    "is cut short",
    "holds unexpectedly",
    "is expected to fail",
    "has no answer",
    "holds now",
    "says nothing any more",
    "says something now",
    "other",
)
"""Kinds of change, the worst first."""
WORSE = KINDS[:4]
"""Those that make a connector nonconformant for a reason that was not there."""
ABSENT = "NOT_JUDGED"
"""What `Flip.was` says if the earlier report has nothing about it: another case, a newer requirement, or it was cut off."""


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
        """What counts against the connector now and did not, counting requirements only."""
        return [flip for flip in self.flips if flip.kind in WORSE and flip.counts]

    @property
    def added(self) -> set[Key]:
        """The requirements and runs of `worse`."""
        return {(flip.requirement, run) for flip in self.worse for run in flip.runs}


def compare(old: Report, new: Report) -> Comparison:
    """Everything that differs. Of what only one of them has, what is held against the connector in the later one is a change; the rest is
    listed by run, and not compared."""
    runs_old, runs_new = ({run for _, run in report.verdicts} for report in (old, new))
    flips: dict[tuple[str, str, str, str], Flip] = {}
    for key, now in sorted(new.verdicts.items()):
        was = old.verdicts.get(key, ABSENT)
        cut = now == "BLOCKED" and key in new.against and not (was == now and key in old.against)
        if (was == ABSENT and key not in new.against) or (
            was == now and not cut and (now != "FAIL" or _same(old, new, key))
        ):
            continue
        requirement, run = key
        kind = "is cut short" if cut else kind_of(was, now)
        flip = flips.setdefault(
            (requirement, kind, was, now),
            Flip(requirement, kind, was, now, counts=new.counts(requirement)),
        )
        flip.runs.append(run)
        flip.message = flip.message or (
            old if was == "FAIL" and now != "FAIL" else new
        ).messages.get(key, "")
    found = sorted(
        flips.values(), key=lambda flip: (not flip.counts, KINDS.index(flip.kind), flip.requirement)
    )
    return Comparison(
        old,
        new,
        _settings(old, new),
        found,
        sorted(runs_old - runs_new),
        sorted(runs_new - runs_old),
    )


def kind_of(was: str, now: str) -> str:
    """One of KINDS but for "is cut short", which depends on what blocks."""
    if now in _SAYS:
        return "fails otherwise" if was == now == "FAIL" else _SAYS[now]
    if was in ("FAIL", "XFAIL"):
        return "holds now" if now == "PASS" else "says nothing any more"
    if now in SILENT and was not in SILENT:
        return "says nothing any more"
    if was in SILENT and now not in SILENT:
        return "says something now"
    return "other"


_SAYS = {
    "FAIL": "fails now",
    "ERROR": "has no answer",
    "XPASS": "holds unexpectedly",
    "XFAIL": "is expected to fail",
}


def _same(old: Report, new: Report, key: Key) -> bool:
    one, other = (
        signature(report.messages.get(key), report.names.get(key)) for report in (old, new)
    )
    return one == other


def _release(version: str | None) -> str | None:
    """Without the local part: `0.32.0+cpu` is what nox calls the 0.32.0 that it installs a connector beside."""
    return version and version.partition("+")[0]


def _settings(old: Report, new: Report) -> list[tuple[str, str, str]]:
    """What was judged, and with what, where it differs."""
    found = []
    for name in (
        "connector",
        "suite",
        "vllm",
        "engines",
        "scheduling",
        "device",
        "adapters",
        "seed",
        "profile",
    ):
        was, now = getattr(old.header, name), getattr(new.header, name)
        if was != now and not (name == "vllm" and _release(was) == _release(now)):
            found.append((name, _text(was), _text(now)))
    names = sorted({*old.header.capabilities, *new.header.capabilities})
    for name in names:
        was, now = old.header.capabilities.get(name), new.header.capabilities.get(name)
        if was != now and None not in (was, now):  # an older suite knew fewer
            found.append((f"capability {name}", _text(was), _text(now)))
    return found


def _text(value: object) -> str:
    return (
        ", ".join(map(str, value))
        if isinstance(value, Iterable) and not isinstance(value, str)
        else str(value)
    )
