# SPDX-License-Identifier: Apache-2.0
"""Findings about real connectors, with the evidence that a maintainer needs.

Each finding is a file, docs/results/findings/<id>.yaml.
"""

from __future__ import annotations

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


class Finding(_Part):
    """One finding; see docs/results/README.md.

    It is `confirmed` if the minimal case reproduces it in a fresh environment with stock code,
    adapter and emulation are ruled out, and vLLM's source supports the requirement.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    connector: str = Field(description="entry of the catalogue")
    family: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="the page that shows it")
    title: str = Field(min_length=10)
    status: Literal["confirmed", "open question"]
    requirements: list[str] = Field(min_length=1)
    case: str = Field(
        description="id of a case or live scenario, or path of a case below docs/results/cases/"
    )
    engines: dict[str, str] = Field(min_length=1, description="engine: what was seen on it")
    wrong_tokens: bool = Field(description="a run without an error returns wrong tokens")
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


def read(root: Path) -> list[Finding]:
    """Return all findings below the directory of results, by family; UsageError for a broken one.

    Within a family the confirmed ones come first, then they are sorted by id.
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
    return sorted(
        found, key=lambda finding: (finding.family, finding.status != "confirmed", finding.id)
    )


def problems(finding: Finding, root: Path, spec: Spec, scenarios: set[str]) -> list[str]:
    """Return a sentence for each name in a finding that does not exist.

    These are its requirements, its case, and the entry of the catalogue.
    """
    found = [
        f"there is no requirement {name}"
        for name in finding.requirements
        if name not in spec.requirements
    ]
    if finding.connector not in catalogue.names():
        found.append(f"the catalogue has no {finding.connector}")
    known = finding.case in spec.cases or finding.case in scenarios
    if not known and not (root / "cases" / finding.case).is_file():
        found.append(f"there is no case {finding.case}")
    return [f"{finding.id}: {sentence}" for sentence in found]
