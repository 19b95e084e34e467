# SPDX-License-Identifier: Apache-2.0
"""Real bugs in the original code: released connectors and engines that the suite must still find wrong.

`spec/history.yaml` lists them with the vLLM releases that have them; `nox -s history` installs those releases one after the other and runs
this module in each. It judges the entries of the installed release, and fails when one of them passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconform.environment import vllm_version
from kvconform.load import Spec, SpecError, load_spec
from kvconform.requirement import Id, Model, version_key
from kvconform.yamlio import parse


class Entry(Model):
    """One bug as it was released. Every id in `fails` must FAIL in at least one run of `cases` on each of `releases`."""

    id: Id
    bug: Annotated[str, Field(pattern=r"^(B\d{3}|R\d{3})$", description="of the list of bugs, or the rule of the contract that was broken")]
    text: str
    note: str | None = Field(None, description="what speaks for the engine, or bounds the finding; shown with it")
    releases: list[Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]] = Field(min_length=1)
    connector: str
    extra_config: dict[str, Any] = {}
    half: Literal["both", "scheduler"] = "both"
    scheduling: list[Literal["sync", "async"]] = ["sync"]
    runner: Literal["v1", "v2"] = "v1"
    cases: list[str] = Field(min_length=1)
    fails: list[Id] = Field(min_length=1)
    also: list[Id] = Field([], description="guarantees that go with it in other workloads; `kvconform explore` names the bug beside them")


def entries(spec: Spec) -> list[Entry]:
    """The entries of spec/history.yaml. SpecError for what is malformed, and for an unknown case or requirement."""
    text = (importlib.resources.files("kvconform.spec") / "history.yaml").read_text(encoding="utf-8")
    try:
        found = [Entry.model_validate(raw) for raw in parse(text, "spec/history.yaml")]
    except ValidationError as error:
        raise SpecError([f"spec/history.yaml: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"]) from None
    for entry in found:
        unknown = [name for name in entry.cases if name not in spec.cases]
        unknown += [name for name in (*entry.fails, *entry.also) if name not in spec.requirements]
        if unknown:
            raise SpecError([f"spec/history.yaml: {entry.id} names {', '.join(unknown)}, which does not exist"])
    return found


def explained(spec: Spec) -> dict[str, str]:
    """Guarantee -> the known bug of the engine that breaks it (docs/engine-findings.md)."""
    found = [entry for entry in entries(spec) if spec.cases[entry.cases[0]].area == "findings"]
    return {name: entry.id for entry in found for name in (*entry.fails, *entry.also)}


def of_release(known: list[Entry], version: str) -> list[Entry]:
    """The entries that name a release (`0.26.0+cpu` is 0.26.0)."""
    return [entry for entry in known if version_key(version) in map(version_key, entry.releases)]


def as_of(entry: Entry, spec: Spec, release: str) -> Spec:
    """What `release` is judged by: what is in force there, and what `entry` names. What was mended later was as wrong before."""
    chosen = {name: req for name, req in spec.requirements.items() if name in entry.fails or req.in_force(release)}
    return dataclasses.replace(spec, requirements=chosen)


def examine(entry: Entry, spec: Spec, release: str, tmp: Path) -> dict[str, str]:
    """Requirement id -> what its first FAIL says, over all runs of the entry. Changes nothing outside `tmp`."""
    from kvconform.run import run_and_judge
    from kvconform.target import Target

    target = Target(entry.connector, dict(entry.extra_config), half=entry.half)
    found: dict[str, str] = {}
    for number, variant in enumerate(_variants(entry, spec)):
        report = run_and_judge(variant, target, as_of(entry, spec, release), seed=0, tmp=tmp / str(number))
        if report.harness_error is not None:
            found.setdefault("harness", f"{variant.id}: {report.harness_error.strip().splitlines()[-1]}")
        for row in report.rows:
            if row["verdict"] == "FAIL":
                found.setdefault(row["requirement"], f"{variant.id}, step {row.get('step')}: {row.get('message')}")
    return found


def _variants(entry: Entry, spec: Spec) -> Iterator[Any]:
    for name in entry.cases:
        variants = spec.cases[name].variants(["vllm"], entry.scheduling)
        yield from (variant for variant in variants if variant.runner == entry.runner)


def main(arguments: list[str] | None = None) -> int:
    """Examine the entries of the installed release; 0 if each is found, else 1."""
    parser = argparse.ArgumentParser(prog="python -m kvconform.history", description=__doc__)
    parser.add_argument("id", nargs="*", help="entries to examine (default: all of the installed release)")
    parser.add_argument("--releases", action="store_true", help="print the releases that spec/history.yaml names, and do nothing")
    parser.add_argument("--json", type=Path, help="append the results to this file, one line each")
    options = parser.parse_args(arguments)
    spec = load_spec()
    known = entries(spec)
    if options.releases:
        print("\n".join(sorted({release for entry in known for release in entry.releases}, key=version_key)))
        return 0
    release = (vllm_version() or "0").partition("+")[0]
    mine = [entry for entry in of_release(known, release) if not options.id or entry.id in options.id]
    table, missed = Table("bug", "entry", "requirement", "what it says", title=f"vLLM {release}"), 0
    for entry in mine:
        with tempfile.TemporaryDirectory(prefix="kvconform-history-") as tmp:
            found = examine(entry, spec, release, Path(tmp))
        absent = [name for name in entry.fails if name not in found]
        missed += bool(absent)
        shown = [*entry.fails, *(["harness"] if absent and "harness" in found else [])]
        for name in shown:
            table.add_row(entry.bug, entry.id, name, escape(found[name]) if name in found else "[red]not found[/]")
        if options.json:
            line = {"release": release, "id": entry.id, "found": {name: found[name] for name in entry.fails if name in found}}
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
    console = Console(width=160)
    console.print(table)
    console.print(f"{len(mine) - missed} of {len(mine)} bugs found in vLLM {release}")
    return 1 if missed or not mine else 0


if __name__ == "__main__":
    sys.exit(main())
