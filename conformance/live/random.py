# SPDX-License-Identifier: Apache-2.0
"""Random workloads of engine `live`, and how a failing one is reduced.

A workload has up to a hundred requests over the same axes as the scenarios, and is the same for the
same seed. To reduce it, requests are left out as long as it fails in the same way. The rest becomes
a scenario file, which `kvconform run CONNECTOR --engine live --case FILE` replays.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvconform.compat.environment import vllm_computes_on_gpu
from kvconform.config.settings import Settings
from kvconform.contract.loader import Spec, load_spec
from kvconform.contract.scenario import Request, Scenario, Start
from kvconform.contract.yaml12 import flow
from kvconform.errors import UsageError

REDUCED = "KVCONFORM_LIVE_REDUCED"
"""Environment variable: the directory for reduced workloads. Without it, none is reduced."""
CLAIMS = "KVCONFORM_LIVE_CLAIMS"
"""Environment variable: the directory of a campaign's claims (see `claim`)."""
TRIES = 24
"""Most tries to reduce a workload; every try starts vLLM."""
SECONDS = 600.0
"""Seconds after which no further try begins."""
WIDTH = 130
"""Length of the lines of requests in a scenario file."""


def reduce(
    scenario: Scenario,
    fails: Callable[[Scenario], bool],
    *,
    tries: int = TRIES,
    seconds: float = SECONDS,
) -> Scenario:
    """Return the smallest scenario found that still `fails`.

    It has some of the requests of this one, in their order; possibly all.
    """
    limit = time.monotonic() + seconds
    # Many failures occur with any request.
    if len(scenario.requests) > 1 and tries > 0:
        tries -= 1
        alone = _with(scenario, scenario.requests[:1])
        if fails(alone):
            return alone
    kept = list(scenario.requests)
    size = max(1, len(scenario.requests) // 2)
    while tries > 0 and time.monotonic() < limit:
        start = 0
        smaller = False
        while start < len(kept) and tries > 0 and time.monotonic() < limit:
            rest = kept[:start] + kept[start + size :]
            if not rest:
                break
            tries -= 1
            if fails(_with(scenario, rest)):
                kept = rest
                smaller = True
            else:
                start += size
        if size == 1 and not smaller:
            break
        size = max(1, size // 2)
    return _with(scenario, kept)


def _with(scenario: Scenario, requests: list[Request]) -> Scenario:
    """Return the scenario with these requests only."""
    count = f"{len(requests)} request{'s' if len(requests) != 1 else ''}"
    return scenario.model_copy(
        update={"requests": requests, "text": f"What is left of a random workload, {count}."}
    )


def claim(folder: Path, requirements: Iterable[str], scenario: str) -> dict[str, str]:
    """Return, for each requirement, the id of the workload that is reduced for its failure.

    That is the first workload of the campaign that fails the requirement. Reducing another one
    would take minutes, and show the same. Writes a note per requirement into `folder`, which is
    made if it does not exist.
    """
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
    """Write the scenario as a YAML file of few lines. Makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(scenario), encoding="utf-8")


def text_of(scenario: Scenario) -> str:
    """Return a scenario as YAML, without defaults, with several requests per line."""
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


STARTS: tuple[Start, ...] = (
    Start(blocks=64),
    Start(blocks=24, scheduling="async"),
    Start(blocks=20, budget=96),
    Start(blocks=32, budget=40, scheduling="async", priority=True),
    Start(blocks=24, prefix_caching=False),
    Start(blocks=28, spec_tokens=3),
    Start(blocks=40, scheduling="async", processes=True),
    Start(blocks=18, scheduling="async", prefix_caching=False, budget=128, priority=True),
)
"""How vLLM is started; consecutive seeds take turns."""
REQUESTS = 100
"""Requests of a workload."""
PAIR_STARTS = (Start(), *STARTS[1:6])
"""The same for pairs."""
PAIR_REQUESTS = 40
"""Requests of a pair's workload; each is computed by one engine and answered by the other."""
FAMILIES = 6
"""Number of families of prompts; those of a family begin with the same tokens."""
LONGEST = 300
"""A prompt has fewer tokens than this."""


def random_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed, live.random-SEED."""
    source = random.Random(f"kvconform live {seed}")
    start = STARTS[seed % len(STARTS)]
    requests: list[Request] = []
    at = 0
    for number in range(REQUESTS):
        at += source.choice((0, 0, 0, 1, 1, 2, 5, 12))
        family, shared, tail = _prompt(source, requests)
        requests.append(
            Request(
                own=number,
                at=at,
                family=family,
                shared=shared,
                tail=tail,
                out=source.choice((1, 2, 4, 8, 16, 24)),
                abort=source.randrange(1, 12) if source.random() < 0.12 else None,
                priority=source.randrange(3) if start.priority else 0,
                reset=source.random() < 0.04,
            )
        )
    return Scenario(
        id=f"live.random-{seed}",
        text=f"A random workload of {REQUESTS} requests.",
        start=start,
        requests=requests,
        families=seed,
        due=["loads"],
    )


def random_pair(seed: int) -> Scenario:
    """Return the scenario of a seed for a producer and a consumer, pair.random-SEED."""
    source = random.Random(f"kvconform pair {seed}")
    start = PAIR_STARTS[seed % len(PAIR_STARTS)]
    requests: list[Request] = []
    wave = 0
    for number in range(PAIR_REQUESTS):
        begins = bool(requests) and source.random() < 0.35
        wave += begins
        family, shared, tail = _prompt(source, requests)
        ends = source.random()
        requests.append(
            Request(
                own=number,
                at=wave,
                family=family,
                shared=shared,
                tail=tail,
                out=source.choice((1, 2, 4, 8, 16, 24)),
                abort=source.choice((1, 2, 3, 4, 6, 8, 12, 20, 50)) if ends < 0.15 else None,
                early=source.choice((1, 2, 3)) if ends > 0.95 else None,
                priority=source.randrange(3) if start.priority else 0,
                reset=begins and source.random() < 0.3,
            )
        )
    return Scenario(
        id=f"pair.random-{seed}",
        text=f"A random workload of {PAIR_REQUESTS} requests for a producer and a consumer.",
        pair="requests",
        start=start,
        requests=requests,
        families=seed,
        due=["loads"],
    )


def _prompt(source: random.Random, requests: list[Request]) -> tuple[int, int, int]:
    """Return a prompt: its family, the number of tokens of the family, and of tokens of its own.

    Sometimes repeats the prompt of an earlier request that has no tokens of its own.
    """
    earlier = source.choice(requests) if requests and source.random() < 0.2 else None
    if earlier is not None and not earlier.tail:
        return earlier.family, earlier.shared, 0
    family = source.randrange(FAMILIES)
    shared = source.choice(
        (0, 32, 64, 96, 128, 160, source.randrange(1, 200), source.randrange(1, 260))
    )
    tail = source.choice((0, 0, 1, 7, 32, source.randrange(1, LONGEST - shared)))
    return family, shared, tail if shared else max(1, tail)


RANDOM = re.compile(r"^(?:live|pair)\.random-(\d+)(?:\[.*\])?$")
"""The id of a random scenario, as -k and --trace accept it; the group is the seed."""


def spec_for(settings: Settings) -> Spec:
    """Return the specification for a run with these settings.

    For engine `live`, it has scenarios instead of cases, and random scenarios if they are wanted.
    Raises UsageError for settings that contradict each other, and the errors of load_spec.
    """
    live = settings.engine == "live"
    if settings.seeds and not live:
        raise UsageError("--seeds needs --engine live, which runs the random workloads")
    if live and settings.device == "cuda" and not vllm_computes_on_gpu():
        raise UsageError(
            "this vLLM computes on the CPU: replace --device cuda by --emulate-cuda,"
            " or install vLLM for CUDA on a machine with a GPU"
        )
    spec = load_spec(cases=settings.cases, live=live)
    named: list[str] = []
    if live:
        for entry in (*settings.select, settings.trace or ""):
            named += RANDOM.findall(entry)
    for seed in (*range(settings.seed, settings.seed + settings.seeds), *map(int, named)):
        for scenario in (random_scenario(seed), random_pair(seed)):
            spec.cases[scenario.id] = scenario  # type: ignore[assignment]
    return spec
