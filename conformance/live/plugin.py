# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process that it starts, and in the one that builds an `LLM`.

It does nothing, and imports nothing, unless one of the environment variables below says so.
"""

from __future__ import annotations

import os

TRACE = "KVCONFORM_LIVE_TRACE"
"""The directory that every process writes its events into, `<pid>.jsonl`."""


def register() -> None:
    """Watch this process's vLLM from now on, if that is wanted, with the adapters and the device that are wanted. Called again, it
    changes nothing.
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
