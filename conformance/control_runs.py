# SPDX-License-Identifier: Apache-2.0
"""Control runs: what the defects are changes of, on the same cases, must fail nothing. Else a defect may be found for another reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconform.defect import REFERENCE, Defect, driven
from kvconform.device_kinds import SLOW
from kvconform.kill_matrix import Outcome
from kvconform.load import Spec
from kvconform.server_spec import ServerSpec

PLANTED = "kvconform.refimpl.defects."
AT_ONCE = 12
"""Runs per task of a worker process."""


@dataclass(frozen=True)
class Control:
    """Runs of one correct connector. `options`, `capabilities` and `servers`: JSON. `runs`: (case, id of its variant)."""

    connector: str
    options: str
    capabilities: str
    runs: tuple[tuple[str, str], ...]
    emulate_cuda: bool = False
    servers: str = "[]"


def plan(defects: Iterable[Defect], spec: Spec) -> list[Control]:
    """The control runs for these defects, each once. Imports their connectors."""
    found: dict[tuple[str, str, str, bool, str], dict[tuple[str, str], None]] = {}
    for defect in defects:
        settings = (json.dumps(value, sort_keys=True) for value in (defect.extra_config, defect.capabilities))
        servers = json.dumps([server.model_dump() for server in defect.servers], sort_keys=True)
        runs = found.setdefault((sound(defect.connector), *settings, defect.emulate_cuda, servers), {})  # type: ignore[arg-type]
        runs.update(dict.fromkeys((variant.case.id, variant.id) for variant in defect.variants(spec)))
    tasks = ((key, list(runs), first) for key, runs in found.items() for first in range(0, len(runs), AT_ONCE))
    return [Control(*key[:3], tuple(runs[first : first + AT_ONCE]), emulate_cuda=key[3], servers=key[4]) for key, runs, first in tasks]


def sound(connector: str) -> str:
    """The nearest ancestor of a connector class that is no defect, or its `change_of`, where what is wrong is what it descends from; the
    reference connector if there is neither."""
    from kvconform.target import Target

    for cls in Target(connector, {}).resolve().__mro__:
        cls = vars(cls).get("change_of", cls)
        if cls.__module__.startswith("kvconform.refimpl.") and not cls.__module__.startswith(PLANTED):
            return f"{cls.__module__}:{cls.__name__}"
    return REFERENCE


def run(control: Control, spec: Spec, tmp: Path) -> Outcome:
    """Make the runs. What vLLM itself breaks (guarantees on engine `vllm`) is a finding, and no failure here."""
    from kvconform import watchdog
    from kvconform.defects import served, target_of
    from kvconform.run import run_and_judge

    options: Mapping[str, Any] = {"extra_config": json.loads(control.options), "capabilities": json.loads(control.capabilities)}
    servers = [ServerSpec.model_validate(server) for server in json.loads(control.servers)]
    defect = Defect.model_construct(
        id="control", connector=control.connector, emulate_cuda=control.emulate_cuda, servers=servers, **options
    )
    outcome = Outcome(defect=f"control: {control.connector}")
    watchdog.start(defect.hook_timeout)
    try:
        with served(defect, tmp) as extra_config:
            for number, (case, name) in enumerate(control.runs):
                slow = SLOW if control.emulate_cuda else None
                variant = next(each for each in driven(spec, case).variants(("reference", "vllm", "live"), None, slow) if each.id == name)
                report = run_and_judge(variant, target_of(defect, variant.block_size, extra_config), spec, seed=0, tmp=tmp / str(number))
                outcome.take(name, [row for row in report.rows if variant.engine != "vllm" or row.get("kind") != "guarantee"])
                if report.harness_error:
                    outcome.failed.setdefault("the harness", []).append(name)
    finally:
        watchdog.stop()
    if outcome.failed:
        told = (f"{name} in {runs[0]}" + f" and {len(runs) - 1} more" * (len(runs) > 1) for name, runs in outcome.failed.items())
        outcome.problem = f"is no defect, and fails {'; '.join(told)}"
    return outcome
