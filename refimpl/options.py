# SPDX-License-Identifier: Apache-2.0
"""Options of the reference connector (``kv_connector_extra_config``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.paging import Share

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Options:
    """``store``:

    a directory or ``memory:NAME``. ``chunk_tokens``: tokens per chunk, need not fit the block size. ``load``: ``sync`` or
    ``async``. ``layerwise``: move each layer in its own hook. ``save_decode``: store generated tokens too. ``async_saves``: take
    blocks over at a request's end and store behind the step. ``load_delay``, ``save_delay``: polls until an asynchronous transfer
    is over. ``whole_blocks``: claim whole blocks only.
    """

    store: str
    chunk_tokens: int
    load: str = "sync"
    layerwise: bool = False
    save_decode: bool = True
    async_saves: bool = False
    load_delay: int = 1
    save_delay: int = 1
    whole_blocks: bool = True

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Options:
        """Raises ValueError for an unknown option or an impossible value."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        given: dict[str, Any] = {
            "store": f"memory:{transfer.engine_id}",
            "chunk_tokens": Share.of(vllm_config).block_size,
        }
        given.update(transfer.kv_connector_extra_config)
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"unknown option in kv_connector_extra_config: {', '.join(unknown)}")
        options = cls(**given)
        if options.load not in ("sync", "async"):
            raise ValueError(f"load must be 'sync' or 'async', not {options.load!r}")
        if options.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be positive, not {options.chunk_tokens}")
        return options
