# SPDX-License-Identifier: Apache-2.0
"""The real bugs that requirements, cases and defects are made after: `spec/bugs.yaml`."""

from __future__ import annotations

import importlib.resources
from typing import Annotated

from pydantic import Field, ValidationError

from kvconform.load import SpecError
from kvconform.requirement import Model
from kvconform.yamlio import parse

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
        return [(thread, "https://github.com/{}/issues/{}".format(*thread.split("#"))) for thread in self.threads]


def load() -> dict[str, Bug]:
    """All bugs by id. SpecError for an entry that is malformed."""
    text = (importlib.resources.files("kvconform.spec") / "bugs.yaml").read_text(encoding="utf-8")
    try:
        found = [Bug.model_validate(raw) for raw in parse(text, "spec/bugs.yaml")]
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError([f"spec/bugs.yaml:1: {'.'.join(map(str, first['loc']))}: {first['msg']}"]) from None
    return {bug.bug: bug for bug in found}
