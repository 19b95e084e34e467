# SPDX-License-Identifier: Apache-2.0
"""Smoke test that a worker makes first: import vLLM and the connector, and construct it.

A failure here would occur in every case, so it ends the run with one sentence instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvconform.adapters import registry as adapters
from kvconform.config.settings import HASH_SEED, Settings
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError, one_line
from kvconform.process import watchdog

WANTS_CUDA = ("cuda", "dummy base class")
"""Words in the error of a connector that needs CUDA, in lower case.

The second is in torch's error, if it was built without CUDA.
"""


def target_of(settings: Settings) -> Target:
    """Return the connector under test that the settings describe."""
    seed = settings.env.get(HASH_SEED, "")
    return Target(
        settings.connector,
        extra_config=settings.extra_config,
        extra_config_after_restart=settings.extra_config_after_restart,
        role=settings.role,
        capabilities=settings.capabilities,
        stall_seconds=settings.stall_seconds,
        half=settings.half,
        device=settings.target_device,
        adapters=tuple(settings.adapters),
        router=settings.router,
        request_params=settings.request_params,
        hash_seed=seed if seed.isdigit() else None,
    )


def check(target: Target, tmp: Path, limit: float, *, engine: str = "all") -> str | None:
    """Check that vLLM and the connector can be imported, and that the connector can run.

    Importing each of them may take `limit` seconds. Returns a sentence if vLLM refuses to construct
    the class: then only its interface can be judged. EnvironmentProblem for a fault of vLLM or the
    environment, UsageError for one of the connector.
    """
    with _in_time("import of vLLM", limit, EnvironmentProblem):
        try:
            # Prepares the environment for vLLM, and imports it.
            import kvconform.compat.vllm_api  # noqa: F401
        except Exception as error:  # vLLM's import runs code of many packages
            reason = one_line(error).rstrip(".")
            raise EnvironmentProblem(
                f"vLLM cannot be imported, or lacks what kvconform needs: {reason}"
            ) from error
    from kvconform.observe.static_checks import constructor
    from kvconform.process import alive
    from kvconform.run.calibration import in_its_role
    from kvconform.run.promises import Plain, plain_case
    from kvconform.run.runner import run_variant

    alive.remember()
    with _in_time(f"import of {target.connector}", limit):
        adapters.install(target.adapters)
        target.resolve()
    if engine == "live":
        return None  # the run itself shows whether vLLM starts with it
    variant = Variant(plain_case(Plain(9, 1, 9, 9), 4), "reference", "sync", "v1", 1, 4)
    run = run_variant(variant, in_its_role(target), seed=0, tmp=tmp / "smoke")
    if run.lacks is not None:
        where = "the emulated device (docs/emulation.md)"
        reason = run.lacks.rstrip(".")
        raise EnvironmentProblem(f"{target.connector} cannot run on {where}: {reason}")
    crash = next((e for e in run.trace if e["kind"] == "engine.crash"), None)
    if crash is not None and crash["hook"] == "__init__":
        _, ok, detail = constructor(target.resolve(), target.options(tmp, variant.block_size))
        if not ok:
            refused = f"vLLM refuses to construct {target.connector} (requirement api.constructor)"
            return f"{refused}: {crash['error'].rstrip('.: ')} ({detail})"
        advice = "is its --extra-config right, or [extra_config] in its settings?"
        reason = crash["error"].rstrip(".")
        sentence = f"the constructor of {target.connector} raised {reason} ({advice})"
        raise UsageError(sentence, run.traceback)
    if crash is not None and crash["where"] == "hook" and crash["step"] == 0:
        hook = f"{crash['hook']} of {target.connector}"
        advice = _advice(target, str(crash["error"]))
        sentence = f"{hook} raised {crash['error']} before the first request: {advice}"
        raise EnvironmentProblem(sentence, run.traceback)
    return None


def _advice(target: Target, error: str) -> str:
    """Return what to do about an error of a hook before the first request."""
    wants_cuda = any(word in error.lower() for word in WANTS_CUDA)
    if target.device == "cpu" and wants_cuda:
        return "it needs CUDA, which --emulate-cuda stands in for (docs/emulation.md)"
    if target.half == "both":
        return "it cannot run on this machine; --half scheduler judges its scheduler half alone"
    return "it cannot start"


@contextlib.contextmanager
def _in_time(what: str, limit: float, problem: type[KvconformError] = UsageError) -> Iterator[None]:
    """Raise `problem` if the body takes more than `limit` seconds."""
    try:
        with watchdog.hook(what, limit=limit):
            yield
    except watchdog.HookTimeout:
        advice = f"{watchdog.START_SECONDS} in the environment sets another limit"
        sentence = f"the {what} did not end within {limit:g} s; {advice}"
        raise problem(sentence) from None
