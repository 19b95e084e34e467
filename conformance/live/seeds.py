# SPDX-License-Identifier: Apache-2.0
"""Random workloads: about a hundred requests over the same axes as the scenarios, the same for the same seed."""

from __future__ import annotations

import random

from kvconform.live.scenario import Request, Scenario, Start

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
"""How vLLM is started, one after the other."""
REQUESTS = 100
PAIR_STARTS: tuple[Start, ...] = (
    Start(),
    Start(blocks=24, scheduling="async"),
    Start(blocks=20, budget=96),
    Start(blocks=32, budget=40, scheduling="async", priority=True),
    Start(blocks=24, prefix_caching=False),
    Start(blocks=28, spec_tokens=3),
)
"""The same of pairs."""
PAIR_REQUESTS = 40
"""Of a pair, of which each is computed by one engine and answered by another."""
FAMILIES = 6
LONGEST = 300


def random_scenario(seed: int) -> Scenario:
    """The scenario of a seed: live.random-SEED."""
    source = random.Random(f"kvconform live {seed}")
    start = STARTS[seed % len(STARTS)]
    requests: list[Request] = []
    at = 0
    for number in range(REQUESTS):
        at += source.choice((0, 0, 0, 1, 1, 2, 5, 12))
        family, shared, tail = _prompt(source, requests)
        requests.append(
            Request(
                own=number, at=at, family=family, shared=shared, tail=tail,
                out=source.choice((1, 2, 4, 8, 16, 24)), abort=source.randrange(1, 12) if source.random() < 0.12 else None,
                priority=source.randrange(3) if start.priority else 0, reset=source.random() < 0.04,
            )
        )  # fmt: skip
    return Scenario(
        id=f"live.random-{seed}", text=f"A random workload of {REQUESTS} requests.", start=start, requests=requests, families=seed,
        due=["loads"],
    )  # fmt: skip


def random_pair(seed: int) -> Scenario:
    """The scenario of a seed for a producer and a consumer: pair.random-SEED."""
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
                own=number, at=wave, family=family, shared=shared, tail=tail, out=source.choice((1, 2, 4, 8, 16, 24)),
                abort=source.choice((1, 2, 3, 4, 6, 8, 12, 20, 50)) if ends < 0.15 else None,
                early=source.choice((1, 2, 3)) if ends > 0.95 else None, priority=source.randrange(3) if start.priority else 0,
                reset=begins and source.random() < 0.3,
            )
        )  # fmt: skip
    return Scenario(
        id=f"pair.random-{seed}", text=f"A random workload of {PAIR_REQUESTS} requests for a producer and a consumer.", pair="requests",
        start=start, requests=requests, families=seed, due=["loads"],
    )  # fmt: skip


def _prompt(source: random.Random, requests: list[Request]) -> tuple[int, int, int]:
    """(family, tokens of it, tokens of its own); sometimes those of a request that has none of its own: the same prompt again."""
    earlier = source.choice(requests) if requests and source.random() < 0.2 else None
    if earlier is not None and not earlier.tail:  # the same prompt again
        return earlier.family, earlier.shared, 0
    family = source.randrange(FAMILIES)
    shared = source.choice((0, 32, 64, 96, 128, 160, source.randrange(1, 200), source.randrange(1, 260)))
    tail = source.choice((0, 0, 1, 7, 32, source.randrange(1, LONGEST - shared)))
    return family, shared, tail if shared else max(1, tail)
