# SPDX-License-Identifier: Apache-2.0
"""Failures as report.html shows them: each cause once, with all its details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconform.judge.records import Row, Verdict
from kvconform.report.causes import (
    PROCESS_RULE,
    beyond,
    by_cause,
    other_runs,
    reproduction,
    usual_causes,
)
from kvconform.report.collector import Collector
from kvconform.report.timeline import fit

VLLM = "https://github.com/vllm-project/vllm/blob"
OTHERS = 12
"""Number of further runs of a failure that are named."""


@dataclass(frozen=True)
class Failure:
    """A cause of failure.

    - `found`: what was seen; `check`: the expression that was false.
    - `run`: the first run that failed; `others`: further ones, at most OTHERS; `more`: the number
      of those that are not named. `risky` and `more_risky`: the same for runs of a failure that
      counts in which it would only be a risk.
    - `link`: URL of the evidence in vLLM's source, if it has one.
    - `lines`: excerpt of the trace.
    """

    number: int
    requirement: str
    kind: str
    gating: bool
    level: str
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
    risk: bool
    link: str | None
    bugs: tuple[str, ...]
    case: str
    case_text: str
    others: tuple[str, ...]
    more: int
    risky: tuple[str, ...]
    more_risky: int
    lines: tuple[str, ...]
    reproduce: str


def failures(rows: Sequence[Row], collector: Collector) -> list[Failure]:
    """Return the failures, causes before their consequences."""
    spec = collector.spec
    found = []
    groups = by_cause([row for row in rows if row.verdict is Verdict.FAIL])
    for number, group in enumerate(groups, 1):
        first = group[0]
        requirement = spec.requirements.get(first.requirement)
        case = spec.cases.get(first.case)
        others, risks = other_runs(group)
        lines = collector.reports[first.run].timelines.get(first.requirement, ())
        found.append(
            Failure(
                number=number,
                requirement=first.requirement,
                kind=first.kind,
                gating=first.gating,
                level=first.level,
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
                risk=first.risk,
                link=_link(first.evidence, collector.vllm),
                bugs=tuple(requirement.bugs) if requirement else (),
                case=first.case,
                case_text=_one_line(case.text) if case else "",
                others=tuple(others[:OTHERS]),
                more=max(0, len(others) - OTHERS),
                risky=tuple(risks[:OTHERS]),
                more_risky=max(0, len(risks) - OTHERS),
                lines=tuple(fit(lines)),
                reproduce=reproduction(collector, first),
            )
        )
    return found


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
