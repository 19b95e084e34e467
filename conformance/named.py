# SPDX-License-Identifier: Apache-2.0
"""Configurations of real connectors by name: `catalogue:offloading` stands for what `connectors/offloading.toml` says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconform import connectors
from kvconform.closest import did_you_mean
from kvconform.errors import UsageError

PREFIX = "catalogue:"
ROOT = Path(connectors.__path__[0])


class Named(BaseModel):
    """An entry: a sentence, what pip has to install beside vLLM, and settings (kvconform.settings.Settings)."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    text: str = Field(min_length=1)
    requires: list[str] = Field(default=[], description="pip requirements")
    connector: str = Field(min_length=1)
    family: str = Field(default="", description="whose results are told together; default: the name up to its first dash")

    def group(self, name: str) -> str:
        """The family of the entry, which is called `name`."""
        return self.family or name.partition("-")[0]

    @property
    def settings(self) -> dict[str, Any]:
        """All but what describes the entry itself."""
        return {**(self.model_extra or {}), "connector": self.connector}


def names(root: Path = ROOT) -> list[str]:
    """The entries, sorted."""
    return sorted(path.stem for path in root.glob("*.toml"))


def named(name: str, root: Path = ROOT) -> Named:
    """The entry of a name (with or without `catalogue:`). UsageError in one sentence if there is none, or it is none."""
    name = name.removeprefix(PREFIX)
    if name not in names(root):
        close = did_you_mean(name, names(root)) or "; kvconform list connectors has them"
        raise UsageError(f"the catalogue has no connector {name!r}{close}")
    path = root / f"{name}.toml"
    try:
        return Named.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(f"{path.name} of the catalogue is broken: {' '.join(str(error).split())[:300]}") from None
