# SPDX-License-Identifier: Apache-2.0
"""Comparison of two reports: what changed, by requirement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources

from markupsafe import Markup

from kvconform.judge.records import Verdict
from kvconform.report import pages
from kvconform.report.html.page import stylesheet
from kvconform.report.jsonl import Key, Report

COMPARED = (
    "connector",
    "suite",
    "vllm",
    "engines",
    "scheduling",
    "device",
    "adapters",
    "seed",
    "profile",
)
"""Fields of the header that are compared."""

SILENT = {"NOT_EXERCISED", "UNSUPPORTED", "UNOBSERVABLE", "DISABLED", "BLOCKED", "ERROR"}
"""Verdicts that say nothing about the connector."""
SHOWN = 6
"""Number of runs of a change that are named."""
KINDS = (
    "fails now",
    "fails differently",
    "is cut short",
    "holds unexpectedly",
    "is expected to fail",
    "has no verdict",
    "holds now",
    "is no longer judged",
    "is judged now",
    "other",
)
"""Kinds of change, the worst first."""
WORSE = KINDS[:4]
"""Kinds of change that make a connector nonconformant for a new reason."""
ABSENT = "NOT_JUDGED"
"""Value of `Flip.was` if the earlier report has no verdict.

The run or the requirement is new, or the earlier report was cut off.
"""


@dataclass
class Flip:
    """A change of one requirement, and the runs in which it occurred.

    `kind` is one of KINDS; `was` and `now` are verdicts. `message` is the failure's, of the report
    in which it failed. `counts`: whether the requirement counts against the connector.
    """

    requirement: str
    kind: str
    was: str
    now: str
    runs: list[str] = field(default_factory=list)
    message: str = ""
    counts: bool = True


@dataclass
class Comparison:
    """The differences between `old` and `new`.

    `settings`: (name, old value, new value). `only_old`, `only_new`: runs that occur in one report
    only.
    """

    old: Report
    new: Report
    settings: list[tuple[str, str, str]]
    flips: list[Flip]
    only_old: list[str]
    only_new: list[str]

    @property
    def worse(self) -> list[Flip]:
        """The flips that count against the connector, of requirements that count."""
        return [flip for flip in self.flips if flip.kind in WORSE and flip.counts]

    @property
    def added(self) -> set[Key]:
        """The requirements and runs of `worse`."""
        return {(flip.requirement, run) for flip in self.worse for run in flip.runs}


def compare(old: Report, new: Report) -> Comparison:
    """Return the differences between two reports.

    A verdict that only the later report has is a change if it counts against the connector.
    Otherwise runs that occur in one report only are listed, and not compared.
    """
    runs_old = {run for _, run in old.rows}
    runs_new = {run for _, run in new.rows}
    flips: dict[tuple[str, str, str, str, bool], Flip] = {}
    for key, row in sorted(new.rows.items()):
        before = old.rows.get(key)
        kind = _change(old, new, key)
        if kind is None:
            continue
        was = before.verdict.value if before is not None else ABSENT
        now = row.verdict.value
        requirement, run = key
        counts = new.counts(requirement) and not row.risk
        flip = flips.setdefault(
            (requirement, kind, was, now, counts),
            Flip(requirement, kind, was, now, counts=counts),
        )
        flip.runs.append(run)
        failed_before = before is not None and was == "FAIL" and now != "FAIL"
        source = before if before is not None and failed_before else row
        flip.message = flip.message or source.message or ""
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


def _change(old: Report, new: Report, key: Key) -> str | None:
    """Return the kind of change of one verdict of `new`, or None if there is no change."""
    before = old.rows.get(key)
    row = new.rows[key]
    if before is None:
        if key not in new.against:
            return None
        return "is cut short" if row.verdict is Verdict.BLOCKED else kind_of(ABSENT, row.verdict)
    unchanged = before.verdict is row.verdict
    cut_short = row.verdict is Verdict.BLOCKED and key in new.against
    if cut_short and not (unchanged and key in old.against):
        return "is cut short"
    if unchanged and (row.verdict is not Verdict.FAIL or before.cause == row.cause):
        return None
    return kind_of(before.verdict, row.verdict)


def kind_of(was: str, now: str) -> str:
    """Return the kind of change between two verdicts.

    It is never "is cut short", because that depends on what blocks the requirement.
    """
    if now in _SAYS:
        return "fails differently" if was == now == "FAIL" else _SAYS[now]
    if was in ("FAIL", "XFAIL"):
        return "holds now" if now == "PASS" else "is no longer judged"
    if now in SILENT and was not in SILENT:
        return "is no longer judged"
    if was in SILENT and now not in SILENT:
        return "is judged now"
    return "other"


_SAYS = {
    "FAIL": "fails now",
    "ERROR": "has no verdict",
    "XPASS": "holds unexpectedly",
    "XFAIL": "is expected to fail",
}


def _release(version: str | None) -> str | None:
    """Return a version without its local part.

    nox installs a connector together with `0.32.0+cpu`, which is the same release as `0.32.0`.
    """
    return version and version.partition("+")[0]


def _settings(old: Report, new: Report) -> list[tuple[str, str, str]]:
    """Return (name, old value, new value) of the settings and capabilities that differ."""
    found = []
    for name in COMPARED:
        was = getattr(old.header, name)
        now = getattr(new.header, name)
        if name == "vllm" and _release(was) == _release(now):
            continue
        if was != now:
            found.append((name, _text(was), _text(now)))
    for name in sorted({*old.header.capabilities, *new.header.capabilities}):
        was = old.header.capabilities.get(name)
        now = new.header.capabilities.get(name)
        # A capability may be missing from the report of an older suite.
        if was is not None and now is not None and was != now:
            found.append((f"capability {name}", _text(was), _text(now)))
    return found


def _text(value: object) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as Markdown, for a pull request's comment or a job's summary."""
    return _page("compare.md.j2", comparisons)


def html(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as one self-contained HTML page."""
    return _page("compare.html.j2", comparisons)


def _page(name: str, comparisons: Sequence[Comparison]) -> str:
    filters = {
        "plain": pages.plain,
        "code": pages.code,
        "low": lambda text: text.lower().replace("_", " "),
    }
    assets = resources.files("kvconform.report.compare") / "assets"
    css = Markup(stylesheet())
    return pages.render(assets, name, filters, comparisons=comparisons, shown=SHOWN, css=css)
