# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process that it starts, and in the one that builds an `LLM`.

It does nothing, and imports nothing, unless KVCONFORM_LIVE_TRACE names a directory.
"""

from __future__ import annotations

import os

TRACE = "KVCONFORM_LIVE_TRACE"
"""The directory that every process writes its events into, `<pid>.jsonl`."""


def register() -> None:
    """Watch this process's vLLM from now on, if that is wanted. Called again, it changes nothing."""
    directory = os.environ.get(TRACE)
    if directory:
        from kvconform.live.probe import install

        install(directory)
