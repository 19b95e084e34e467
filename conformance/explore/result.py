# SPDX-License-Identifier: Apache-2.0
"""The result of a campaign on the terminal: what was reached, what was not, and every failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from kvconform.contract.loader import explained, load_spec
from kvconform.contract.requirement import Requirement
from kvconform.explore.campaign import Campaign, Found
from kvconform.explore.outcome import judgeable, never
from kvconform.report.layout import INDENT, paragraph, wrapped
from kvconform.words import many

SITUATIONS = (
    "hit",
    "load",
    "preemption",
    "rejected draft",
    "abort",
    "abort in flight",
    "abort during a load",
    "blocks held",
    "id taken again",
)
"""Situations whose share is printed, by their names in `outcome.reached`."""
SHOWN = 5
"""Errors of the harness that are printed."""


def pace(campaign: Campaign) -> str:
    """Return how many workloads a campaign has run per second, or per minute if they are few."""
    speed = campaign.runs / max(campaign.seconds, 1e-9)
    return f"{speed:.0f} per second" if speed >= 1 else f"{60 * speed:.0f} per minute"


def announce(console: Console, found: Found) -> None:
    """Print a failure when it is found, before it is shrunk."""
    risk = "risk: " if found.failure.risk else ""
    said = f"{risk}{found.failure.requirement}: {found.failure.message}"
    paragraph(console, "failure", f"{said} (not shrunk yet: {found.path})")


def show(console: Console, campaign: Campaign, deaths: int, *, verbose: bool) -> None:
    """Print the result. `deaths`: of worker processes. `verbose`: name every gap."""
    console.print()
    if campaign.judged:
        _reached(console, campaign, verbose=verbose)
    _engine(console, campaign)
    if deaths:
        paragraph(console, "processes", f"{deaths} ended and were replaced")
    for workload, error in campaign.errors[:SHOWN]:
        paragraph(console, "harness", f"{workload.data['id']}: {error}")
    for found in campaign.by_frequency():
        _failure(console, found)
    console.print()
    counts = f"{many(campaign.runs, 'workload')} in {campaign.seconds:.0f} s ({pace(campaign)})"
    if not campaign.runs:
        counts = many(0, "workload")
    for line in wrapped(f"{counts}: {verdict(campaign)}", console.width):
        console.print(Text(line), soft_wrap=True)


def verdict(campaign: Campaign) -> str:
    """Return the result of a campaign in a sentence without its end."""
    risks = sum(found.failure.risk for found in campaign.found.values())
    failures = len(campaign.found) - risks
    parts = [many(failures, "failure")] if failures else []
    if not campaign.judged and not campaign.found:
        parts = ["nothing was judged"]
        if campaign.unsupported:
            parts.append(f"{campaign.unsupported} need what the connector does not declare")
    elif not failures:
        parts = ["nothing failed"]
    if risks:
        parts.append(f"{many(risks, 'risk')} (situations that vLLM does not bring about)")
    if unshrunk := sum(not found.shrunk for found in campaign.found.values()):
        parts.append(f"{unshrunk} not shrunk to the end")
    if campaign.errors:
        parts.append(f"{many(len(campaign.errors), 'error')} of the harness")
    return ", ".join(parts)


def gaps(requirements: Sequence[Requirement], unseen: Iterable[str]) -> dict[str, list[str]]:
    """Return the unseen requirements by area, the areas in alphabetical order."""
    areas = {each.id: each.area for each in requirements}
    found: dict[str, list[str]] = defaultdict(list)
    for name in unseen:
        found[areas[name]].append(name)
    return dict(sorted(found.items()))


def gap_lines(unseen: Mapping[str, Sequence[str]], width: int, *, verbose: bool) -> list[str]:
    """Return lines with the unseen requirements of each area: numbers, or with `verbose` ids."""
    if not verbose:
        return _lines([f"{area} {len(names)}" for area, names in unseen.items()], width)
    longest = max(map(len, unseen), default=0)
    found: list[str] = []
    for area, names in unseen.items():
        found += wrapped(", ".join(names), width, f"{area:<{longest}}  ", " " * (longest + 2))
    return found


def _lines(items: Sequence[str], width: int) -> list[str]:
    """Return lines of items with commas between them; no line ends within an item."""
    lines = [""]
    for number, item in enumerate(items):
        comma = "," if number + 1 < len(items) else ""
        if lines[-1] and len(lines[-1]) + len(item) + len(comma) + 1 > width:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item}{comma}"
    return lines


def _reached(console: Console, campaign: Campaign, *, verbose: bool) -> None:
    """Print which situations, pairs and requirements came up, and which did not."""
    ran = max(1, campaign.runs - campaign.unsupported)
    shares = [f"{name} {100 * campaign.reached[name] // ran}%" for name in SITUATIONS]
    room = console.width - INDENT
    for number, line in enumerate(_lines(shares, room)):
        name = "" if number else "reached"
        console.print(Text.assemble((f"{name:<{INDENT}}", "dim"), line), soft_wrap=True)
    requirements = list(load_spec().requirements.values())
    asked = judgeable(requirements, campaign.capabilities)
    unseen = never(asked, campaign.corpus.pairs)
    paragraph(
        console,
        "coverage",
        f"{len(campaign.corpus.pairs)} pairs, {campaign.new} of them new;"
        f" {len(campaign.corpus.seeds)} workloads in the corpus{_shared(campaign)}",
    )
    if not unseen:
        return
    hint = "" if verbose else " (-v names them)"
    text = f"{len(unseen)} of {many(len(asked), 'requirement')} were never exercised{hint}:"
    paragraph(console, "gaps", text)
    for line in gap_lines(gaps(requirements, unseen), room, verbose=verbose):
        console.print(Text(" " * INDENT + line), soft_wrap=True)


def _shared(campaign: Campaign) -> str:
    """Return what is to be said about the database of the corpus."""
    corpus = campaign.corpus
    count = corpus.received
    received = f"; other campaigns added {many(count, 'workload')} meanwhile" if count else ""
    lost = f"; some of this campaign are NOT SAVED: {corpus.lost}" if corpus.lost else ""
    return received + lost


def _engine(console: Console, campaign: Campaign) -> None:
    """Print the guarantees of the engine that were broken."""
    known = explained(load_spec())
    for name, count in campaign.guarantees.most_common():
        why = "NOT KNOWN: a fault of the engine or of this suite"
        bugs = " or ".join(bug.id for bug in known.get(name, []))
        if bugs:
            why = f"known: {bugs}, docs/engine-findings.md"
        unknown = campaign.unknown.get(name)
        if unknown is not None and bugs:
            why = f"{unknown.count} of them NOT KNOWN: without the mark of {bugs}"
        paragraph(
            console,
            "vLLM",
            f"guarantee {name} was broken in {many(count, 'workload')} ({why});"
            " not the connector's fault",
        )
        if unknown is not None and unknown.path is not None:
            paragraph(console, "case", str(unknown.path))


def _failure(console: Console, found: Found) -> None:
    """Print a failure with all that was found, and the case that shows it."""
    failure = found.failure
    risk = "risk: " if failure.risk else ""
    console.print()
    title = f"{failure.requirement}  {risk}in {many(found.count, 'workload')}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    paragraph(console, "found", failure.message)
    requests, steps, *_ = found.workload.size
    paragraph(console, "case", f"{found.path}")
    state = "" if found.shrunk else ", not shrunk to the end"
    paragraph(console, "", f"{many(requests, 'request')}, {many(steps, 'step')}{state}")
