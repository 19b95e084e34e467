# SPDX-License-Identifier: Apache-2.0
"""The selection of the variants to run and the requirements to judge, and its shards.

The controller and every worker select for themselves. Their results are equal, because a selection
depends on nothing but its arguments.

`--shard 2/4` runs the second of four parts of the selected runs, for machines that share the work.
The parts depend on the selection alone, so that they are the same on every machine and with any
number of workers. `kvconform merge` (kvconform.report.merge) joins the reports, and gives the
verdict.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.resources
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable

from kvconform.compat.installed import runs_on
from kvconform.config.settings import Settings, Shard, parse
from kvconform.contract.case import Case, Variant
from kvconform.contract.loader import Spec
from kvconform.contract.profile import runs_in, unknown_requirements
from kvconform.contract.profile import select as select_profile
from kvconform.contract.requirement import Requirement
from kvconform.errors import UsageError, did_you_mean
from kvconform.words import many

ELSEWHERE = {"hash-seed": 8000, "second-process": 500}
"""Milliseconds that a related run in another process takes, by relation."""


def cost(variant: Variant) -> int:
    """Return an estimate of a run's time, related runs included. Only ratios matter."""
    case = variant.case
    return (
        25
        + 6 * len(case.steps) * (1 + len(case.relations))
        + sum(ELSEWHERE.get(name, 0) for name in case.relations)
    )


def part(variants: Sequence[Variant], shard: Shard) -> list[Variant]:
    """Return the runs of `shard`, in their order.

    The costliest runs are assigned first, each to the part with the least total cost so far.
    UsageError if there are fewer runs than parts.
    """
    if len(variants) < shard.count:
        runs = "1 run is" if len(variants) == 1 else f"{len(variants)} runs are"
        raise UsageError(
            f"--shard {shard}: only {runs} selected, which is too few for {shard.count} shards"
        )
    loads = [0] * shard.count
    mine = set()
    for variant in sorted(variants, key=lambda variant: (-cost(variant), variant.id)):
        lightest = loads.index(min(loads))
        loads[lightest] += cost(variant)
        if lightest == shard.number - 1:
            mine.add(variant.id)
    return [variant for variant in variants if variant.id in mine]


def suite_digest() -> str:
    """Return 12 hexadecimal digits for the specification and the code that drives and judges.

    They identify this kvconform; its version does not change from commit to commit. The tools of
    development and their data do not count.
    """
    found = hashlib.sha256()
    packages = {
        "": ".py",
        ".spec": ".yaml",
        ".refimpl": ".py",
        ".kernels": ".py",
        ".connectors": ".toml",
    }
    for package, suffix in ((f"kvconform{name}", suffix) for name, suffix in packages.items()):
        _digest(importlib.resources.files(package), suffix, package, found)
    return found.hexdigest()[:12]


def _digest(folder: Traversable, suffix: str, name: str, found: hashlib._Hash) -> None:
    """Add the files under `folder` to the hash `found`, sorted by name.

    Only files with `suffix` count, not those that installers and interpreters leave there.
    """
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name not in (
            "__pycache__",
            "spec",
            "refimpl",
            "kernels",
            "connectors",
            "fixtures",
            "dev",
            "mutants",
        ):
            _digest(entry, suffix, f"{name}/{entry.name}", found)
        elif entry.name.endswith(suffix) and entry.is_file():
            found.update(f"{name}/{entry.name}\0".encode())
            found.update(entry.read_bytes().replace(b"\r\n", b"\n"))


