# SPDX-License-Identifier: Apache-2.0
"""Subjects: the correct connectors whose sources are mutated (spec/mutants/subjects.yaml)."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvconform import spec as data
from kvconform.config import catalogue
from kvconform.config.selection import select
from kvconform.config.settings import Settings, load
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.contract.steps import forks
from kvconform.contract.yaml12 import parse
from kvconform.errors import UsageError, did_you_mean

FOLDER = Path(data.__path__[0]) / "mutants"
HASH_SEED = "hash-seed"
"""Relation of a run in another interpreter, which takes as long as hundreds of other runs.

No operator makes a connector depend on the seed of Python's hashes, so mutants leave its case out.
"""


class Setup(BaseModel):
    """One configuration of a subject. The capabilities are declared: nothing is inferred away.

    `catalogue` or `file` name settings that `extra_config`, `request_params` and `capabilities` add
    to. `connector`: another class of the subject's modules than the subject's own.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    connector: str | None = None
    catalogue: str | None = None
    file: str | None = Field(default=None, description="settings, relative to the repository")
    extra_config: dict[str, Any] = {}
    extra_config_after_restart: dict[str, Any] = {}
    cases: list[str] = Field(
        default=[], description="ids, areas or globs of the only cases to run; default: all"
    )
    request_params: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    engine: Literal["all", "reference", "vllm"] = "all"
    scheduling: Literal["all", "sync", "async"] = "all"
    slow: Literal["all", "compute", "transfers"] = "all"
    half: Literal["both", "scheduler"] = "both"

    @field_validator("capabilities")
    @classmethod
    def _known(cls, declared: dict[str, Any]) -> dict[str, Any]:
        complete(declared)
        return declared


class Subject(BaseModel):
    """A correct connector, the modules that are mutated, and its configurations.

    `unkept`: requirements of its own declaration that the original does not keep. They kill no
    mutant. `broken`: cases with which the original cannot deal; none of them is run.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    text: str
    connector: str
    modules: list[str] = Field(min_length=1)
    setups: list[Setup] = Field(min_length=1)
    unkept: list[str] = []
    broken: list[str] = []


@dataclass(frozen=True)
class Run:
    """One run of the suite on one configuration."""

    setup: str
    variant: Variant

    @property
    def id(self) -> str:
        """Name of the configuration, and id of the suite's run."""
        return f"{self.setup}/{self.variant.id}"

    @property
    def has_processes(self) -> bool:
        """Whether part of the run is in another process, whose lines are not recorded."""
        case = self.variant.case
        return "second-process" in case.relations or any(forks(step) for step in case.steps)


@cache
def subjects(folder: Path = FOLDER) -> dict[str, Subject]:
    """Return the subjects by id, in the order of their file."""
    path = folder / "subjects.yaml"
    listed = parse(path.read_text(encoding="utf-8"), str(path))
    return {each["id"]: Subject.model_validate(each) for each in listed}


def subject(name: str) -> Subject:
    """Return the subject `name`. UsageError if there is none."""
    if name not in subjects():
        raise UsageError(f"there is no subject {name!r}{did_you_mean(name, subjects())}")
    return subjects()[name]


def settings_of(subject: Subject, setup: Setup, root: Path, cases: Sequence[str] = ()) -> Settings:
    """Return the settings of one configuration.

    `root`: the repository. `cases`: ids, areas or globs of the only cases to run.
    """
    given: dict[str, Any] = {
        "connector": setup.catalogue or setup.connector or subject.connector,
        "engine": setup.engine,
        "scheduling": setup.scheduling,
        "workers": 1,
        "half": setup.half,
        "select": list(cases or setup.cases),
    }
    if setup.slow != "all":
        given["slow"] = setup.slow
    file = None if setup.file is None else str(root / setup.file)
    # Settings that lie around in the working directory are another connector's.
    found = load(given, file=file, start=Path("/"))
    found.extra_config = {**found.extra_config, **setup.extra_config}
    found.extra_config_after_restart = {
        **found.extra_config_after_restart,
        **setup.extra_config_after_restart,
    }
    found.request_params = {**found.request_params, **setup.request_params}
    found.capabilities = {**found.capabilities, **setup.capabilities}
    return found


def lacks(subject: Subject, root: Path) -> str | None:
    """Return why a subject cannot be judged here, in a sentence, or None."""
    for setup in subject.setups:
        if setup.catalogue is not None:
            requires = catalogue.named(setup.catalogue).requires
            if absent := catalogue.absent(requires):
                install = catalogue.pip_install(requires)
                return f"{', '.join(absent)} is not installed: {install}"
    for module in subject.modules:
        try:
            path_of(module, subject, root)
        except UsageError as error:
            return error.message
    return None


def path_of(module: str, subject: Subject, root: Path) -> Path:
    """Return the source file of a module, without importing it. UsageError if it has none."""
    folders: list[str] = []
    for setup in subject.setups:
        folders += settings_of(subject, setup, root).pythonpath
    first, *rest = module.split(".")
    found = importlib.machinery.PathFinder.find_spec(first, [*folders, *sys.path])
    names = [first]
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            break
        names.append(part)
        found = importlib.machinery.PathFinder.find_spec(
            ".".join(names), list(found.submodule_search_locations)
        )
    if found is None or found.origin is None or ".".join(names) != module:
        raise UsageError(f"module {module} of subject {subject.id} is not installed")
    return Path(found.origin)


def runs_of(settings: Mapping[str, Settings], spec: Spec, vllm: str) -> list[Run]:
    """Return all runs of the suite on all configurations, whose settings are given by name."""
    found = []
    for name, each in settings.items():
        selection = select(spec, each, vllm)
        found += [
            Run(name, variant)
            for variant in selection.variants
            if HASH_SEED not in variant.case.relations
        ]
    return found
