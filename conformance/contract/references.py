# SPDX-License-Identifier: Apache-2.0
"""What requirements and cases refer to: places in vLLM's source, rules, bugs, known findings.

`spec/sources.yaml` has a digest of each cited place in vLLM's source, as it was when it was read.
`python -m kvconform.dev.drift update` writes that file, and `spec/hooks.yaml`, from the installed
vLLM; with `--check` it only reports whether they would change. `kvconform drift` compares them with
the installed vLLM. Neither imports vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from kvconform.contract.expression import Expression, compile_expr
from kvconform.contract.requirement import Check, Id, Model, Source, Version


class Evidence(Model):
    """One place in vLLM's source, and the digest of its text in the version that was read."""

    file: str = Field(description="relative to vllm/")
    symbol: str
    version: Version
    line: int = Field(ge=1, description="where it begins, for links")
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def key(source: Source | Evidence) -> str:
    """Return `file: symbol`, the key of an entry."""
    return f"{source.file}: {source.symbol}"


def digest(text: str) -> str:
    """Return 16 hexadecimal digits for a symbol's text, as compat.installed.text returns it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


RuleNumber = Annotated[str, Field(pattern=r"^R\d{3}$")]
Who = Literal["connector MUST", "connector SHOULD", "connector MAY", "engine", "hazard", "note"]


class Rule(Model):
    """One rule. `until`: the first vLLM version without it."""

    rule: RuleNumber
    who: Who
    title: str = Field(min_length=1)
    until: Version | None = None


class RuleWaiver(Model):
    """A rule that nothing covers, and why.

    It is wrong, nothing here could observe it, or it is not about the connector interface.
    """

    rule: RuleNumber
    because: Literal["wrong", "not observable", "other half"]
    reason: str = Field(min_length=1)
    link: str = Field(min_length=1, description="evidence: a place in vLLM's source, or an issue")


class Mark(Model):
    """The event that distinguishes a bug of the engine from others that break its guarantee."""

    event: Annotated[str, Field(description="kind of event")]
    where: Check | None = None
    same: list[str] = Field(
        [], description="fields that it has in common with the event that breaks the guarantee"
    )

    @cached_property
    def _where(self) -> Expression | None:
        return None if self.where is None else compile_expr(self.where, {"e": self.event})

    def precedes(self, trace: Sequence[Mapping[str, Any]], seq: int | None) -> bool:
        """Return whether the trace has the mark at event `seq` or before (None: anywhere)."""
        marked = None if self._where is None else self._where.bind({}, {})
        broken: Mapping[str, Any] = next((e for e in trace if e["seq"] == seq), {})
        return any(
            event["kind"] == self.event
            and (marked is None or marked(event))
            and all(event.get(name) == broken.get(name) for name in self.same)
            for event in trace
            if seq is None or event["seq"] <= seq
        )


class BugWaiver(Model):
    """A bug of the list of bugs that nothing here shows, and why.

    The contract makes no promise that it breaks, or nothing here could observe it.
    """

    bug: Annotated[str, Field(pattern=r"^B\d{3}$")]
    because: Literal["no promise", "not observable"]
    reason: str = Field(min_length=1)
    link: str = Field(min_length=1, description="evidence: a place in vLLM's source, or an issue")


class Entry(Model):
    """One bug as it was released.

    Every id in `fails` must FAIL in at least one run of `cases` on each of `releases`.
    """

    id: Id
    bug: Annotated[
        str,
        Field(
            pattern=r"^(B\d{3}|R\d{3})$",
            description="number in the list of bugs, or the rule of the contract that was broken",
        ),
    ]
    text: str
    note: str | None = Field(
        None,
        description="what defends the engine or limits the finding; shown with the finding",
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
        description="guarantees that fail with it in other workloads; "
        "`kvconform explore` names the bug with them",
    )
    mark: Mark | None = Field(
        None,
        description="event before a broken guarantee, without which another bug broke it",
    )


Thread = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+#\d+$")]


class Bug(Model):
    """One bug of the list of bugs.

    `where` it was, `what` was observed, its `cause` if a thread names one, and the threads as
    repository#number.
    """

    bug: Annotated[str, Field(pattern=r"^B\d{3}$")]
    where: str
    what: str
    cause: str | None = None
    threads: list[Thread] = Field(min_length=1)

    def links(self) -> list[tuple[str, str]]:
        """Return (repository#number, address) of each thread.

        GitHub redirects the address of an issue to the pull request of that number.
        """
        return [
            (thread, "https://github.com/{}/issues/{}".format(*thread.split("#")))
            for thread in self.threads
        ]