@dataclass
class Selection:
    """The variants to run and the requirements to judge.

    - `judged`: requirements to judge.
    - `shown`: requirements whose rows are wanted.
    - `switched_off`: variants that the operator disabled; `variants` does not contain them.
    - `narrowed`: whether part of the profile was left out, so that missing rows mean nothing.
    - `shard`: the part of all runs that `variants` and `switched_off` are.
    - `beyond`: cases and requirements of other vLLM releases.
    - `without`: number of runs left out because their model runner does not support connectors yet.
    - `beyond_profile`: number of runs that the profile leaves out, and one that extends it has.
    - `runless`: cases that are named by id and have no run with this engine and scheduling.
    """

    variants: list[Variant]
    judged: list[str]
    shown: list[str]
    disabled: list[str]
    switched_off: list[Variant] = field(default_factory=list)
    narrowed: bool = False
    shard: Shard | None = None
    beyond: tuple[Sequence[str], Sequence[str]] = ((), ())
    without: int = 0
    beyond_profile: int = 0
    runless: Sequence[str] = ()

    @property
    def partial(self) -> bool:
        """Whether runs are missing that are part of the profile: left out, or in another shard."""
        return self.narrowed or self.shard is not None

    def order(self) -> dict[str, int]:
        """Return the position of each case."""
        ids = dict.fromkeys(variant.case.id for variant in (*self.variants, *self.switched_off))
        return {name: position for position, name in enumerate(ids)}


def narrows(settings: Settings) -> bool:
    """Return whether settings leave out part of the profile, other than by cases of one's own."""
    return (
        bool(settings.select)
        or settings.engine != "all"
        or settings.scheduling != "all"
        or settings.slow != "all"
        or settings.trace is not None
    )


def select(spec: Spec, settings: Settings, vllm: str) -> Selection:
    """Select by the settings. UsageError for unknown ids, or if nothing is left to run."""
    if settings.profile not in spec.profiles:
        close = did_you_mean(settings.profile, spec.profiles)
        close = close or f"; the profiles are {', '.join(spec.profiles)}"
        raise UsageError(f"there is no profile {settings.profile!r}{close}")
    known = vllm != "unknown"
    in_force = [req for req in spec.requirements.values() if not known or req.in_force(vllm)]
    judged, cases = select_profile(spec.profiles, settings.profile, in_force, spec.cases.values())
    _check_disabled(spec, settings.disable)
    _check_expected(spec, settings)
    wanted_cases, wanted_requirements, wanted_variants = _wanted(spec, settings)
    if wanted_cases is not None:
        cases = [name for name in spec.cases if name in wanted_cases]
    later = [name for name in cases if known and not spec.cases[name].in_force(vllm)]
    cases = [name for name in cases if name not in later]
    shown = judged
    if wanted_requirements is not None:
        named = [name for name in spec.requirements if name in wanted_requirements]
        judged = list(dict.fromkeys([*judged, *named]))
        # Those that are named along with a case do not hide the others.
        shown = named if wanted_cases is None else judged
    found = Selection([], judged, shown, _matching(settings.disable, spec.requirements))
    # The user's own cases are run instead of the profile's.
    found.narrowed = narrows(settings) or bool(spec.own_cases)
    not_in_force = [
        name for name, req in spec.requirements.items() if known and not req.in_force(vllm)
    ]
    found.beyond = (later, not_in_force)
    off = set(_matching(settings.disable, spec.cases))
    # If a case, an engine or a scheduling is named, all its runs are made.
    by_profile = wanted_cases is None and settings.engine == settings.scheduling == "all"
    for name in cases:
        for variant in spec.cases[name].variants(
            settings.engines, settings.schedulings, settings.slows
        ):
            if known and not runs_on(variant.runner, vllm):
                found.without += 1
                continue
            if by_profile and not runs_in(spec.profiles, settings.profile, variant):
                found.beyond_profile += 1
                continue
            if (
                wanted_variants is None
                or variant.id in wanted_variants
                or variant.case.id in wanted_variants
            ):
                (found.switched_off if name in off else found.variants).append(variant)
    if wanted_cases is None:
        found.beyond_profile += sum(
            not known or runs_on(variant.runner, vllm)
            for case in _left_out(spec, settings.profile, {*cases, *later})
            if not known or case.in_force(vllm)
            for variant in case.variants(settings.engines, settings.schedulings, settings.slows)
        )
    if not found.variants and not found.switched_off:
        raise UsageError(
            f"nothing to run: no selected case runs on engine {settings.engine} "
            f"with scheduling {settings.scheduling}"
        )
    ran = found.order()
    found.runless = [name for name in cases if name in settings.select and name not in ran]
    if settings.shard is not None:
        found.shard = parse(settings.shard)
        found.variants = part(found.variants, found.shard)
        if found.shard.number != 1:  # they are not run: the first shard reports them all
            found.switched_off = []
    return found


