# SPDX-License-Identifier: Apache-2.0
"""The connector under test as a child of vLLM's MultiConnector, alone or with siblings of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconform.target import Target

SIBLINGS = {"idle": "Idle", "winner": "Winner", "holder": "Holder", "fetcher": "Fetcher", "greeter": "Greeter"}
"""Name in a case -> class in kvconform.refimpl.siblings."""


@dataclass
class MultiTarget(Target):
    """A target whose connector runs inside of MultiConnector; the probe sees it, not its parent and not its siblings."""

    children: tuple[str, ...] = ("self",)

    @property
    def name(self) -> str:
        return "MultiConnector"

    @property
    def module(self) -> str | None:
        return None

    def alone(self) -> Target:
        """The connector without its parent."""
        return Target(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Target)})

    def resolve(self) -> type:
        return self.alone().resolve()

    def options(self, tmp: Path, block_size: int) -> dict[str, Any]:
        return {"connectors": [self._child(name, tmp, block_size) for name in self.children]}

    def _child(self, name: str, tmp: Path, block_size: int) -> dict[str, Any]:
        role = self.role or "kv_both"
        if name != "self":
            return {"kv_connector": SIBLINGS[name], "kv_connector_module_path": "kvconform.refimpl.siblings", "kv_role": role}
        target = self.alone()
        own = {"kv_connector": target.name, "kv_role": role, "kv_connector_extra_config": target.options(tmp, block_size)}
        return own if target.module is None else {**own, "kv_connector_module_path": target.module}


def inside(target: Target, children: Sequence[str]) -> MultiTarget:
    """The same connector among these children."""
    return MultiTarget(**{field.name: getattr(target, field.name) for field in dataclasses.fields(Target)}, children=tuple(children))
