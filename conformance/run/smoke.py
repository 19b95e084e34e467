# SPDX-License-Identifier: Apache-2.0
"""The first thing a worker does: can vLLM and the connector be imported, is it a connector, can it be constructed?

What fails here would fail in every case, so it ends the run with one sentence instead.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from kvconform.adapters import registry as adapters
from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.errors import EnvironmentProblem, UsageError, one_line
from kvconform.process import watchdog

WANTS_CUDA = ("cuda", "dummy base class")
"""What is in an error of a connector that wants CUDA, in lower case; the second is torch's own, where it was built without."""


def target_of(settings: Settings) -> Target:
    """The connector under test, as the settings describe it."""
    return Target(
        settings.connector,
        extra_config=settings.extra_config,
        role=settings.role,
        capabilities=settings.capabilities,
        stall_seconds=settings.stall_seconds,
        hook_timeout=settings.hook_timeout,
        half=settings.half,
        device=settings.target_device,
        adapters=tuple(settings.adapters),
    )


def check(target: Target, tmp: Path, limit: float, *, engine: str = "all") -> None:
    """Raises EnvironmentProblem for vLLM's troubles, UsageError for the connector's. Importing each must not take longer than `limit` s."""
    with _in_time("import of vLLM", limit):
        try:
            import kvconform.compat.vllm_api  # noqa: F401  # prepares the environment for vLLM, and imports it
        except Exception as error:  # vLLM's import runs code of many packages
            raise EnvironmentProblem(
                f"vLLM cannot be imported, or lacks what kvconform needs: {one_line(error).rstrip('.')}"
            ) from error
    from kvconform.observe.static_checks import inspect_class
    from kvconform.run.promises import Plain, plain_case
    from kvconform.run.runner import run_variant

    with _in_time(f"import of {target.connector}", limit):
        adapters.install(target.adapters)
        target.resolve()
    if engine == "live":
        return  # whether vLLM starts with it is seen there; no other engine has to run it
    variant = Variant(plain_case(Plain(9, 1, 9, 9), 4), "reference", "sync", "v1", 1, 4)
    run = run_variant(variant, target, seed=0, tmp=tmp / "smoke")
    if run.lacks is not None:
        raise EnvironmentProblem(
            f"{target.connector} cannot run on the emulated device (docs/emulation.md): {run.lacks.rstrip('.')}"
        )
    crash = next((e for e in run.trace if e["kind"] == "engine.crash"), None)
    if crash is not None and crash["hook"] == "__init__":
        if not next(inspect_class(target.resolve(), {}, None))[1]:
            return  # its shape is what vLLM refuses: api.constructor and lifecycle.constructs say so in every case
        advice = "is its --extra-config right, or [extra_config] in its settings?"
        sentence = (
            f"the constructor of {target.connector} raised {crash['error'].rstrip('.')} ({advice})"
        )
        raise UsageError(sentence, run.traceback)
    if crash is not None and crash["where"] == "hook" and crash["step"] == 0:
        advice = (
            "it needs CUDA, which --emulate-cuda stands in for (docs/emulation.md)"
            if target.device == "cpu"
            and any(word in str(crash["error"]).lower() for word in WANTS_CUDA)
            else "it cannot run on this machine; --half scheduler judges its scheduler half alone"
            if target.half == "both"
            else "it cannot start"
        )
        sentence = f"{crash['hook']} of {target.connector} raised {crash['error']} before the first request: {advice}"
        raise EnvironmentProblem(sentence, run.traceback)


@contextlib.contextmanager
def _in_time(what: str, limit: float) -> Any:
    try:
        with watchdog.hook(what, limit=limit):
            yield
    except watchdog.HookTimeout:
        sentence = f"the {what} did not end within {limit:g} s; {watchdog.START_SECONDS} in the environment sets another limit"
        raise (EnvironmentProblem if what.endswith("vLLM") else UsageError)(sentence) from None
