# SPDX-License-Identifier: Apache-2.0
"""The attention metadata of a layer, as a model runner passes it to a connector.

Connectors ask whether it is vLLM's MLACommonMetadata, and read latent KV in another way if it is.
No connector is known to ask for another class, so any other group has a plain namespace.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from kvconform.compat.vllm_api import torch


class AttentionMetadata(SimpleNamespace):
    """Metadata of a layer that has K and V.

    slot_mapping [tokens] int64, query_start_loc [reqs + 1], seq_lens [reqs],
    block_table [reqs, blocks], num_actual_tokens.
    """


@dataclass(frozen=True)
class Attended:
    """The tokens of a step in one group: `slots` [tokens], `starts` [reqs + 1] of the requests.

    `lengths` [reqs]: the end of each request's positions. `table` [reqs, blocks]: its block ids.
    """

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    table: np.ndarray

    def metadata(self) -> AttentionMetadata:
        """Return the metadata of layers with K and V."""
        return AttentionMetadata(
            slot_mapping=torch.from_numpy(self.slots),
            num_actual_tokens=len(self.slots),
            query_start_loc=torch.from_numpy(self.starts),
            seq_lens=torch.from_numpy(self.lengths),
            block_table=torch.from_numpy(self.table),
        )

    def latent_metadata(self) -> Any:
        """Return the metadata of MLA layers: an MLACommonMetadata, if the release has that class.

        vLLM takes the requests of one token at the start of a batch for decodes, the rest for
        prefills. Their block tables are in the two parts. What only kernels read is left out.
        """
        mla = _mla()
        if mla is None:
            return self.metadata()
        plain = self.metadata()
        counts = np.diff(self.starts)
        decodes = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
        decode = prefill = None
        if decodes:
            decode = _made(
                mla.MLACommonDecodeMetadata,
                block_table=plain.block_table[:decodes],
                seq_lens=plain.seq_lens[:decodes],
                dcp_tot_seq_lens=None,
            )
        if decodes < len(counts):
            prefill = _made(
                mla.MLACommonPrefillMetadata,
                block_table=plain.block_table[decodes:],
                query_start_loc=plain.query_start_loc[decodes:] - int(self.starts[decodes]),
                max_query_len=int(counts[decodes:].max()),
            )
        return _made(
            mla.MLACommonMetadata,
            num_reqs=len(counts),
            max_query_len=int(counts.max()),
            max_seq_len=int(self.lengths.max()),
            num_actual_tokens=plain.num_actual_tokens,
            query_start_loc=plain.query_start_loc,
            slot_mapping=plain.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=int(self.starts[decodes]),
            num_prefills=len(counts) - decodes,
            prefill=prefill,
            decode=decode,
        )


def bound(tensor: torch.Tensor, *, latent: bool) -> torch.Tensor:
    """Return the view that a layer binds of its registered tensor; MLA layers drop the heads."""
    layer = getattr(_mla(), "MLAAttention", None) if latent else None
    return tensor.squeeze(1) if layer is not None and "bind_kv_cache" in vars(layer) else tensor


def _made(cls: Any, **values: Any) -> Any:
    """Return an instance of a dataclass, with the values of the fields that the release has."""
    known = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in known})


@lru_cache(maxsize=1)
def _mla() -> ModuleType | None:
    """Return the module that defines MLACommonMetadata; None if it cannot be imported.

    A connector cannot ask for the class then, either. The import takes about a second.
    """
    for name in (
        "vllm.model_executor.layers.attention.mla_attention",
        "vllm.v1.attention.backends.mla.common",  # older releases
    ):
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(found, "MLACommonMetadata"):
            return found
    return None
