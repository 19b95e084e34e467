# SPDX-License-Identifier: Apache-2.0
"""A workload: a case with one run, as data that can be written to a file and run like any case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvconform.contract.case import Case, Variant
from kvconform.contract.yaml12 import flow

Data = dict[str, Any]
AREA = "explore"
WIDTH = 130
"""Columns of the comment in a case's file."""
PLAIN_AXES = (("scheduling", "sync"), ("runner", "v1"), ("depth", 2))
"""The axes with their defaults."""


@dataclass(frozen=True)
class Workload:
    """A case's data (engines and matrix name one run) and the seed of its tokens."""

    data: Data
    seed: int = 0

    def variant(self) -> Variant:
        """Return the run. ValidationError if this is not a case, ValueError for several runs."""
        variants = Case.model_validate(self.data).variants(slow=self.data["matrix"].get("slow"))
        if len(variants) != 1:
            raise ValueError(f"a workload is one run, this one has {len(variants)}")
        return variants[0]

    @property
    def size(self) -> tuple[int, ...]:
        """What shrinking reduces, the most important first.

        Numbers of requests, steps and tokens, and a measure of what differs from the defaults.
        """
        steps = self.data["steps"]
        adds = [step["add"] for step in steps if "add" in step]
        tokens = sum(_length(add["prompt"]) + add.get("max_tokens", 4) for add in adds)
        tokens += sum(value for step in steps for value in step.values() if isinstance(value, int))
        settings = [self.data.get("config", {}), self.data.get("policies", [])]
        extras = sum(len(add) for add in adds) + len(json.dumps(settings))
        extras += sum(self.data["matrix"][name] != [plain] for name, plain in PLAIN_AXES)
        return len(adds), len(steps), tokens, extras


def _length(prompt: int | Data) -> int:
    if isinstance(prompt, int):
        return prompt
    parts = prompt.get("parts", ())
    tokens = sum(part.get("tokens", 0) + part.get("new", 0) + part.get("from", 0) for part in parts)
    return int(1 + len(parts) + tokens + prompt.get("then", 0) + prompt.get("tokens", 0))


def make(
    identifier: str,
    text: str,
    steps: list[Data],
    *,
    engine: str,
    scheduling: str,
    runner: str = "v1",
    depth: int = 2,
    config: Data | None = None,
    policies: list[str] | None = None,
    slow: str | None = None,
    relations: list[str] | None = None,
    needs: str | None = None,
) -> Data:
    """Return the data of a case with one run.

    `slow`: the streams that are slow, on a device that has streams. `needs`: a capability that the
    connector must have.
    """
    matrix: Data = {"scheduling": [scheduling], "runner": [runner], "depth": [depth]}
    if slow:
        matrix["slow"] = [slow]
    data: Data = {
        "id": identifier,
        "area": AREA,
        "text": text,
        "config": config or {},
        "matrix": matrix,
        "engines": [engine],
    }
    if needs:
        data["needs"] = needs
    if policies:
        data["policies"] = policies
    return {**data, "relations": relations or [], "steps": steps}


def text_of(data: Data, comment: str = "") -> str:
    """Return the case as YAML text, one step per line, after `comment`."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for key, value in data.items():
        if key == "steps":
            lines.append("steps:")
            lines += [
                f"  - {name}: {flow(argument)}" for step in value for name, argument in step.items()
            ]
        elif value not in ({}, []) or key == "relations":
            lines.append(f"{key}: {flow(value)}")
    return "\n".join(lines) + "\n"
