# SPDX-License-Identifier: Apache-2.0
"""A workload: a case of one run, as data. What is drawn is a case, and what is left of it in the end is a file that anybody can run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvconform.contract.case import Case, Variant
from kvconform.contract.yaml12 import flow

Data = dict[str, Any]
AREA = "explore"
WIDTH = 130
PLAIN_AXES = (("scheduling", "sync"), ("runner", "v1"), ("depth", 2))


@dataclass(frozen=True)
class Workload:
    """A case's data (engines and matrix name one run) and the seed of its tokens."""

    data: Data
    seed: int = 0

    def variant(self) -> Variant:
        """The one run. ValidationError if the data are no case, ValueError if it has several runs."""
        variants = Case.model_validate(self.data).variants(slow=self.data["matrix"].get("slow"))
        if len(variants) != 1:
            raise ValueError(f"a workload is one run, this one has {len(variants)}")
        return variants[0]

    @property
    def size(self) -> tuple[int, ...]:
        """What shrinking makes smaller, the most important first: requests, steps, tokens, and what is not the default."""
        adds = [step["add"] for step in self.data["steps"] if "add" in step]
        tokens = sum(_length(add["prompt"]) + add.get("max_tokens", 4) for add in adds)
        tokens += sum(
            value
            for step in self.data["steps"]
            for value in step.values()
            if isinstance(value, int)
        )
        extras = sum(len(add) for add in adds) + len(
            json.dumps([self.data.get("config", {}), self.data.get("policies", [])])
        )
        extras += sum(self.data["matrix"][name] != [plain] for name, plain in PLAIN_AXES)
        return len(adds), len(self.data["steps"]), tokens, extras


def _length(prompt: Any) -> int:
    return (
        prompt if isinstance(prompt, int) else 1 + prompt.get("then", 0) + prompt.get("tokens", 0)
    )


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
    """The data of a case of one run; `slow`: which streams are slow, on a device that has streams; `needs`: what the connector must do."""
    matrix: Data = {
        "scheduling": [scheduling],
        "runner": [runner],
        "depth": [depth],
        **({"slow": [slow]} if slow else {}),
    }
    data: Data = {
        "id": identifier,
        "area": AREA,
        "text": text,
        "config": config or {},
        "matrix": matrix,
        "engines": [engine],
    }
    data |= {"needs": needs} if needs else {}
    return {
        **data,
        **({"policies": policies} if policies else {}),
        "relations": relations or [],
        "steps": steps,
    }


def text_of(data: Data, comment: str = "") -> str:
    """The case as a YAML file, a step per line; `comment` goes in front."""
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
