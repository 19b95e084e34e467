# SPDX-License-Identifier: Apache-2.0
"""Loads the specification (spec/) into models, and caches the parsed files between processes.

Problems are collected over all files and raised together, each as `file:line: sentence`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kvconform.contract.case import Case
from kvconform.contract.events import EVENTS
from kvconform.contract.profile import Profile, Waiver
from kvconform.contract.references import BugWaiver, Entry, Evidence, Rule, RuleWaiver, key
from kvconform.contract.requirement import Model, Requirement
from kvconform.contract.scenario import Scenario, Workload
from kvconform.contract.situation import FILE as SITUATIONS
from kvconform.contract.situation import Situation, hand_on
from kvconform.contract.yaml12 import Lines, line_of, parse
from kvconform.errors import (
    BrokenFile,
    Location,
    Problem,
    UsageError,
    WrongPart,
    close_to,
    did_you_mean,
)

_CACHE_FORMAT = 2

M = TypeVar("M", bound=Model)


@dataclass
class File:
    """A parsed file of the specification."""

    name: str
    text: str
    data: Any
    starts: list[int]
    """The line on which each entry begins, if `data` is a list."""

    def place(self, index: int | None) -> Location:
        """Return the first line of an entry of the list; with None, that of the file."""
        return Location(self.name, 1 if index is None else self.starts[index])

    @cached_property
    def lines(self) -> Lines:
        """The line of every value. Parses the text again if the data came from the cache."""
        lines: Lines = {}
        parse(self.text, self.name, lines)
        return lines


class Cache:
    """Parsed files by the hash of their text, in one JSON file in the user's cache directory.

    Parsing some 300 KB of YAML in pure Python takes more than a second. The JSON file holds exactly
    the files of the last load. It may be absent or unreadable.
    """

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

    def parse(self, text: str, name: str) -> File:
        """Return the parsed file, from the cache if it is there. UsageError if it is broken."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in self.old:
            data, starts = self.old[digest]
            file = File(name, text, data, starts)
        else:
            self.missed = True
            lines: Lines = {}
            data = parse(text, name, lines)
            starts = [lines[(i,)] for i in range(len(data))] if isinstance(data, list) else []
            file = File(name, text, data, starts)
            file.lines = lines
        self.new[digest] = [file.data, file.starts]
        return file

    def save(self) -> None:
        """Replace the JSON file atomically. A cache that cannot be written is no error."""
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
    """The specification is broken. `problems` are all that were found."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass
class Spec:
    """The whole specification.

    `places` maps `requirement:ID`, `case:ID`, `waiver#INDEX` and the like to locations. `defects`
    holds the entries by id. `own_cases` are the ids of cases that are not part of the suite but
    were read from files of the user. `scenarios` and `workloads` are what engine live runs instead
    of cases.
    """

    requirements: dict[str, Requirement] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    waivers: list[Waiver] = field(default_factory=list)
    rules: dict[str, Rule] = field(default_factory=dict)
    rule_waivers: dict[str, RuleWaiver] = field(default_factory=dict)
    bug_waivers: dict[str, BugWaiver] = field(default_factory=dict)
    sources: dict[str, Evidence] = field(default_factory=dict)
    situations: dict[str, Situation] = field(default_factory=dict)
    defects: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, Location] = field(default_factory=dict)
    line_counts: dict[str, int] = field(default_factory=dict)
    own_cases: list[str] = field(default_factory=list)
    scenarios: dict[str, Scenario] = field(default_factory=dict)
    workloads: dict[str, Workload] = field(default_factory=dict)


def load_spec(
    root: Path | None = None, *, cache: bool = True, cases: Sequence[str] = (), live: bool = False
) -> Spec:
    """Load the specification under `root`, and `cases` from files of their own.

    `root` defaults to the specification of this distribution, which is read once in a process (and
    those that it forks) until a file changes. `cache` is for another root: whether to use the cache
    of parsed files. `live`: for engine live, whose cases are the scenarios. Raises SpecError, and
    UsageError for a case's file that cannot be read.
    """
    if root is None:
        spec = _copy(_installed(_state(importlib.resources.files("kvconform.spec"))))
        hand_on(spec.situations)
    else:
        spec = _read(root, Cache(enabled=cache))
    if cases:
        _add_own(spec, cases, live)
    if live:
        spec.cases = dict(spec.scenarios)  # type: ignore[arg-type]
    return spec


def _copy(spec: Spec) -> Spec:
    """Return a specification whose containers are its own; models are immutable."""
    own = {each.name: copy(getattr(spec, each.name)) for each in fields(spec)}
    return Spec(**{**own, "defects": deepcopy(spec.defects)})


@lru_cache(maxsize=1)
def _installed(_state: object) -> Spec:
    """Return the specification of this distribution, as its files were in this state."""
    return _read(importlib.resources.files("kvconform.spec"), Cache(enabled=True))


def _state(base: Traversable) -> object:
    """Return what changes when a file below the directory does; None in an archive."""
    if not isinstance(base, Path):
        return None
    found = ((path, path.stat()) for path in sorted(base.rglob("*.yaml")))
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in found)


def _read(base: Traversable, cache: Cache) -> Spec:
    """Load the specification in this directory. SpecError if it is broken."""
    loader = _Loader(cache)
    # First, because cases name situations: a broken file would be one problem per case.
    if (base / SITUATIONS).is_file():
        loader.situations(f"spec/{SITUATIONS}", (base / SITUATIONS).read_text(encoding="utf-8"))
        if loader.problems:
            raise SpecError(loader.problems)
        hand_on(loader.spec.situations)
    for name, text in _files(base, "requirements", "spec/"):
        loader.requirements(name, text)
    for name, text in _files(base, "cases", "spec/"):
        loader.case(name, text)
    for name, text in sorted(_files(base, "live", "spec/"), key=_workloads_first):
        (loader.workloads if _is_workloads(name) else loader.scenario)(name, text)
    for take in (
        loader.profiles,
        loader.rules,
        loader.waivers,
        loader.sources,
        loader.defects,
    ):
        name = f"{take.__name__}.yaml"
        if (base / name).is_file():
            take(f"spec/{name}", (base / name).read_text(encoding="utf-8"))
    cache.save()
    if loader.problems:
        raise SpecError(loader.problems)
    return loader.spec


def _add_own(spec: Spec, cases: Sequence[str], live: bool) -> None:
    """Add cases from files of the user's own to the specification."""
    loader = _Loader(Cache(enabled=False), spec)
    for name in cases:
        if Path(name).is_dir():
            raise UsageError(f"case {name} is a directory; name a file in it")
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"case {name} cannot be read: it is not UTF-8 text") from None
        except OSError as error:
            reason = error.strerror or error
            known = Path(name).name
            hint = f"; -k {known} runs the case of that name" if known in spec.cases else ""
            raise UsageError(f"case {name} cannot be read: {reason}{hint}") from None
        (loader.scenario if live else loader.case)(name, text)
    if loader.problems:
        raise SpecError(loader.problems)
    all_cases = {**spec.cases, **spec.scenarios}
    spec.own_cases = [name for name in all_cases if spec.places[f"case:{name}"].file in cases]


