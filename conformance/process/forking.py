# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one that has imported vLLM, so that it is imported once."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext, SpawnContext

MODULES = ("kvconform.run.case", "kvconform.explore.outcome", "kvconform.session.worker")
"""What the first process imports, and vLLM with it; no connector."""


def forked_after_import() -> ForkServerContext | SpawnContext:
    """Return a context of `multiprocessing` whose processes have vLLM imported from the start.

    On other systems than Linux, where forks are not safe, they import it themselves. The first
    process has one thread, and the environment of this one when it was started.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context
