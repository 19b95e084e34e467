# SPDX-License-Identifier: Apache-2.0
"""What a connector's configuration says about a server that it needs: data only."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PORT = re.compile(r"\{port:([a-z][a-z0-9-]*)\}")
"""`{port:NAME}`: a free TCP port of this machine, the same wherever the name is used in one process."""


class Call(BaseModel):
    """One of: a TCP address that must accept a connection, a URL that must answer without an error, a shell command that must succeed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tcp: str | None = Field(default=None, description="host:port")
    http: str | None = Field(default=None, description="URL")
    method: str = Field(default="GET", description="of the request to `http`")
    body: dict[str, Any] | None = Field(default=None, description="of the request to `http`, as JSON")
    command: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Call:
        if sum(given is not None for given in (self.tcp, self.http, self.command)) != 1:
            raise ValueError("give one of tcp, http and command")
        if self.body is not None and (self.http is None or self.method == "GET"):
            raise ValueError('a body goes with http, and with a method that sends one (method = "POST")')
        return self


class ServerSpec(BaseModel):
    """A server. Strings may hold `{port:NAME}`, `{python}` (the interpreter) and `{server_tmp}` (a directory of the servers')."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    command: str | list[str] = Field(description="runs until it is stopped: a shell command, or a program with its arguments")
    ready: Call = Field(description="what shows that it can be used")
    clear: Call | None = Field(default=None, description="makes it forget all KV; done before each run, when no engine uses it")
    lose: Call | None = Field(default=None, description="the same under an engine that uses it, for live.store-lost (default: clear)")
    stop: str | None = Field(default=None, description="shell command that asks it to end")
    timeout: float = Field(default=60.0, gt=0, description="seconds until it has to be ready")
    grace: float = Field(default=5.0, ge=0, description="seconds between being asked to end and being killed")

    @property
    def losing(self) -> Call | None:
        """What makes it forget while it is used, if anything does."""
        return self.lose or self.clear

    @field_validator("timeout", "grace", mode="before")
    @classmethod
    def _whole_seconds(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def port_names(value: Any) -> set[str]:
    """The names of ports that the strings of a value mention."""
    if isinstance(value, str):
        return set(PORT.findall(value))
    if isinstance(value, dict):
        return set().union(*(port_names(item) for item in value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*(port_names(item) for item in value))
    return set()


def filled(value: Any, ports: dict[str, int], words: dict[str, str]) -> Any:
    """The value with ports and `words` put into its strings. KeyError for a port that has no number."""
    if isinstance(value, str):
        text = PORT.sub(lambda found: str(ports[found[1]]), value)
        if found := PORT.fullmatch(value):
            return ports[found[1]]  # alone, it is a number: that is what options want
        for word, meaning in words.items():
            text = text.replace("{" + word + "}", meaning)
        return text
    if isinstance(value, dict):
        return {key: filled(item, ports, words) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [filled(item, ports, words) for item in value]
    return value
