# SPDX-License-Identifier: Apache-2.0
"""Correct connectors that do things differently from the reference connector. None of them may fail anything.

Between them they show (numbers of systems.md): skipped, partial and large chunks and what is not worth saving (B4-B7: saving,
chunk-256), roles (B8: stores-nothing, peer), options per request (B12: selective), prefill and decode apart (B13: peer), pins (B14: tiers),
keys of chunks (C1), tiers and eviction (C2, C3: tiers), transfers behind the step (C4: fencing, threads), lossy serialisation and chunks
that are no prefix (C7, C8: lossy).
"""

from __future__ import annotations

from typing import Any

HERE = "kvconform.refimpl.variants"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("kvconform.refimpl.connector:ReferenceConnector", {}),
    "async": (
        "kvconform.refimpl.connector:ReferenceConnector",
        {"load": "async", "async_saves": True},
    ),
    "layerwise": (
        "kvconform.refimpl.connector:ReferenceConnector",
        {"layerwise": True, "chunk_tokens": 6, "whole_blocks": False},
    ),
    "prompt": (
        "kvconform.refimpl.connector:ReferenceConnector",
        {"save_decode": False, "chunk_tokens": 8},
    ),
    "lazy": (f"{HERE}.saving:LazySaver", {}),
    "whole-prompt": (f"{HERE}.saving:WholePromptSaver", {}),
    "at-finish": (f"{HERE}.saving:AtFinish", {}),
    "stores-nothing": (f"{HERE}.saving:StoresNothing", {}),
    "selective": (f"{HERE}.saving:Selective", {}),
    "never-hits": (f"{HERE}.loading:NeverHits", {}),
    "chunk-256": ("kvconform.refimpl.connector:ReferenceConnector", {"chunk_tokens": 256}),
    "holds-long": (
        "kvconform.refimpl.connector:ReferenceConnector",
        {"load": "async", "async_saves": True, "save_delay": 12},
    ),
    "fenced": (f"{HERE}.fencing:Fenced", {"async_saves": True, "save_delay": 3}),
    "threads": (f"{HERE}.threads:Threads", {"load": "async", "async_saves": True}),
    "tiered-lru": (f"{HERE}.tiers:Tiered", {}),
    "tiered-lfu": (f"{HERE}.tiers:TieredLfu", {}),
    "undecided": (f"{HERE}.loading:Undecided", {}),
    "uneven": (f"{HERE}.loading:Uneven", {}),
    "block-filler": (f"{HERE}.loading:BlockFiller", {"whole_blocks": False}),
    "delayed": (f"{HERE}.loading:Delayed", {"load": "async", "async_saves": True, "save_delay": 3}),
    "unreliable": (f"{HERE}.loading:Unreliable", {}),
    "unreliable-async": (f"{HERE}.loading:Unreliable", {"load": "async"}),
    "foresees-failures": (f"{HERE}.loading:ForeseesFailures", {"load": "async", "load_delay": 3}),
    "in-parts": (f"{HERE}.loading:InParts", {"load": "async"}),
    "stumbles": (f"{HERE}.loading:Stumbles", {"load": "async"}),
    "hybrid": (f"{HERE}.hybrid:HybridConnector", {}),
    "hybrid-async": (f"{HERE}.hybrid:HybridConnector", {"load": "async"}),
    "hands-out-its-own": (f"{HERE}.habits:HandsOutItsOwn", {}),
    "keeps-last": (f"{HERE}.habits:KeepsLast", {}),
    "instance-hooks": (f"{HERE}.habits:InstanceHooks", {"load": "async"}),
    "decoy": (f"{HERE}.decoy:Decoy", {}),
    "worth-loading": (f"{HERE}.frugal:WorthLoading", {}),
    "one-load-per-step": (f"{HERE}.frugal:OneLoadPerStep", {}),
    "save-budget": (f"{HERE}.frugal:SaveBudget", {}),
    "expiring": (f"{HERE}.frugal:Expiring", {}),
    "one-group-only": (f"{HERE}.hybrid:OneGroupOnly", {}),
    "quantising": (f"{HERE}.lossy:Quantising", {}),
    "blending": (f"{HERE}.lossy:Blending", {}),
    "consuming": (f"{HERE}.plain:Consuming", {}),
    "plain": (f"{HERE}.plain:Plain", {}),
    "zeros": (f"{HERE}.zeros:Zeros", {}),
}
"""Name -> connector and extra configuration (besides ``store``)."""

NOT_RECOMMENDED = {"hands-out-its-own": "meta.not-reused"}
"""What is correct and not recommended: it fails that, and must not fail more."""

STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "streams": ("kvconform.refimpl.streamed:StreamedConnector", {"async_saves": True}),
    "streams-async": (
        "kvconform.refimpl.streamed:StreamedConnector",
        {"load": "async", "async_saves": True},
    ),
    "streams-layerwise": (
        "kvconform.refimpl.streamed:StreamedConnector",
        {"layerwise": True, "async_saves": True, "chunk_tokens": 6, "whole_blocks": False},
    ),
}
"""The same, for a CUDA device or its emulation."""
