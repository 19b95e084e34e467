# SPDX-License-Identifier: Apache-2.0
"""A finding: what a real connector does wrong, with all that a maintainer needs to believe it. `docs/results/findings/<id>.yaml`."""

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
    """Releases that were tried, such as `vllm 0.32.0`."""

    affected: list[str] = Field(min_length=1)
    fine: list[str] = []


class Upstream(_Part):
    """Whether the connector's or vLLM's developers know of it."""

    status: Literal["known", "new", "not found"] = Field(
        description="new: looked for and not there; not found: looked for, and unsure"
    )
    links: list[str] = []
    note: str = Field(min_length=1, description="what was searched, or what the threads say")

    @model_validator(mode="after")
    def _linked(self) -> Upstream:
        if self.status == "known" and not self.links:
            raise ValueError("what is known upstream has a link")
        return self


class Finding(_Part):
    """See docs/results/README.md. `confirmed`: the minimal case reproduces it in a fresh environment with stock code, adapter and emulation
    are ruled out, and vLLM's source supports the requirement."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    connector: str = Field(description="entry of the catalogue")
    family: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="the page that it goes on")
    title: str = Field(min_length=10)
    status: Literal["confirmed", "open question"]
    requirements: list[str] = Field(min_length=1)
    case: str = Field(
        description="id of a case, of a live scenario, or the path of a case below docs/results/cases/"
    )
    engines: dict[str, str] = Field(min_length=1, description="engine: what was seen on it")
    wrong_tokens: bool = Field(description="a run that looks right returns wrong tokens")
    what: str = Field(min_length=20)
    diagnosis: str = Field(min_length=20)
    adapter: str = Field(
        min_length=5,
        description="why it is not the adapter's, the emulation's or the suite's fault",
    )
    versions: Versions
    upstream: Upstream
    reproduce: str = Field(min_length=5)
    report: str = Field(default="", description="draft of a bug report, Markdown")

    @model_validator(mode="after")
    def _reported(self) -> Finding:
        if self.status == "confirmed" and self.upstream.status != "known" and not self.report:
            raise ValueError(
                "a confirmed finding that is not known upstream has a draft of a bug report"
            )
        return self


def read(root: Path) -> list[Finding]:
    """All findings below the directory of results, by family and id. UsageError in one sentence for a broken one."""
    found = []
    for path in sorted((root / "findings").glob("*.yaml")):
        try:
            finding = Finding.model_validate(
                yaml12.parse(path.read_text(encoding="utf-8"), path.name)
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UsageError(
                f"{path.name}: {'.'.join(str(part) for part in first['loc']) or 'the finding'}: {first['msg']}"
            ) from None
        if finding.id != path.stem:
            raise UsageError(
                f"{path.name}: its id is {finding.id}; the file must have the same name"
            )
        found.append(finding)
    return sorted(
        found, key=lambda finding: (finding.family, finding.status != "confirmed", finding.id)
    )


def problems(finding: Finding, root: Path, spec: Spec, scenarios: set[str]) -> list[str]:
    """What a finding names that does not exist: requirements, its case, the catalogue's entry."""
    said = [
        f"there is no requirement {name}"
        for name in finding.requirements
        if name not in spec.requirements
    ]
    if finding.connector not in catalogue.names():
        said.append(f"the catalogue has no {finding.connector}")
    if (
        finding.case not in spec.cases
        and finding.case not in scenarios
        and not (root / "cases" / f"{finding.case}").is_file()
    ):
        said.append(f"there is no case {finding.case}")
    return [f"{finding.id}: {sentence}" for sentence in said]
