# SPDX-License-Identifier: Apache-2.0
"""The connector under test: its name, its configuration, and how its class is found.

A target may also put the connector under vLLM's MultiConnector, alone or with siblings of ours.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvconform.contract.case import Device
from kvconform.errors import UsageError, did_you_mean, place_of


@dataclass
class Target:
    """A connector and its configuration.

    - `connector`: `package.module:Class`, a name registered in vLLM's factory, or None.
    - `extra_config`: in its strings, `{tmp}` stands for the run's own directory and `{block_size}`
      for the tokens of a block.
    - `extra_config_after_restart`: options over these that `restart: settings` gives it.
    - `capabilities`: the declared ones.
    - `half`: `both`, or `scheduler` to judge the scheduler half alone, with a worker half of ours
      that does nothing.
    - `device`: where the KV cache is.
    - `adapters`: in force wherever the connector runs.
    - `router`: `package.module:Class` that makes the parameters of transfers, or None for vLLM's.
    - `request_params`: the kv_transfer_params of requests for which a case has none.
    - `hash_seed`: PYTHONHASHSEED of every interpreter, as the settings prescribe it, or None.
    """

    connector: str | None
    extra_config: dict[str, Any] = field(default_factory=dict)
    role: str | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)
    stall_seconds: float = 2.0
    half: str = "both"
    device: Device = "cpu"
    adapters: tuple[str, ...] = ()
    router: str | None = None
    request_params: dict[str, Any] = field(default_factory=dict)
    hash_seed: str | None = None
    extra_config_after_restart: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The value of vLLM's `kv_connector`: the class's name or the registered name."""
        return (self.connector or "none").rpartition(":")[2]

    @property
    def module(self) -> str | None:
        """The value of vLLM's `kv_connector_module_path`; None for registered names."""
        return (self.connector or "").rpartition(":")[0] or None

    def resolve(self) -> type:
        """Return the connector's class. Imports it, and vLLM; UsageError if that fails."""
        from kvconform.compat.vllm_api import KVConnectorBase_V1, KVConnectorFactory

        assert self.connector is not None
        if self.module is None:
            if self.name not in KVConnectorFactory._registry:
                known = sorted(KVConnectorFactory._registry)
                hint = did_you_mean(self.name, known).rstrip("?")
                hint = hint or f", or one of {', '.join(known)}"
                raise UsageError(
                    f"vLLM knows no connector named {self.name!r}: "
                    f"give it as package.module:Class{hint}."
                )
            try:
                return KVConnectorFactory._registry[self.name]()
            except (Exception, SystemExit) as error:  # a registered connector may import anything
                raise UsageError(
                    f"Connector {self.name} cannot be imported: {_one_line(error)}{_at(error)}."
                ) from error
        try:
            module = importlib.import_module(self.module)
        except (Exception, SystemExit) as error:  # the user's module may raise anything
            raise UsageError(
                f"Module {self.module} of connector {self.connector} cannot be imported: "
                f"{_one_line(error)}{_at(error)}."
            ) from error
        cls = getattr(module, self.name, None)
        if cls is None:
            raise UsageError(
                f"Module {self.module} has no attribute {self.name!r}: "
                "name the connector's class as package.module:Class."
            )
        if not (isinstance(cls, type) and issubclass(cls, KVConnectorBase_V1)):
            raise UsageError(
                f"{self.connector} is not a KV connector: "
                "it must be a subclass of vLLM's KVConnectorBase_V1."
            )
        return cls

    def options(self, tmp: Path, block_size: int) -> dict[str, Any]:
        """Return `extra_config` with `{tmp}` and `{block_size}` replaced.

        A string that is only `{block_size}` becomes a number.
        """
        given = {"{tmp}": str(tmp), "{block_size}": str(block_size)}
        found: dict[str, Any] = _substitute(self.extra_config, given)
        return found

    def restarted(self) -> Self:
        """Return the target with the options that it has after a restart."""
        options = {**self.extra_config, **self.extra_config_after_restart}
        return dataclasses.replace(self, extra_config=options)

    def declared(self, cls: type | None) -> dict[str, Any]:
        """Return the declared capabilities of the connector's class `cls`.

        The configuration's override those of the class (`kvconform_capabilities(extra_config)`).
        UsageError if that raises, or gives no dict; None declares nothing.
        """
        offered = getattr(cls, "kvconform_capabilities", None)
        if offered is None:
            offered = {}
        elif callable(offered):
            try:
                offered = offered(dict(self.extra_config))
            except Exception as error:
                raise UsageError(f"kvconform_capabilities raised {_one_line(error)}") from error
        if not isinstance(offered, dict):
            raise UsageError(
                f"kvconform_capabilities gives {offered!r}; it must be a dict, or a callable that"
                " takes the extra configuration and returns one"
            )
        return offered | self.capabilities


