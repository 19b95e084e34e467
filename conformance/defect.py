# SPDX-License-Identifier: Apache-2.0
"""One entry of `spec/defects.yaml`: a known-bad connector, or a fault of the engine under a correct one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from kvconform.case import Engine, Scheduling, Variant
from kvconform.device_kinds import SLOW
from kvconform.errors import UsageError
from kvconform.load import Spec
from kvconform.refimpl.faulty import Fault
from kvconform.requirement import Id, Model
from kvconform.server_spec import ServerSpec

REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
Symbol = Annotated[str, Field(pattern=r"^[\w.]+:\w+$", description="package.module:name")]


class Defect(Model):
    """Run on `cases`, it must fail exactly the requirements `fails`; those in `may` can fail too.

    With `engine_fault` the connector is a correct one, and `fails` names guarantees, or consequences of what no guarantee is about: what
    the engine breaks is not the connector's failure.
    """

    id: Id
    text: str = Field(min_length=1, description="what is wrong with it, in one line")
    connector: Symbol = REFERENCE
    engine_fault: Symbol | None = Field(default=None, description="a Fault, in force while the cases run")
    extra_config: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    servers: list[ServerSpec] = Field(default=[], description="servers that it needs; extra_config may name their ports")
    bugs: list[Annotated[str, Field(pattern=r"^B\d{3}$")]] = Field(default=[], description="real bugs of this kind")
    engines: list[Engine] = Field(default=["reference"], min_length=1)
    scheduling: list[Scheduling] | None = Field(default=None, min_length=1, description="only these of the cases' runs")
    emulate_cuda: bool = Field(default=False, description="its runs emulate a CUDA device")
    own_process: bool = Field(default=False, description="it may end the process that it runs in")
    hook_timeout: float = Field(default=10.0, gt=0, description="seconds that a hook may take")
    cases: list[Id] = Field(min_length=1)
    fails: list[Id] = Field(min_length=1)
    may: list[Id] = []

    @model_validator(mode="after")
    def _something_is_wrong(self) -> Defect:
        if self.connector == REFERENCE and self.engine_fault is None:
            raise ValueError("names neither a connector nor an engine_fault: nothing would be wrong")
        for names in (self.cases, self.fails, self.may, self.bugs):
            if len(set(names)) < len(names):
                raise ValueError("names something twice")
        if both := set(self.fails) & set(self.may):
            raise ValueError(f"{min(both)} is in `fails` and in `may`")
        return self

    @property
    def live(self) -> bool:
        """Whether it takes all of vLLM, and with that a minute."""
        return self.engines == ["live"]

    def fault(self) -> Fault | None:
        """The engine's fault, imported. UsageError if there is none of that name."""
        if self.engine_fault is None:
            return None
        module, name = self.engine_fault.split(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"defect {self.id}: {error}") from None
        if not isinstance(found, Fault):
            raise UsageError(f"defect {self.id}: {self.engine_fault} is no Fault")
        return found

    def variants(self, spec: Spec) -> Iterator[Variant]:
        """All runs of its cases on its engines."""
        for case in self.cases:
            yield from driven(spec, case).variants(self.engines, self.scheduling, SLOW if self.emulate_cuda else None)


def driven(spec: Spec, name: str) -> Any:
    """The case of this id, or the scenario of engine live."""
    return spec.cases[name] if name in spec.cases else spec.scenarios[name]


def load_defects(spec: Spec) -> dict[str, Defect]:
    """The registry. UsageError for an entry that is not a defect, names what does not exist, or runs nothing."""
    found = {}
    for name, raw in spec.defects.items():
        where = spec.places.get(f"defect:{name}", name)
        try:
            defect = found[name] = Defect(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise UsageError(f"{where}: defect {name}: {at + ': ' if at else ''}{first['msg']}") from None
        if problem := _problem(defect, spec):
            raise UsageError(f"{where}: defect {name} {problem}")
    return found


def _problem(defect: Defect, spec: Spec) -> str | None:
    for case in defect.cases:
        if case not in spec.cases and case not in spec.scenarios:
            return f"names {case}, which does not exist"
    for requirement in (*defect.fails, *defect.may):
        if requirement not in spec.requirements:
            return f"names {requirement}, which does not exist"
    if next(defect.variants(spec), None) is None:
        return "has no run: none of its cases runs on its engines"
    fails = [spec.requirements[name] for name in defect.fails]
    blamed = [requirement.id for requirement in fails if requirement.kind != "guarantee" and not requirement.consequence]
    if blamed and defect.engine_fault is not None:
        return f"is the engine's fault, but {blamed[0]} is neither a guarantee nor a consequence"
    return None