def _is_workloads(name: str) -> bool:
    return name.endswith("/workloads.yaml")


def _workloads_first(file: tuple[str, str]) -> bool:
    """Return a sort key for (name, text): scenarios name workloads, which must be known."""
    return not _is_workloads(file[0])


def _files(base: Traversable, folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (name to show, text) of every .yaml file under `folder`, sorted."""
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
    """Reads files into `spec`. Each method takes one kind of file, by name and text."""

    def __init__(self, cache: Cache, spec: Spec | None = None) -> None:
        self.spec = spec or Spec()
        self.cache = cache
        self.problems: list[Problem] = []

    def problem(self, where: Location, sentence: str) -> None:
        """Note a mistake."""
        self.problems.append(Problem(where, sentence))

    def file(self, name: str, text: str, kind: type) -> File:
        """Parse a file whose data is a `kind`; note a problem and return it empty if it is not."""
        try:
            file = self.cache.parse(text, name)
        except BrokenFile as error:
            self.problems.append(error.problem)
            return File(name, text, kind(), [])
        if not isinstance(file.data, kind):
            if file.data is not None:
                expected = "list" if kind is list else "map"
                self.problem(file.place(None), f"the file must hold a {expected}")
            return File(name, text, kind(), [])
        self.spec.line_counts[name] = text.count("\n") + (not text.endswith("\n"))
        return file

    def model(self, model: type[M], raw: Any, file: File, index: int | None) -> M | None:
        """Return `raw` as `model`; None, with every problem noted with its line, if it is not."""
        try:
            return model.model_validate(raw)
        except ValidationError as error:
            entry = () if index is None else (index,)
            found: dict[tuple[int, str], list[str]] = {}
            problems = error.errors(include_url=False, include_input=False)
            meant = {
                (*loc[:-1], close)
                for loc in (each["loc"] for each in problems if each["type"] == UNKNOWN)
                for close in close_to(str(loc[-1]), sorted(_fields(model, loc)), 1)
            }
            for problem in problems:
                if problem["type"] == "missing" and problem["loc"] in meant:
                    continue  # it is misspelt, which is said
                cause = problem.get("ctx", {}).get("error")
                loc = (*problem["loc"], *(cause.path if isinstance(cause, WrongPart) else ()))
                line = line_of(file.lines, (*entry, *loc))
                where, sentence = place_and_sentence(
                    model, written(raw, loc), problem["type"], problem["msg"]
                )
                sentences = found.setdefault((line, where), [])
                if sentence not in sentences:
                    sentences.append(sentence)
            said: set[tuple[int, str]] = set()
            for (line, where), sentences in found.items():
                for sentence in _joined(sentences):
                    if (line, sentence) not in said:
                        said.add((line, sentence))
                        self.problem(Location(file.name, line), _with_place(where, sentence))
            return None

    def entries(self, model: type[M], name: str, text: str) -> Iterator[tuple[M, File, int]]:
        """Yield (entry, file, index) of each valid entry of a file that holds a list."""
        file = self.file(name, text, list)
        for index, raw in enumerate(file.data):
            found = self.model(model, raw, file, index)
            if found is not None:
                yield found, file, index

    def place(self, key: str, file: File, index: int | None) -> bool:
        """Record the place of `key`; return False, with a problem noted, if it has one already."""
        here = file.place(index)
        if key in self.spec.places:
            what = key.replace(":", " ", 1)
            self.problem(here, f"{what} is defined at {self.spec.places[key]} already")
            return False
        self.spec.places[key] = here
        return True

    def requirements(self, name: str, text: str) -> None:
        """Take spec/requirements/<area>.yaml; entries without an area get the file's."""
        area = name.rsplit("/", 1)[-1].removesuffix(".yaml")
        file = self.file(name, text, list)
        for index, raw in enumerate(file.data):
            if isinstance(raw, dict) and "area" not in raw:
                raw = {**raw, "area": area}
            found = self.model(Requirement, raw, file, index)
            if found is not None and self.place(f"requirement:{found.id}", file, index):
                self.spec.requirements[found.id] = found

    def case(self, name: str, text: str) -> None:
        """Take the file of a case."""
        before = len(self.problems)
        file = self.file(name, text, dict)
        if not file.data and len(self.problems) == before:
            self.problem(file.place(None), "the file is empty: it must hold a case")
        found = self.model(Case, file.data, file, None) if file.data else None
        if found is not None and self.place(f"case:{found.id}", file, None):
            self.spec.cases[found.id] = found

    def scenario(self, name: str, text: str) -> None:
        """Take the file of a scenario; its workload must have been taken before."""
        file = self.file(name, text, dict)
        found = self.model(Scenario, file.data, file, None) if file.data else None
        if found is None:
            if not self.problems:
                sentence = "the file is empty: it must hold a scenario of engine live"
                self.problem(file.place(None), sentence)
        elif self.place(f"case:{found.id}", file, None):
            self.spec.scenarios[found.id] = found
            if found.workload is not None:
                for sentence in self._unfit_workload(found):
                    self.problem(file.place(None), f"scenario {found.id}: {sentence}")

    def _unfit_workload(self, scenario: Scenario) -> list[str]:
        """Return what is wrong between a scenario and the workload that it names."""
        assert scenario.workload is not None
        workload = self.spec.workloads.get(scenario.workload)
        if workload is None:
            close = did_you_mean(scenario.workload, self.spec.workloads)
            return [f"there is no workload {scenario.workload!r}{close}"]
        phases = [phase.name for phase in workload.phases]
        if any(phase.restart for phase in workload.phases) and not scenario.start.processes:
            return [f"workload {workload.id} restarts vLLM, which needs start.processes"]
        return [
            f"workload {workload.id} has no phase {fault.phase!r}"
            f"{did_you_mean(fault.phase, phases)}"
            for fault in scenario.faults
            if fault.phase not in phases
        ]

    def workloads(self, name: str, text: str) -> None:
        """Take spec/live/workloads.yaml."""
        for found, file, index in self.entries(Workload, name, text):
            if self.place(f"workload:{found.id}", file, index):
                self.spec.workloads[found.id] = found

    def profiles(self, name: str, text: str) -> None:
        """Take spec/profiles.yaml."""
        for found, file, index in self.entries(Profile, name, text):
            if self.place(f"profile:{found.id}", file, index):
                self.spec.profiles[found.id] = found

    def waivers(self, name: str, text: str) -> None:
        """Take spec/waivers.yaml: waivers of rules, of bugs, and of failures."""
        file = self.file(name, text, list)
        for index, raw in enumerate(file.data):
            if isinstance(raw, dict) and "rule" in raw:
                rule = self.model(RuleWaiver, raw, file, index)
                if rule is not None and self.place(f"waiver:{rule.rule}", file, index):
                    self.spec.rule_waivers[rule.rule] = rule
                continue
            if isinstance(raw, dict) and "bug" in raw:
                bug = self.model(BugWaiver, raw, file, index)
                if bug is not None and self.place(f"waiver:{bug.bug}", file, index):
                    self.spec.bug_waivers[bug.bug] = bug
                continue
            waiver = self.model(Waiver, raw, file, index)
            if waiver is not None:
                self.spec.places[f"waiver#{len(self.spec.waivers)}"] = file.place(index)
                self.spec.waivers.append(waiver)

    def rules(self, name: str, text: str) -> None:
        """Take spec/rules.yaml."""
        for found, file, index in self.entries(Rule, name, text):
            if self.place(f"rule:{found.rule}", file, index):
                self.spec.rules[found.rule] = found

    def sources(self, name: str, text: str) -> None:
        """Take spec/sources.yaml."""
        for found, file, index in self.entries(Evidence, name, text):
            if self.place(f"source:{key(found)}", file, index):
                self.spec.sources[key(found)] = found

    def situations(self, name: str, text: str) -> None:
        """Take spec/situations.yaml; cases are checked against it, so it comes first."""
        for found, file, index in self.entries(Situation, name, text):
            if self.place(f"situation:{found.id}", file, index):
                self.spec.situations[found.id] = found

    def defects(self, name: str, text: str) -> None:
        """Take the ids of spec/defects.yaml; kvconform.dev.defects reads the rest."""
        file = self.file(name, text, list)
        for index, raw in enumerate(file.data):
            if isinstance(raw, dict) and isinstance(raw.get("id"), str):
                if self.place(f"defect:{raw['id']}", file, index):
                    self.spec.defects[raw["id"]] = raw
            else:
                self.problem(file.place(index), "a defect needs an id")


def written(raw: Any, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return a pydantic error's place without the parts below a value that the file has as one.

    A short form (`prompt: 9`) is turned into a map, whose fields are not in the file.
    """
    value = raw
    for number, part in enumerate(loc):
        if not isinstance(value, dict | list):
            return loc[:number]
        inside = part in value if isinstance(value, dict) else part in range(len(value))
        if inside:  # else it is the tag of a union
            value = value[part]  # type: ignore[index]
    return loc


MUST_BE = "must be "
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "dict": "a map",
    "model": "a map",
    "model_attributes": "a map",
}
"""Types of YAML in words, by the first part of pydantic's types of errors."""


def in_words(kind: str, message: str) -> str:
    """Return what pydantic says of a value, in words. `kind`: its type of error."""
    if kind == "missing":
        return "is missing"
    name = kind.removesuffix("_type").removesuffix("_parsing")
    if name != kind and name in _TYPES:
        return MUST_BE + _TYPES[name]
    return message.removeprefix("Value error, ").replace("Input should be ", MUST_BE, 1)


def _joined(sentences: Sequence[str]) -> list[str]:
    """Return sentences about one value; what it may be is one sentence."""
    kinds = [each.removeprefix(MUST_BE) for each in sentences if each.startswith(MUST_BE)]
    others = [each for each in sentences if not each.startswith(MUST_BE)]
    return [*([MUST_BE + ", or ".join(kinds)] if kinds else []), *others]


def _with_place(where: str, sentence: str) -> str:
    """Return a sentence about the value at `where`."""
    if not where:
        return sentence
    direct = sentence.startswith(MUST_BE) or sentence == "is missing"
    return f"{where} {sentence}" if direct else f"{where}: {sentence}"


UNKNOWN = "extra_forbidden"
"""Pydantic's type of error for a field that does not exist."""
PARTS = {"steps": "step", "expect": "expectation"}
"""Lists of a case whose entries are named by their operation."""


def _fields(model: type[Model], loc: tuple[str | int, ...]) -> set[str]:
    """Return the fields that exist at a pydantic error's place: of the model or of its parts."""
    if len(loc) <= 1:
        return set(model.model_fields)
    parts = model.model_json_schema().get("$defs", {}).values()
    return {name for part in parts for name in part.get("properties", ())}


def place_and_sentence(
    model: type[Model], loc: tuple[str | int, ...], kind: str, message: str
) -> tuple[str, str]:
    """Return (place within the entry, sentence) of a pydantic error, for a reader.

    Positions in lists count from 1; a step is named by its operation. Tags of unions, which
    pydantic puts into its place, are left out. A field that does not exist is compared with those
    that do.
    """
    known = _fields(model, loc)
    where = ""
    rest = list(loc)
    if len(loc) > 3 and loc[0] in PARTS and isinstance(loc[1], int):
        where = f"{PARTS[str(loc[0])]} {loc[1] + 1} ({loc[2]}):"
        fields = [part for part in loc[3:-1] if isinstance(part, int) or part in known - {loc[2]}]
        rest = [*fields, *([loc[-1]] if loc[-1] not in fields[-1:] else [])]
        if rest and isinstance(rest[0], str):
            where, rest = f"{where} {rest[0]}", rest[1:]
    elif len(loc) > 1 and loc[0] in PARTS and isinstance(loc[1], int):
        where, rest = f"{PARTS[str(loc[0])]} {loc[1] + 1}", list(loc[2:])
        if rest and kind != UNKNOWN:
            where, rest = f"{where} ({rest[0]})", rest[1:]
    for part in rest:
        if isinstance(part, int):
            where += f" {part + 1}"
        else:
            where += f".{part}" if where else part
    where = where.strip()
    if kind != UNKNOWN:
        return where, in_words(kind, message)
    if loc[-1] in known:  # a field of something else: its name is no correction
        return where, "there is no such field here"
    return where, f"there is no such field{did_you_mean(str(loc[-1]), sorted(known), 1)}"


def entries(spec: Spec) -> list[Entry]:
    """Return the entries of spec/history.yaml.

    SpecError if one is malformed, or names a case or requirement that does not exist.
    """
    name = "spec/history.yaml"
    text = (importlib.resources.files("kvconform.spec") / "history.yaml").read_text(
        encoding="utf-8"
    )
    try:
        found = [Entry.model_validate(raw) for raw in parse(text, name)]
    except ValidationError as error:
        problem = error.errors()[0]
        sentence = f"{problem['loc']}: {problem['msg']}"
        raise SpecError([Problem(Location(name), sentence)]) from None
    for entry in found:
        unknown = [case for case in entry.cases if case not in spec.cases]
        unknown += [entry.mark.event] if entry.mark and entry.mark.event not in EVENTS else []
        unknown += [req for req in (*entry.fails, *entry.also) if req not in spec.requirements]
        if unknown:
            sentence = f"{entry.id} names {', '.join(unknown)}, which does not exist"
            raise SpecError([Problem(Location(name), sentence)])
    return found


def explained(spec: Spec) -> dict[str, list[Entry]]:
    """Map guarantees to the known bugs of the engine that break them (docs/engine-findings.md)."""
    found: dict[str, list[Entry]] = {}
    for entry in entries(spec):
        if spec.cases[entry.cases[0]].area == "findings":
            for name in (*entry.fails, *entry.also):
                found.setdefault(name, []).append(entry)
    return found