def _substitute(value: Any, given: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, text in given.items():
            if value == name and text.isdecimal():
                return int(text)
            value = value.replace(name, text)
        return value
    if isinstance(value, dict):
        return {k: _substitute(v, given) for k, v in value.items()}
    if isinstance(value, list):
        return [_substitute(v, given) for v in value]
    return value


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the process while it is imported (sys.exit({error.code!r}))"
    text = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    return text[:300]


def _at(error: BaseException) -> str:
    """Return ` (file:line)` of the connector's line that raised while it was imported, or "".

    The text of a SyntaxError has its own.
    """
    place = None if isinstance(error, SyntaxError) else place_of(error)
    return f" ({place.file}:{place.line})" if place else ""


SIBLINGS = {
    "idle": "Idle",
    "winner": "Winner",
    "holder": "Holder",
    "fetcher": "Fetcher",
    "failer": "Failer",
    "greeter": "Greeter",
}
"""Name in a case -> class in SIBLINGS_IN."""
SIBLINGS_IN = "kvconform.refimpl.variants.siblings"


@dataclass
class MultiTarget(Target):
    """A target whose connector runs inside of MultiConnector.

    The probe observes the connector, not its parent or its siblings.
    """

    children: tuple[str, ...] = ("self",)

    @property
    def name(self) -> str:
        """The registered name of MultiConnector."""
        return "MultiConnector"

    @property
    def module(self) -> str | None:
        """None: MultiConnector is registered."""
        return None

    def siblings(self) -> list[type]:
        """Return the classes of the connector's siblings."""
        names = [SIBLINGS[name] for name in self.children if name != "self"]
        return [getattr(importlib.import_module(SIBLINGS_IN), name) for name in names]

    def alone(self) -> Target:
        """Return the target of the connector without its parent."""
        return Target(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Target)}
        )

    def resolve(self) -> type:
        """Return the class of the connector, not of its parent."""
        return self.alone().resolve()

    def options(self, tmp: Path, block_size: int) -> dict[str, Any]:
        """Return the `extra_config` of MultiConnector, which has that of the connector in it."""
        return {"connectors": [self._child(name, tmp, block_size) for name in self.children]}

    def _child(self, name: str, tmp: Path, block_size: int) -> dict[str, Any]:
        role = self.role or "kv_both"
        if name != "self":
            return {
                "kv_connector": SIBLINGS[name],
                "kv_connector_module_path": SIBLINGS_IN,
                "kv_role": role,
            }
        target = self.alone()
        own = {
            "kv_connector": target.name,
            "kv_role": role,
            "kv_connector_extra_config": target.options(tmp, block_size),
        }
        return own if target.module is None else {**own, "kv_connector_module_path": target.module}


def inside(target: Target, children: Sequence[str]) -> MultiTarget:
    """Return the target of the same connector inside of MultiConnector with these children."""
    return MultiTarget(
        **{field.name: getattr(target, field.name) for field in dataclasses.fields(Target)},
        children=tuple(children),
    )
