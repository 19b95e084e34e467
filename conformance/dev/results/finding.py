# SPDX-License-Identifier: Apache-2.0
"""Findings about real connectors, with the evidence that a maintainer needs.

Each finding is a file, docs/results/findings/<id>.yaml.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvconform.config import catalogue
from kvconform.contract import yaml12
from kvconform.contract.loader import Spec
from kvconform.errors import UsageError


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Versions(_Part):
    """Releases that were tried, such as `vllm 0.32.0`: with the fault, and without it."""

    affected: list[str] = Field(min_length=1)
    fine: list[str] = []


class Upstream(_Part):
    """State of the finding upstream: in the connector's or vLLM's issue tracker."""

    status: Literal["known", "new", "not found"] = Field(
        description="new: searched for, and not there; not found: searched for, and unsure"
    )
    links: list[str] = []
    note: str = Field(min_length=1, description="what was searched, or what the threads say")

    @model_validator(mode="after")
    def _linked(self) -> Upstream:
        if self.status == "known" and not self.links:
            raise ValueError("a finding that is known upstream must have a link")
        return self


class Severity(_Part):
    """What a user of vLLM sees of the finding, and how likely that is."""

    effect: Literal[
        "wrong-tokens",
        "engine-ends",
        "request-fails",
        "request-hangs",
        "memory-leak",
        "lost-reuse",
        "refused",
        "good-practice",
        "no-effect",
    ] = Field(
        description="request-fails: a request ends with an error; request-hangs: a request or a"
        " process waits without end; lost-reuse: KV that was computed is computed again;"
        " good-practice: only programs that go on after the engine see it; no-effect: a rule is"
        " broken, and nothing of it was seen"
    )
    likely: Literal["common", "rare", "only-if"]
    needs: str = Field(
        min_length=10, description="a sentence: the configuration or the order of events it needs"
    )


class RealWorld(_Part):
    """Public report of the same behaviour, by a user or in a change that repairs it."""

    links: list[str] = []
    note: str = Field(
        min_length=10, description="what the report says; without links: what was searched for"
    )


class Finding(_Part):
    """One finding; see docs/results/README.md.

    It is `confirmed` if the minimal case reproduces it in a fresh environment with stock code,
    adapter and emulation are ruled out, and vLLM's source supports the requirement. What a
    connector promises to keep, its own documentation has to say.
    It is a `risk` if only what the contract allows, and this vLLM never does, brings it about.
    It is `withdrawn` if vLLM's source does not support it; the record says why.
    It is an `open question` as long as evidence is missing.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    connector: str = Field(description="entry of the catalogue")
    rows: list[str] = Field(
        default=[],
        description="entries of the catalogue whose failures it may explain; default: `connector`",
    )
    family: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="the page that shows it")
    title: str = Field(min_length=10)
    status: Literal["confirmed", "risk", "open question", "withdrawn"]
    reason: str = Field(
        default="",
        description="unless it is confirmed: what vLLM does instead, with the place in its source;"
        " of an open question, the evidence that is missing",
    )
    requirements: list[str] = Field(min_length=1)
    case: str = Field(
        description="id of a case or live scenario, or path of a case below docs/results/cases/"
    )
    cases: list[str] = Field(
        default=[],
        description="other cases (ids, or globs within an area) that fail for the same cause",
    )
    lines: list[str] = Field(
        default=[],
        description="parts of `function: source line`, where failures of this cause are raised",
    )
    engines: dict[str, str] = Field(min_length=1, description="engine: what was seen on it")
    wrong_tokens: bool = Field(description="a run without an error returns wrong tokens")
    severity: Severity
    real_world: RealWorld
    what: str = Field(min_length=20)
    diagnosis: str = Field(min_length=20)
    adapter: str = Field(
        min_length=5,
        description="why it is no fault of the adapter, the emulation or the suite",
    )
    versions: Versions
    upstream: Upstream
    reproduce: str = Field(min_length=5)
    report: str = Field(default="", description="draft of a bug report, Markdown")

    @model_validator(mode="after")
    def _reported(self) -> Finding:
        if self.status == "confirmed" and self.upstream.status != "known" and not self.report:
            raise ValueError(
                "a confirmed finding that is not known upstream must have a draft of a bug report"
            )
        return self

    @model_validator(mode="after")
    def _reasoned(self) -> Finding:
        if self.status != "confirmed" and not self.reason:
            raise ValueError(f"a finding that is {self.status!r} must have a reason")
        if self.status == "confirmed" and self.reason:
            raise ValueError("a confirmed finding has no reason; `diagnosis` says why")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Finding:
        if self.wrong_tokens != (self.severity.effect == "wrong-tokens"):
            raise ValueError("wrong_tokens and severity.effect contradict each other")
        return self

    @model_validator(mode="after")
    def _narrow(self) -> Finding:
        for each in self.cases:
            area = each.partition(".")[0]
            if fnmatchcase(f"{area}.", each):
                raise ValueError(
                    f"{each} in `cases` covers a whole area, later cases included;"
                    " name the cases that fail for this cause"
                )
        return self

    def names(self, entry: str, requirement: str) -> bool:
        """Return whether it is about this requirement in an entry's rows."""
        return requirement in self.requirements and entry in (self.rows or [self.connector])

    def fits(self, case: str, line: str | None) -> bool:
        """Return whether a failure may have this cause; `line` raised it, if one did.

        If both are known, the line decides: a case may fail for another cause, too.
        """
        if line is not None and self.lines:
            return any(part in line for part in self.lines)
        return any(fnmatchcase(case, each) for each in (self.case, *self.cases))


STATUSES = {
    "confirmed": "Findings",
    "risk": "Risks",
    "open question": "Open questions",
    "withdrawn": "Withdrawn",
}
"""Statuses of findings, with the headings of their sections in the pages."""


def read(root: Path) -> list[Finding]:
    """Return all findings below the directory of results, by family; UsageError for a broken one.

    Within a family they are sorted by status (as in `STATUSES`), then by id.
    """
    found = []
    for path in sorted((root / "findings").glob("*.yaml")):
        try:
            finding = Finding.model_validate(
                yaml12.parse(path.read_text(encoding="utf-8"), path.name)
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            part = ".".join(map(str, first["loc"])) or "the finding"
            raise UsageError(f"{path.name}: {part}: {first['msg']}") from None
        if finding.id != path.stem:
            sentence = f"its id is {finding.id}; the file must have the same name"
            raise UsageError(f"{path.name}: {sentence}")
        found.append(finding)
    return sorted(found, key=lambda each: (each.family, list(STATUSES).index(each.status), each.id))


def problems(finding: Finding, root: Path, spec: Spec, scenarios: set[str]) -> list[str]:
    """Return a sentence for each name in a finding that does not exist.

    These are its requirements, its case, and the entry of the catalogue.
    """
    found = [
        f"there is no requirement {name}"
        for name in finding.requirements
        if name not in spec.requirements
    ]
    found += [
        f"the catalogue has no {name}"
        for name in dict.fromkeys([finding.connector, *finding.rows])
        if name not in catalogue.names()
    ]
    known = finding.case in spec.cases or finding.case in scenarios
    if not known and not (root / "cases" / finding.case).is_file():
        found.append(f"there is no case {finding.case}")
    return [f"{finding.id}: {sentence}" for sentence in found]
