# SPDX-License-Identifier: Apache-2.0
"""The catalogue: configurations of real connectors by name.

`catalogue:offloading` stands for the settings in `connectors/offloading.toml`.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconform import connectors
from kvconform.errors import UsageError, did_you_mean
from kvconform.process.server import ServerSpec

PREFIX = "catalogue:"
ROOT = Path(connectors.__path__[0])


class Named(BaseModel):
    """An entry of the catalogue.

    `text` is a sentence about it, `requires` is what pip must install besides vLLM. The other
    fields are settings (kvconform.config.settings.Settings).
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    text: str = Field(min_length=1)
    requires: list[str] = Field(default=[], description="pip requirements")
    connector: str = Field(min_length=1)
    family: str = Field(
        default="",
        description="entries whose results are reported together; "
        "default: the name up to its first dash",
    )

    def group(self, name: str) -> str:
        """Return the family of the entry, whose name is `name`."""
        return self.family or name.partition("-")[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the entry."""
        return {**(self.model_extra or {}), "connector": self.connector}


def names(root: Path = ROOT) -> list[str]:
    """Return the names of the entries, sorted."""
    return sorted(path.stem for path in root.glob("*.toml"))


def named(name: str, root: Path = ROOT) -> Named:
    """Return the entry `name`, given with or without `catalogue:`.

    UsageError in one sentence if there is none, or it is malformed.
    """
    name = name.removeprefix(PREFIX)
    if name not in names(root):
        close = did_you_mean(name, names(root)) or "; kvconform list connectors shows all"
        raise UsageError(f"the catalogue has no connector {name!r}{close}")
    path = root / f"{name}.toml"
    try:
        return Named.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{path.name} of the catalogue is broken: {reason}") from None


def versions(requires: Sequence[str]) -> dict[str, str | None]:
    """Map the packages that pip requirements name to the installed versions, or None."""
    found: dict[str, str | None] = {}
    for item in requires:
        name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", item.strip())
        if name is None:  # an option of pip
            continue
        try:
            found[name[0]] = importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            found[name[0]] = None
    return found


def absent(requires: Sequence[str]) -> list[str]:
    """Return the packages that pip requirements name and that are not installed."""
    return [name for name, version in versions(requires).items() if version is None]


def lacking(entry: str | None) -> list[str]:
    """Return a warning if packages that an entry of the catalogue requires are not installed.

    It is no error, because the connector may work with others. None for `entry`: no warning.
    """
    requires = named(entry).requires if entry is not None else []
    missing = absent(requires)
    if not missing:
        return []
    nox = f"nox -s conformance -- --connector {entry}"
    return [
        f"{', '.join(missing)} {_are(missing)} not installed here: {pip_install(requires)};"
        f" {nox} does that automatically"
    ]


def check_servers(servers: Sequence[ServerSpec]) -> None:
    """Raise UsageError if a package that a server requires is not installed."""
    for server in servers:
        missing = absent(server.requires)
        if missing:
            raise UsageError(
                f"server {server.name} needs {', '.join(missing)}, which {_are(missing)} not"
                f" installed: {pip_install(server.requires)}"
            )


def pip_install(requires: Sequence[str]) -> str:
    """Return the command that installs pip requirements."""
    return f"pip install {shlex.join(requires)}"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
