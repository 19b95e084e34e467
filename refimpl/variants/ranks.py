# SPDX-License-Identifier: Apache-2.0
"""Correct connectors whose ranks do not do the same thing at the same time. With one rank they are the reference connector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Load


class Drifting(ReferenceConnector):
    """Every rank takes two steps longer over its transfers than the one before."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        late = 2 * vllm_config.parallel_config.rank
        self.options = replace(self.options, load_delay=self.options.load_delay + late, save_delay=self.options.save_delay + late)


class LosesShards(ReferenceConnector):
    """The last rank cannot read a part of every second load, and says so; the others could."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._loses = parallel.world_size > 1 and parallel.rank == parallel.world_size - 1
        self._turns = 0

    def _load(self, load: Load, layers: Any) -> None:
        self._turns += self._loses
        if self._turns % 2 and load.pieces:
            lost = load.pieces[-1].blocks(self._block_size)
            self._invalid |= lost
            self._bad |= lost
            load = replace(load, pieces=load.pieces[:-1])
        super()._load(load, layers)
