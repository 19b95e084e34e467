# SPDX-License-Identifier: Apache-2.0
"""The failures of a report, each cause once, with everything that is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconform.judge.verdict import Row, Verdict
from kvconform.report import repro
from kvconform.report.causes import by_cause, split
from kvconform.report.collector import Collector

VLLM = "https://github.com/vllm-project/vllm/blob"
OTHERS = 12


@dataclass(frozen=True)
class Failure:
    """A cause: `found` says what was seen, `check` the expression that was false, `run` where first, `others` where else."""

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
    link: str | None
    bugs: tuple[str, ...]
    case: str
    case_text: str
    others: tuple[str, ...]
    more: int
    lines: tuple[str, ...]
    reproduce: str


def failures(rows: Sequence[Row], collector: Collector) -> list[Failure]:
    """All of them, causes before what follows from them."""
    spec, notes = collector.spec, collector.notes
    found = []
    groups = by_cause([row for row in rows if row.verdict is Verdict.FAIL])
    for number, group in enumerate(groups, 1):
        first = group[0]
        requirement, case = spec.requirements.get(first.requirement), spec.cases.get(first.case)
        others = list(dict.fromkeys(row.run for row in group[1:] if row.run != first.run))
        told, check = split(first.message)
        found.append(
            Failure(
                number=number,
                requirement=first.requirement,
                kind=first.kind,
                gating=first.gating,
                level=first.level,
                rule=_one_line(requirement.text)
                if requirement
                else "A connector MUST NOT end the process that it runs in.",
                why=_one_line(requirement.why) if requirement else "",
                wrong=_one_line(requirement.wrong) if requirement else "",
                right=(requirement.right or "").rstrip() if requirement else "",
                found=told,
                check=check,
                run=first.run,
                step=first.step,
                req=first.req,
                seq=first.event,
                evidence=first.evidence or "",
                link=_link(first.evidence, collector.vllm),
                bugs=tuple(requirement.bugs) if requirement else (),
                case=first.case,
                case_text=_one_line(case.text) if case else "",
                others=tuple(others[:OTHERS]),
                more=max(0, len(others) - OTHERS),
                lines=tuple(notes[first.run].timelines.get(first.requirement, ()))
                if first.run in notes
                else (),
                reproduce=repro.of(collector, first),
            )
        )
    return found


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _link(evidence: str | None, vllm: str | None) -> str | None:
    """The file at the release's tag; None if it is not vLLM's, or not of a release."""
    file = (evidence or "").partition(":")[0].strip()
    release = (vllm or "").partition("+")[0]
    if (
        not file.endswith(".py")
        or not release
        or not all(part.isdigit() for part in release.split("."))
    ):
        return None
    return f"{VLLM}/v{release}/vllm/{file}"
