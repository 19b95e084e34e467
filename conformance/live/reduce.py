# SPDX-License-Identifier: Apache-2.0
"""Makes a random workload that fails smaller: requests are left out as long as it fails in the same way. What is left becomes a scenario
file, which `kvconform run CONNECTOR --engine live --case FILE` replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvconform.live.scenario import Request, Scenario
from kvconform.yamlio import flow

REDUCED = "KVCONFORM_LIVE_REDUCED"
"""Environment variable: the directory for the files of reduced workloads; without it none is reduced."""
CLAIMS = "KVCONFORM_LIVE_CLAIMS"
"""Environment variable: the directory of a campaign's notes on which workload is made small for what (`claim`)."""
TRIES = 24
SECONDS = 600.0
"""How long a workload is reduced at most; every try starts vLLM."""
WIDTH = 130


def reduce(scenario: Scenario, fails: Callable[[Scenario], bool], *, tries: int = TRIES, seconds: float = SECONDS) -> Scenario:
    """The smallest scenario found that still `fails`, with some of the requests of this one, in their order. It may be this one itself."""
    limit = time.monotonic() + seconds
    if len(scenario.requests) > 1 and tries > 0:  # much that goes wrong does so whatever is asked
        tries -= 1
        if fails(alone := _with(scenario, scenario.requests[:1])):
            return alone
    kept, size = list(scenario.requests), max(1, len(scenario.requests) // 2)
    while tries > 0 and time.monotonic() < limit:
        start, smaller = 0, False
        while start < len(kept) and tries > 0 and time.monotonic() < limit:
            rest = kept[:start] + kept[start + size :]
            if not rest:
                break
            tries -= 1
            if fails(_with(scenario, rest)):
                kept, smaller = rest, True
            else:
                start += size
        if size == 1 and not smaller:
            break
        size = max(1, size // 2)
    return _with(scenario, kept)


def _with(scenario: Scenario, requests: list[Request]) -> Scenario:
    count = f"{len(requests)} request{'s' if len(requests) != 1 else ''}"
    return scenario.model_copy(update={"requests": requests, "text": f"What is left of a random workload, {count}."})


def claim(folder: Path, requirements: Iterable[str], scenario: str) -> dict[str, str]:
    """Who makes the failure of each requirement small: the first workload of the campaign that fails it, so {requirement: its id}.
    Another one that fails the same would cost minutes, and show the same. Writes a note for each into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for requirement in requirements:
        note = folder / f".{requirement}"
        try:
            with note.open("x", encoding="utf-8") as file:
                file.write(scenario)
            found[requirement] = scenario
        except FileExistsError:
            found[requirement] = note.read_text(encoding="utf-8")
    return found


def write(scenario: Scenario, path: Path) -> None:
    """The scenario as a YAML file of few lines. Makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(scenario), encoding="utf-8")


def text_of(scenario: Scenario) -> str:
    """YAML: what is not a default, several requests to a line."""
    lines = [f"id: {scenario.id}", f"text: {scenario.text}"]
    lines += [f"pair: {scenario.pair}"] if scenario.pair else []
    start = flow(scenario.start.model_dump(exclude_defaults=True))
    lines += [f"start: {start}"] if start != "{}" else []
    lines += [f"families: {scenario.families}"] if scenario.families is not None else []
    lines += [f"due: [{', '.join(scenario.due)}]"] if scenario.due else []
    lines += ["requests: ["]
    row = "  "
    for request in scenario.requests:
        part = flow(request.model_dump(exclude_defaults=True)) + ", "
        if len(row) + len(part) > WIDTH:
            lines.append(row.rstrip())
            row = "  "
        row += part
    return "\n".join([*lines, row.rstrip().rstrip(","), "]"]) + "\n"
