# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`.

vLLM calls `register` in every process that it starts, and in the process that builds an `LLM`. It
does and imports nothing unless an environment variable asks for it.
"""

from __future__ import annotations

import os

TRACE = "KVCONFORM_LIVE_TRACE"
"""Environment variable: the directory into which every process writes its events, `<pid>.jsonl`."""
FAULT = "KVCONFORM_LIVE_FAULT"
"""Environment variable: a planted fault of the engine (package.module:name); never in a baseline
run."""


def register() -> None:
    """Install adapters, asynchronous scheduling, probe, device and fault, if they are wanted.

    Idempotent.
    """
    wanted = os.environ.get
    if wanted("KVCONFORM_ADAPTERS"):
        from kvconform.adapters.registry import install_from_environment

        install_from_environment()
    if wanted("KVCONFORM_LIVE_ASYNC") == "1":
        from kvconform.live import start

        start.install_cpu_async()
    if directory := wanted(TRACE):
        from kvconform.live.probe import install

        install(directory)
    if wanted("KVCONFORM_LIVE_EMULATE") == "1":
        from kvconform.live import start

        start.install_emulation()
    if fault := wanted(FAULT):
        from kvconform.live import start

        start.install_fault(fault)
