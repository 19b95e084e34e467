# SPDX-License-Identifier: Apache-2.0
"""Options of the reference connector (`kv_connector_extra_config`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvconform.refimpl.cache.codecs import codec_named
from kvconform.refimpl.cache.patience import PATIENCE
from kvconform.refimpl.paging import Share

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Options:
    """The options of one connector."""

    store: str
    """A directory, or a URL (`refimpl/cache/urls.py`). Default: memory, named after the engine."""
    chunk_tokens: int
    """Tokens per chunk; need not be a multiple of the block size. Default: one block."""
    load: str = "sync"
    """`sync` or `async`."""
    layerwise: bool = False
    """Move each layer in its own hook."""
    save_decode: bool = True
    """Save the KV of generated tokens too."""
    async_saves: bool = False
    """Save after the step; keep the blocks of a finished request until its last save is done."""
    load_delay: int = 1
    """Polls until an asynchronous load is done."""
    save_delay: int = 1
    """Polls until an asynchronous save is done."""
    patience: float = PATIENCE
    """Seconds until a call of the store's server fails, and for which it is then not called."""
    codec: str = "raw"
    """How KV is stored (`refimpl/cache/codecs.py`)."""
    whole_blocks: bool = True
    """Claim whole blocks only."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Return the options in a configuration.

        ValueError for an unknown option or an impossible value. MissingPackage if the codec needs a
        package that is missing.
        """
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
        codec_named(options.codec)
        if options.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be positive, not {options.chunk_tokens}")
        return options