def _left_out(spec: Spec, profile: str, mine: Collection[str]) -> list[Case]:
    """Return the cases that a profile, whose cases are `mine`, leaves to one that extends it."""
    wider = [each for each in spec.profiles.values() if profile in each.includes]
    return [
        case
        for case in spec.cases.values()
        if case.id not in mine and any(each.has_case(case) for each in wider)
    ]


def _matching(globs: Iterable[str], names: Iterable[str]) -> list[str]:
    globs = list(globs)
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def _wanted(
    spec: Spec, settings: Settings
) -> tuple[set[str] | None, set[str] | None, set[str] | None]:
    """Return (cases, requirements, variants and whole cases) named by -k and --trace.

    A part is None if nothing of that sort was named.
    """
    cases: set[str] = set()
    requirements: set[str] = set()
    variants: set[str] = set()
    entries = [*settings.select, *([settings.trace] if settings.trace else [])] or spec.own_cases
    for entry in entries:
        run = entry.partition("[")[0] if entry.endswith("]") else None
        if run is not None and run in spec.cases:
            runs = [variant.id for variant in spec.cases[run].variants(slow=settings.slows)]
            if entry not in runs:
                raise UsageError(f"case {run} has no run {entry}; it has {', '.join(runs)}")
            cases.add(run)
            variants.add(entry)
            continue
        some_cases = {case.id for case in spec.cases.values() if _names(entry, case)}
        some_requirements = {req.id for req in spec.requirements.values() if _names(entry, req)}
        if entry == settings.trace and not some_cases:
            raise UsageError(
                f"--trace: there is no case {entry!r}{did_you_mean(entry, spec.cases)}"
            )
        if not some_cases and not some_requirements:
            if close := _globs(entry, [*spec.cases, *spec.requirements]):
                raise UsageError(f"-k {entry}: there is no such case, requirement or area{close}")
            is_area = not set(entry) & set(".*?[")  # ids have a dot, globs have wildcards
            if is_area:
                areas = dict.fromkeys(
                    [req.area for req in spec.requirements.values()]
                    + [case.area for case in spec.cases.values()]
                )
                hint = did_you_mean(entry, areas) or f"; the areas are {', '.join(areas)}"
                raise UsageError(f"there is no area, case or requirement {entry!r}{hint}")
            close = did_you_mean(entry, [*spec.cases, *spec.requirements])
            raise UsageError(f"there is no case or requirement {entry!r}{close}")
        cases |= some_cases
        variants |= some_cases
        if not some_cases:
            requirements |= some_requirements
    return cases or None, requirements or None, variants or None


def _globs(entry: str, known: Iterable[str]) -> str:
    """Return a hint at a glob that contains the entry and matches something; "" if none does."""
    word = entry.strip("*").removesuffix(".")
    found = _matching([glob := f"*{word}*"], known) if word else []
    if not found or not word.replace("-", "").replace(".", "").isalnum():
        return ""
    return f"; did you mean '{glob}', which matches {many(len(found), 'id')}, such as {found[0]}?"


def _names(entry: str, item: Case | Requirement) -> bool:
    """Return whether an entry of -k names a case or requirement: by id, area or glob over ids."""
    return entry in (item.id, item.area) or fnmatch.fnmatchcase(item.id, entry)


def _check_disabled(spec: Spec, disable: Iterable[str]) -> None:
    for glob in disable:
        if not _matching([glob], [*spec.requirements, *spec.cases]):
            close = did_you_mean(glob, [*spec.requirements, *spec.cases])
            raise UsageError(f"disable: there is no requirement or case {glob!r}{close}")


def _check_expected(spec: Spec, settings: Settings) -> None:
    for name in unknown_requirements(settings.expected_failures, spec.requirements):
        close = did_you_mean(name, spec.requirements)
        raise UsageError(
            f"expected failure of {name!r} matches nothing: there is no such requirement{close}"
        )
    for entry in settings.expected_failures:
        if not _matching([entry.case], spec.cases):
            close = did_you_mean(entry.case, spec.cases)
            raise UsageError(
                f"expected failure on case {entry.case!r} matches nothing: "
                f"there is no such case{close}"
            )
