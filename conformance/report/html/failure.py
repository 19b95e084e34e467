# SPDX-License-Identifier: Apache-2.0
"""Failures as report.html shows them: each root cause with its consequences and all details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconform.judge.records import Row
from kvconform.report.causes import (
    PROCESS_RULE,
    beyond,
    caveat,
    headline,
    other_runs,
    reproduction,
    usual_causes,
)
from kvconform.report.collector import Collector
from kvconform.report.html.anchor import Anchor, anchors
from kvconform.report.roots import Weight, roots
from kvconform.report.timeline import fit

VLLM = "https://github.com/vllm-project/vllm/blob"
OTHERS = 12
"""Number of further runs of a failure that are named."""


@dataclass(frozen=True)
class Failure:
    """A cause of failure.

    - `anchor`: id of its section in the page; `title`: its name there.
    - `caveat`: why it does not count, if it does not.
    - `headline`: what was seen, in one clause.
    - `found`: what was seen; `check`: the expression that was false.
    - `run`: the first run that failed; `others`: further ones, at most OTHERS; `more`: the number
      of those that are not named. `risky` and `more_risky`: the same for runs of a failure that
      counts in which it would only be a risk.
    - `link`: URL of the evidence in vLLM's source, if it has one.
    - `lines`: excerpt of the trace.
    """

    anchor: str
    title: str
    requirement: str
    caveat: str
    headline: str
    rule: str
    why: str
    wrong: str
    right: str
    found: str
    check: str
    run: str
    step: int | None
    req: str | None
    seq: int | None
    evidence: str
    beyond: tuple[str, ...]
    link: str | None
    case_text: str
    others: tuple[str, ...]
    more: int
    risky: tuple[str, ...]
    more_risky: int
    lines: tuple[str, ...]
    reproduce: str


@dataclass(frozen=True)
class Cause:
    """A root cause: its failure, the failures that it explains, and what it kept from judgement."""

    failure: Failure
    consequences: tuple[Failure, ...]
    blocked: tuple[str, ...]
    weight: Weight

    @property
    def all(self) -> tuple[Failure, ...]:
        """The root cause and its consequences."""
        return (self.failure, *self.consequences)


def causes(rows: Sequence[Row], collector: Collector) -> list[Cause]:
    """Return the root causes of all failures, in the order of the terminal's report."""
    found = []
    for number, root in enumerate(roots(rows), 1):
        first, *rest = anchors(root, number)
        found.append(
            Cause(
                failure=_failure(first, collector),
                consequences=tuple(_failure(anchor, collector) for anchor in rest),
                blocked=tuple(root.blocked),
                weight=root.weight,
            )
        )
    return found


def _failure(anchor: Anchor, collector: Collector) -> Failure:
    """Return what the page shows of the rows with one cause."""
    first = anchor.group[0]
    requirement = collector.spec.requirements.get(first.requirement)
    case = collector.spec.cases.get(first.case)
    others, risks = other_runs(anchor.group)
    lines = collector.reports[first.run].timelines.get(first.requirement, ())
    return Failure(
        anchor=anchor.id,
        title=anchor.title,
        requirement=first.requirement,
        caveat=caveat(first),
        headline=headline(first),
        rule=_one_line(requirement.text) if requirement else PROCESS_RULE,
        why=_one_line(requirement.why) if requirement else "",
        wrong=usual_causes(first, _one_line(requirement.wrong)) if requirement else "",
        right=(requirement.right or "").rstrip() if requirement else "",
        found=first.message or "",
        check=(first.check or "").replace("`", ""),
        run=first.run,
        step=first.step,
        req=first.req,
        seq=first.event,
        evidence=first.evidence or "",
        beyond=tuple(beyond(first)),
        link=_link(first.evidence, collector.vllm),
        case_text=_one_line(case.text) if case else "",
        others=tuple(others[:OTHERS]),
        more=max(0, len(others) - OTHERS),
        risky=tuple(risks[:OTHERS]),
        more_risky=max(0, len(risks) - OTHERS),
        lines=tuple(fit(lines)),
        reproduce=reproduction(collector, first),
    )


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _link(evidence: str | None, vllm: str | None) -> str | None:
    """Return the URL of the file at the tag of vLLM's release.

    None if the evidence is no file of vLLM, or `vllm` is no release.
    """
    file = (evidence or "").partition(":")[0].strip()
    release = (vllm or "").partition("+")[0]
    released = all(part.isdigit() for part in release.split("."))
    return f"{VLLM}/v{release}/vllm/{file}" if file.endswith(".py") and released else None
