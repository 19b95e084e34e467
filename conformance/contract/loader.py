# SPDX-License-Identifier: Apache-2.0
"""Reads the specification (spec/) into models. Problems are collected over all files and raised together, each as `file:line: sentence`.

Parsing some 300 KB of YAML in pure Python takes about a second, so the parsed data (not the models) is kept (kvconform.contract.loader).


Parsed files of the specification, kept for the next process in the user's cache directory: never needed, never trusted to be there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvconform.contract import yaml12
from kvconform.contract.case import Case
from kvconform.contract.profile import Profile, Waiver
from kvconform.contract.references import Entry, Evidence, Rule, RuleWaiver, key
from kvconform.contract.requirement import Model, Requirement
from kvconform.contract.scenario import Scenario, Workload
from kvconform.contract.yaml12 import parse
from kvconform.errors import UsageError, WrongPart, did_you_mean

_CACHE_FORMAT = 1


class Cache:
    """Parsed files by the hash of their text, kept in one JSON file that holds exactly the files of the last load."""

    def __init__(self, enabled: bool) -> None:
        self.path = _cache_path() if enabled else None
        self.old: dict[str, Any] = {}
        self.new: dict[str, Any] = {}
        self.missed = False
        if self.path is not None:
            with contextlib.suppress(OSError, ValueError):
                stored = json.loads(self.path.read_text(encoding="utf-8"))
                if (
                    isinstance(stored, dict)
                    and stored.get("format") == _CACHE_FORMAT
                    and isinstance(stored.get("files"), dict)
                ):
                    self.old = stored["files"]

    def parse(self, text: str, name: str) -> Any:
        key = hashlib.sha256(text.encode()).hexdigest()
        if key in self.old:
            data = self.old[key]
        else:
            self.missed = True
            data = yaml12.parse(text, name)
        self.new[key] = data
        return data

    def save(self) -> None:
        """Replace the file atomically; a cache that cannot be written is no error."""
        if self.path is None or not self.missed:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": _CACHE_FORMAT, "files": self.new}, file)
            os.replace(name, self.path)


def _cache_path() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvconform" / "spec.json" if os.path.isabs(base) else None


class SpecError(UsageError):
    """The specification itself is broken. `problems` are all the `file:line: sentence` found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass
class Spec:
    """The whole specification. `places` maps `requirement:ID`, `case:ID`, `waiver#INDEX`, ... to `file:line`; `defects`: entries by id;
    `own_cases`: ids of cases that come from files of their own; `scenarios` and `workloads`: what engine live
    has instead."""

    requirements: dict[str, Requirement] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    waivers: list[Waiver] = field(default_factory=list)
    rules: dict[str, Rule] = field(default_factory=dict)
    rule_waivers: dict[str, RuleWaiver] = field(default_factory=dict)
    sources: dict[str, Evidence] = field(default_factory=dict)
    defects: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    line_counts: dict[str, int] = field(default_factory=dict)
    own_cases: list[str] = field(default_factory=list)
    scenarios: dict[str, Scenario] = field(default_factory=dict)
    workloads: dict[str, Workload] = field(default_factory=dict)


