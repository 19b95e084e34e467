# SPDX-License-Identifier: Apache-2.0
"""Shards: `--shard 2/4` makes the second of four parts of the selected runs, for machines that share the work.

Which run is in which part depends on the selection alone, so that it is the same on every machine and with any number of workers.
`kvconform merge` (kvconform.report.merge) joins their reports, and gives the answer.


What a run consists of: the variants to run and the requirements to judge, selected from the specification by the settings.

The controller and every worker select for themselves and must come to the same result: it depends on nothing but its arguments.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import importlib.resources
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable

from kvconform.compat.installed import runs_on
from kvconform.config.settings import Settings, Shard, parse
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.contract.profile import select as select_profile
from kvconform.contract.profile import unknown_requirements
from kvconform.errors import UsageError

ELSEWHERE = {"hash-seed": 8000, "second-process": 500}
"""Milliseconds that a related run in another process takes."""


def cost(variant: Variant) -> int:
    """About how many milliseconds a run takes, those included that it is compared with. Only ratios matter."""
    case = variant.case
    return (
        25
        + 6 * len(case.steps) * (1 + len(case.relations))
        + sum(ELSEWHERE.get(name, 0) for name in case.relations)
    )


def part(variants: Sequence[Variant], shard: Shard) -> list[Variant]:
    """The runs of `shard`, in their order: the costliest first, each goes to the part that has least to do so far.

    UsageError where there are fewer runs than parts.
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
    """12 hexadecimal digits of this kvconform: its specification and the code that drives and judges. The version alone does not change
    from commit to commit."""
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
    """Take in the files under `folder`, sorted by name. What installers and interpreters leave there does not count."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name not in (
            "__pycache__",
            "spec",
            "refimpl",
            "kernels",
            "connectors",
            "fixtures",
        ):
            _digest(entry, suffix, f"{name}/{entry.name}", found)
        elif entry.name.endswith(suffix) and entry.is_file():
            found.update(f"{name}/{entry.name}\0".encode())
            found.update(entry.read_bytes().replace(b"\r\n", b"\n"))


@dataclass
class Selection:
    """`judged`: requirements to judge; `shown`: those whose rows are wanted; `switched_off`: variants that the operator disabled (not in
    `variants`); `narrowed`: whether part of the profile was left out, so that missing rows mean nothing; `shard`: the part of all this that
    `variants` and `switched_off` are; `beyond`: cases and requirements of other vLLM releases; `without`: runs on a model runner that
    does not know connectors yet."""

    variants: list[Variant]
    judged: list[str]
    shown: list[str]
    disabled: list[str]
    switched_off: list[Variant] = field(default_factory=list)
    narrowed: bool = False
    shard: Shard | None = None
    beyond: tuple[Sequence[str], Sequence[str]] = ((), ())
    without: int = 0

    @property
    def partial(self) -> bool:
        """Whether what did not happen means nothing: it may happen in what was left out, or in another shard."""
        return self.narrowed or self.shard is not None

    def order(self) -> dict[str, int]:
        """Position of each case."""
        ids = dict.fromkeys(variant.case.id for variant in (*self.variants, *self.switched_off))
        return {name: position for position, name in enumerate(ids)}


def select(spec: Spec, settings: Settings, vllm: str) -> Selection:
    """The selection. UsageError for ids that do not exist, and when nothing is left to run."""
    if settings.profile not in spec.profiles:
        raise UsageError(
            f"there is no profile {settings.profile!r}{_close(settings.profile, spec.profiles)}"
        )
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
    if (
        wanted_requirements is not None and wanted_cases is None
    ):  # beside a case, naming a requirement hides nothing
        shown = [name for name in spec.requirements if name in wanted_requirements]
        judged = list(dict.fromkeys([*judged, *shown]))
    found = Selection([], judged, shown, _matching(settings.disable, spec.requirements))
    found.narrowed = (
        bool(
            settings.select or spec.own_cases
        )  # a case of one's own is run instead of the profile's
        or settings.engine != "all"
        or settings.scheduling != "all"
        or settings.slow != "all"
        or settings.trace is not None
    )
    found.beyond = (
        later,
        [
            name
            for name in spec.requirements
            if known and not spec.requirements[name].in_force(vllm)
        ],
    )
    off = set(_matching(settings.disable, spec.cases))
    for name in cases:
        for variant in spec.cases[name].variants(
            settings.engines, settings.schedulings, settings.slows
        ):
            if known and not runs_on(variant.runner, vllm):
                found.without += 1
                continue
            if (
                wanted_variants is None
                or variant.id in wanted_variants
                or variant.case.id in wanted_variants
            ):
                (found.switched_off if name in off else found.variants).append(variant)
    if not found.variants and not found.switched_off:
        raise UsageError(
            f"nothing to run: no selected case runs on engine {settings.engine} with scheduling {settings.scheduling}"
        )
    if settings.shard is not None:
        found.shard = parse(settings.shard)
        found.variants = part(found.variants, found.shard)
        found.switched_off = (
            found.switched_off if found.shard.number == 1 else []
        )  # they cost nothing
    return found


def _matching(globs: Iterable[str], names: Iterable[str]) -> list[str]:
    globs = list(globs)
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def _wanted(
    spec: Spec, settings: Settings
) -> tuple[set[str] | None, set[str] | None, set[str] | None]:
    """(cases, requirements, variants and whole cases) named by -k and --trace; None where nothing of that sort was named."""
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
            raise UsageError(f"--trace: there is no case {entry!r}{_close(entry, spec.cases)}")
        if not some_cases and not some_requirements:
            if not set(entry) & set(".*?["):  # an id has a dot
                areas = dict.fromkeys(
                    [req.area for req in spec.requirements.values()]
                    + [case.area for case in spec.cases.values()]
                )
                known = f"; there are {', '.join(areas)}"
                raise UsageError(f"there is no area {entry!r}{_close(entry, areas) or known}")
            raise UsageError(
                f"there is no case or requirement {entry!r}{_close(entry, [*spec.cases, *spec.requirements])}"
            )
        cases |= some_cases
        variants |= some_cases
        if not some_cases:
            requirements |= some_requirements
    return cases or None, requirements or None, variants or None


def _names(entry: str, item: object) -> bool:
    """Whether an entry of -k names a case or requirement: by id, area or glob over ids."""
    identifier, area = getattr(item, "id", ""), getattr(item, "area", "")
    return entry in (identifier, area) or fnmatch.fnmatchcase(identifier, entry)


def _close(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 3, 0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _check_disabled(spec: Spec, disable: Iterable[str]) -> None:
    for glob in disable:
        if not _matching([glob], [*spec.requirements, *spec.cases]):
            raise UsageError(
                f"disable: there is no requirement or case {glob!r}{_close(glob, [*spec.requirements, *spec.cases])}"
            )


def _check_expected(spec: Spec, settings: Settings) -> None:
    for name in unknown_requirements(settings.expected_failures, spec.requirements):
        raise UsageError(
            f"expected failure of {name!r} matches nothing: there is no such requirement{_close(name, spec.requirements)}"
        )
    for entry in settings.expected_failures:
        if not _matching([entry.case], spec.cases):
            raise UsageError(
                f"expected failure on case {entry.case!r} matches nothing: there is no such case{_close(entry.case, spec.cases)}"
            )
