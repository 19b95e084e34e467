# SPDX-License-Identifier: Apache-2.0
"""What requirements and cases refer to: places in vLLM's source, rules, bugs, known findings.

`spec/sources.yaml` has a digest of each cited place in vLLM's source, as it was when it was read.
`python -m kvconform.dev.drift update` writes that file, and `spec/hooks.yaml`, from the installed
vLLM; with `--check` it only reports whether they would change. `kvconform drift` compares them with
the installed vLLM. Neither imports vLLM.
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
    mark: str | None = Field(
        None,
        description="kind of event without which a broken guarantee is another bug",
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
