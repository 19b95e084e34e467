# SPDX-License-Identifier: Apache-2.0
"""The seed of vLLM's block hashes, which depends on the environment of the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


@contextlib.contextmanager
def fixed_block_hashes() -> Iterator[None]:
    """While entered, block hashes are those of PYTHONHASHSEED=0, which vLLM seeds them with; releases before 0.31 take a random seed."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    init_none_hash(sha256)
    try:
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
        init_none_hash(sha256)
