# SPDX-License-Identifier: Apache-2.0
"""What the cited places of vLLM's source said when they were read: `spec/sources.yaml`, a digest per place.

`python -m kvconform.dev.drift update` writes that file, and `spec/hooks.yaml` (kvconform.dev.drift), from the installed vLLM (`--check`:
only says whether they would change); `kvconform drift` compares them with the installed vLLM. Neither imports vLLM.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import Field

from kvconform.contract.requirement import Id, Model, Source, Version


class Evidence(Model):
    """One place in vLLM's source, and the digest of its text in the version that was read."""

    file: str = Field(description="relative to vllm/")
    symbol: str
    version: Version
    line: int = Field(ge=1, description="on which it begins, for links")
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def key(source: Source | Evidence) -> str:
    """`file: symbol`, what entries are known by."""
    return f"{source.file}: {source.symbol}"


def digest(text: str) -> str:
    """16 hexadecimal digits of a symbol's text as kvconform.compat.installed.text returns it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


RuleNumber = Annotated[str, Field(pattern=r"^R\d{3}$")]
Who = Literal["connector MUST", "connector SHOULD", "connector MAY", "engine", "hazard", "note"]


class Rule(Model):
    """One rule. `until`: the first vLLM version that knows it no more."""

    rule: RuleNumber
    who: Who
    title: str = Field(min_length=1)
    until: Version | None = None


class RuleWaiver(Model):
    """A rule that nothing covers, and why: it is wrong, nothing here could observe it, or it binds what is not the connector interface."""

    rule: RuleNumber
    because: Literal["wrong", "not observable", "other half"]
    reason: str = Field(min_length=1)
    link: str = Field(
        min_length=1, description="where that can be checked: a place in vLLM's source, or an issue"
    )


class Entry(Model):
    """One bug as it was released. Every id in `fails` must FAIL in at least one run of `cases` on each of `releases`."""

    id: Id
    bug: Annotated[
        str,
        Field(
            pattern=r"^(B\d{3}|R\d{3})$",
            description="of the list of bugs, or the rule of the contract that was broken",
        ),
    ]
    text: str
    note: str | None = Field(
        None, description="what speaks for the engine, or bounds the finding; shown with it"
    )
    releases: list[Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]] = Field(min_length=1)
    connector: str
    extra_config: dict[str, Any] = {}
    half: Literal["both", "scheduler"] = "both"
    scheduling: list[Literal["sync", "async"]] = ["sync"]
    runner: Literal["v1", "v2"] = "v1"
    cases: list[str] = Field(min_length=1)
    fails: list[Id] = Field(min_length=1)
    also: list[Id] = Field(
        [],
        description="guarantees that go with it in other workloads; `kvconform explore` names the bug beside them",
    )


Thread = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+#\d+$")]


class Bug(Model):
    """One bug: `where` it was, `what` was seen, its `cause` where a thread says one, and the threads as repository#number."""

    bug: Annotated[str, Field(pattern=r"^B\d{3}$")]
    where: str
    what: str
    cause: str | None = None
    threads: list[Thread] = Field(min_length=1)

    def links(self) -> list[tuple[str, str]]:
        """(repository#number, address) of each thread; GitHub leads from an issue's address to the pull request of that number."""
        return [
            (thread, "https://github.com/{}/issues/{}".format(*thread.split("#")))
            for thread in self.threads
        ]