def load_spec(
    root: Path | None = None, *, cache: bool = True, cases: Sequence[str] = (), live: bool = False
) -> Spec:
    """The specification under `root` (default: the one that this distribution carries), and cases in files of their own. `live`: for engine
    live, whose cases are the scenarios. Raises SpecError, and UsageError for a file of a case that cannot be read."""
    base: Traversable = importlib.resources.files("kvconform.spec") if root is None else root
    loader = _Loader(Cache(enabled=cache))
    for name, text in _files(base, "requirements", "spec/"):
        loader.requirements(name, text)
    for name, text in _files(base, "cases", "spec/"):
        loader.case(name, text)
    for name, text in sorted(
        _files(base, "live", "spec/"), key=lambda file: not file[0].endswith("/workloads.yaml")
    ):
        (loader.workloads if name.endswith("/workloads.yaml") else loader.scenario)(name, text)
    for name in cases:
        try:
            (loader.scenario if live else loader.case)(name, Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"case {name} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
    own = {**loader.spec.cases, **loader.spec.scenarios}
    loader.spec.own_cases = [
        name for name in own if loader.spec.places[f"case:{name}"].rpartition(":")[0] in cases
    ]
    for take in (loader.profiles, loader.rules, loader.waivers, loader.sources, loader.defects):
        name = f"{take.__name__}.yaml"
        if (base / name).is_file():
            take(f"spec/{name}", (base / name).read_text(encoding="utf-8"))
    loader.cache.save()
    if loader.problems:
        raise SpecError(loader.problems)
    if live:
        loader.spec.cases = dict(loader.spec.scenarios)  # type: ignore[arg-type]
    return loader.spec


def _files(base: Traversable, folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    """(name to show, text) of every .yaml file under `folder`, sorted."""
    here = base / folder
    if not here.is_dir():
        return
    for entry in sorted(here.iterdir(), key=lambda e: e.name):
        name = f"{prefix}{folder}/{entry.name}"
        if entry.is_dir():
            yield from _files(here, entry.name, f"{prefix}{folder}/")
        elif entry.name.endswith(".yaml"):
            yield name, entry.read_text(encoding="utf-8")


class _Loader:
    def __init__(self, cache: Cache) -> None:
        self.spec = Spec()
        self.cache = cache
        self.problems: list[str] = []

    def data(self, name: str, text: str, kind: type) -> Any:
        """The parsed file, or an empty `kind` after noting what is wrong with it."""
        try:
            data = self.cache.parse(text, name)
        except UsageError as error:
            self.problems.append(error.message)
            return kind()
        if not isinstance(data, kind):
            if data is not None:
                self.problems.append(
                    f"{name}:1: the file must hold a {'list' if kind is list else 'map'}"
                )
            return kind()
        self.spec.line_counts[name] = text.count("\n") + (not text.endswith("\n"))
        return data

    def model(
        self, model: type[Model], raw: Any, name: str, text: str, path: tuple[str | int, ...]
    ) -> Any:
        """`raw` as `model`, or None after noting every problem with the line that it is on."""
        try:
            return model.model_validate(raw)
        except ValidationError as error:
            lines: yaml12.Lines = {}
            yaml12.parse(text, name, lines)
            seen: set[tuple[int, str]] = set()
            for problem in error.errors(include_url=False, include_input=False):
                cause = problem.get("ctx", {}).get("error")
                loc = (*problem["loc"], *(cause.path if isinstance(cause, WrongPart) else ()))
                line = yaml12.line_of(lines, (*path, *loc))
                where, sentence = words(model, loc, problem["type"], problem["msg"])
                if (line, sentence) not in seen:
                    seen.add((line, sentence))
                    self.problems.append(
                        f"{name}:{line}: {where + ': ' if where else ''}{sentence}"
                    )
            return None

    def place(self, key: str, name: str, text: str, path: tuple[str | int, ...]) -> bool:
        """Remember where `key` is; False, with a problem noted, if it is already somewhere else."""
        if key in self.spec.places:
            here = (
                f"{name}:{_entry_line(name, text, path)}"  # by its index: the id is on both lines
            )
            self.problems.append(
                f"{here}: {key.replace(':', ' ', 1)} is defined at {self.spec.places[key]} already"
            )
            return False
        self.spec.places[key] = f"{name}:{_line(text, path)}"
        return True

    def requirements(self, name: str, text: str) -> None:
        area = name.rsplit("/", 1)[-1].removesuffix(".yaml")
        for index, raw in enumerate(self.data(name, text, list)):
            if isinstance(raw, dict) and "area" not in raw:
                raw = {**raw, "area": area}
            found = self.model(Requirement, raw, name, text, (index,))
            if found is not None and self.place(
                f"requirement:{found.id}", name, text, (index, found.id)
            ):
                self.spec.requirements[found.id] = found

    def case(self, name: str, text: str) -> None:
        before = len(self.problems)
        raw = self.data(name, text, dict)
        if not raw and len(self.problems) == before:
            self.problems.append(f"{name}:1: the file is empty: it must hold a case")
        found = self.model(Case, raw, name, text, ()) if raw else None
        if found is not None and self.place(f"case:{found.id}", name, text, ()):
            self.spec.cases[found.id] = found

    def scenario(self, name: str, text: str) -> None:
        raw = self.data(name, text, dict)
        found = self.model(Scenario, raw, name, text, ()) if raw else None
        if found is None:
            if not self.problems:
                self.problems.append(
                    f"{name}:1: the file is empty: it must hold a scenario of engine live"
                )
        elif self.place(f"case:{found.id}", name, text, ()):
            self.spec.scenarios[found.id] = found
            if found.workload is not None and found.workload not in self.spec.workloads:
                known = did_you_mean(found.workload, self.spec.workloads)
                self.problems.append(
                    f"{name}:1: scenario {found.id}: there is no workload {found.workload!r}{known}"
                )
            elif found.workload is not None:
                phases = [phase.name for phase in self.spec.workloads[found.workload].phases]
                unknown = [fault.phase for fault in found.faults if fault.phase not in phases]
                where = f"{name}:1: scenario {found.id}: workload {found.workload}"
                self.problems += [
                    f"{where} has no phase {phase!r}{did_you_mean(phase, phases)}"
                    for phase in unknown
                ]

    def workloads(self, name: str, text: str) -> None:
        for index, raw in enumerate(self.data(name, text, list)):
            found = self.model(Workload, raw, name, text, (index,))
            if found is not None and self.place(
                f"workload:{found.id}", name, text, (index, found.id)
            ):
                self.spec.workloads[found.id] = found

    def profiles(self, name: str, text: str) -> None:
        for index, raw in enumerate(self.data(name, text, list)):
            found = self.model(Profile, raw, name, text, (index,))
            if found is not None and self.place(
                f"profile:{found.id}", name, text, (index, found.id)
            ):
                self.spec.profiles[found.id] = found

    def waivers(self, name: str, text: str) -> None:
        for index, raw in enumerate(self.data(name, text, list)):
            of_rule = isinstance(raw, dict) and "rule" in raw
            found = self.model(RuleWaiver if of_rule else Waiver, raw, name, text, (index,))
            if (
                of_rule
                and found is not None
                and self.place(f"waiver:{found.rule}", name, text, (index, found.rule))
            ):
                self.spec.rule_waivers[found.rule] = found
            elif not of_rule and found is not None:
                self.spec.places[f"waiver#{len(self.spec.waivers)}"] = (
                    f"{name}:{_entry_line(name, text, (index,))}"
                )
                self.spec.waivers.append(found)

    def rules(self, name: str, text: str) -> None:
        for index, raw in enumerate(self.data(name, text, list)):
            found = self.model(Rule, raw, name, text, (index,))
            if found is not None and self.place(
                f"rule:{found.rule}", name, text, (index, found.rule)
            ):
                self.spec.rules[found.rule] = found

    def sources(self, name: str, text: str) -> None:
        for index, raw in enumerate(self.data(name, text, list)):
            found = self.model(Evidence, raw, name, text, (index,))
            if found is not None and self.place(f"source:{key(found)}", name, text, (index,)):
                self.spec.sources[key(found)] = found

    def defects(self, name: str, text: str) -> None:
        """Only the ids matter here; kvconform.dev.defects reads the rest."""
        for index, raw in enumerate(self.data(name, text, list)):
            if isinstance(raw, dict) and isinstance(raw.get("id"), str):
                if self.place(f"defect:{raw['id']}", name, text, (index, raw["id"])):
                    self.spec.defects[raw["id"]] = raw
            else:
                self.problems.append(
                    f"{name}:{_entry_line(name, text, (index,))}: a defect needs an id"
                )


def _line(text: str, path: tuple[str | int, ...]) -> int:
    """The line of the list entry with the id `path[1]`, found in the text: parsing again for every entry would be too slow."""
    if len(path) < 2:
        return 1
    for number, line in enumerate(text.splitlines(), 1):
        for wanted in (f"id: {path[1]}", f"rule: {path[1]}"):
            if line.lstrip("- {").rstrip().startswith(wanted) and line.lstrip("- {")[
                len(wanted) :
            ].strip()[:1] in ("", ",", "#", "}"):
                return number
    return 1


def _entry_line(name: str, text: str, path: tuple[str | int, ...]) -> int:
    """The line of the list entry with the index `path[0]`. Parses the text again."""
    lines: yaml12.Lines = {}
    yaml12.parse(text, name, lines)
    return yaml12.line_of(lines, path[:1])


def words(
    model: type[Model], loc: tuple[str | int, ...], kind: str, message: str
) -> tuple[str, str]:
    """Where in the entry, and what is wrong, for a reader: list places count from 1, and a field that does not exist is compared with those
    that do."""
    where = ""
    for part in loc:
        where += f" {part + 1}" if isinstance(part, int) else f"{'.' if where else ''}{part}"
    if kind != "extra_forbidden":
        return where.strip(), message.removeprefix("Value error, ")
    known = set(model.model_fields)
    if len(loc) > 1:
        parts = model.model_json_schema().get("$defs", {}).values()
        known = {name for part in parts for name in part.get("properties", ())}
    return where.strip(), f"there is no such field{did_you_mean(str(loc[-1]), sorted(known), 1)}"


def entries(spec: Spec) -> list[Entry]:
    """The entries of spec/history.yaml. SpecError for what is malformed, and for an unknown case or requirement."""
    text = (importlib.resources.files("kvconform.spec") / "history.yaml").read_text(
        encoding="utf-8"
    )
    try:
        found = [Entry.model_validate(raw) for raw in parse(text, "spec/history.yaml")]
    except ValidationError as error:
        raise SpecError(
            [f"spec/history.yaml: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"]
        ) from None
    for entry in found:
        unknown = [name for name in entry.cases if name not in spec.cases]
        unknown += [name for name in (*entry.fails, *entry.also) if name not in spec.requirements]
        if unknown:
            raise SpecError(
                [f"spec/history.yaml: {entry.id} names {', '.join(unknown)}, which does not exist"]
            )
    return found


def explained(spec: Spec) -> dict[str, str]:
    """Guarantee -> the known bug of the engine that breaks it (docs/engine-findings.md)."""
    found = [entry for entry in entries(spec) if spec.cases[entry.cases[0]].area == "findings"]
    return {name: entry.id for entry in found for name in (*entry.fails, *entry.also)}
