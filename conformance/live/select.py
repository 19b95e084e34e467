# SPDX-License-Identifier: Apache-2.0
"""What engine live runs: the scenarios in the place of cases, and random workloads if they are asked for."""

from __future__ import annotations

import re

from kvconform.errors import UsageError
from kvconform.live.seeds import random_pair, random_scenario
from kvconform.load import Spec, load_spec
from kvconform.settings import Settings

RANDOM = re.compile(r"^(?:live|pair)\.random-(\d+)(?:\[.*\])?$")
"""How a seed is named in -k."""


def spec_for(settings: Settings) -> Spec:
    """The specification for a run with these settings. UsageError for --seeds with another engine, and what load_spec raises."""
    live = settings.engine == "live"
    if settings.seeds and not live:
        raise UsageError("--seeds is about the random workloads of the live engine: it goes with --engine live")
    if live and settings.device == "cuda":
        raise UsageError("the live engine computes on the CPU: --device cuda does not go with it (--emulate-cuda does)")
    spec = load_spec(cases=settings.cases, live=live)
    named = [name for entry in (*settings.select, settings.trace or "") for name in RANDOM.findall(entry)] if live else []
    for seed in (*range(settings.seed, settings.seed + settings.seeds), *map(int, named)):
        for scenario in (random_scenario(seed), random_pair(seed)):
            spec.cases[scenario.id] = scenario  # type: ignore[assignment]
    return spec
