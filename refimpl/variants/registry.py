# SPDX-License-Identifier: Apache-2.0
"""The list of correct variants: their connectors and options.

They cover, by section of systems.md:

- B4-B7: skipped, partial and large chunks, selective saves (`saving`, `unfull`, `chunk-256`,
  `whole-chunks`);
- B8: roles (`stores-nothing`);
- B12: options per request (`selective`, `honours-skip`);
- B14: pins (`tiers`);
- C1: keys of chunks;
- C2, C3: tiers, eviction and slow writes to a lower level (`tiers`, `behind`);
- C4: transfers after the step (`fencing`, `threads`), prefetch, batches and two buffers
  (`buffered`);
- C5: engines that find each other's KV (`neighbours`);
- C6: a controller (`controlled`);
- C7: codecs (`int8`, `int4`, `entropy-coded`);
- C8: chunks that are not a prefix (`blending`, `blending-layerwise`);
- C10: counters (`metered`);
- C9: layers on streams, with few staging buffers (`STREAMED`, `staged`).

- B13: disaggregated prefill (`peer`, `peer-timed`, `converting`, `resharding`, `pusher`,
  `hybrid-peer`).

`routed.py` needs a router of its own. It is run by `tests/run/test_pairs.py`, where the others of
B13 are run with more options, too.
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
    "flushes-preempted": (f"{HERE}.flushing:FlushesPreempted", {}),
    "whole-chunks": (f"{HERE}.saving:WholeChunks", {"chunk_tokens": 16}),
    "stores-nothing": (f"{HERE}.saving:StoresNothing", {}),
    "selective": (f"{HERE}.saving:Selective", {}),
    "retrying": (f"{HERE}.retrying:Retrying", {"load": "async", "load_delay": 2}),
    "bounded-loads": (f"{HERE}.loading:BoundedLoads", {}),
    "own-shards": (f"{HERE}.ranks:OwnShards", {}),
    "first-rank-reports": (f"{HERE}.ranks:FirstRankReports", {}),
    "one-rank-reports": (f"{HERE}.ranks:OneRankReports", {"load": "async", "load_delay": 2}),
    "own-hashes": (f"{HERE}.habits:OwnHashes", {}),
    "never-hits": (f"{HERE}.loading:NeverHits", {}),
    "chunk-256": ("kvconform.refimpl.connector:ReferenceConnector", {"chunk_tokens": 256}),
    "holds-long": (
        "kvconform.refimpl.connector:ReferenceConnector",
        {"load": "async", "async_saves": True, "save_delay": 12},
    ),
    "fenced": (f"{HERE}.fencing:Fenced", {"async_saves": True, "save_delay": 3}),
    "threads": (f"{HERE}.threads:Threads", {"load": "async", "async_saves": True}),
    "hybrid-threads": (f"{HERE}.hybrid_threads:HybridThreads", {}),
    "saving-threads": (f"{HERE}.threads:SavingThreads", {"async_saves": True}),
    "buffered": (f"{HERE}.buffered:Buffered", {}),
    "buffered-async": (
        f"{HERE}.buffered:Buffered",
        {"load": "async", "async_saves": True, "batch": 3, "prefetch": 4},
    ),
    "peer-to-peer": (f"{HERE}.neighbours:PeerToPeer", {"load": "async"}),
    "tiered-lru": (f"{HERE}.tiers:Tiered", {}),
    "tiered-lfu": (f"{HERE}.tiers:Tiered", {"evict": "lfu", "store_chunks": 96, "load": "async"}),
    "three-levels": (
        f"{HERE}.tiers:Tiered",
        {
            "tiers": [{"url": "memory:", "chunks": 2}, {"url": "memory:", "chunks": 6}],
            "store_chunks": 24,
            "layerwise": True,
        },
    ),
    "controlled": (f"{HERE}.controlled:Controlled", {"store_chunks": 24}),
    "metered": (f"{HERE}.metered:Metered", {"store_chunks": 24}),
    "write-behind": (f"{HERE}.behind:SlowWriteBehind", {"load": "async"}),
    "undecided": (f"{HERE}.loading:Undecided", {}),
    "uneven": (f"{HERE}.loading:Uneven", {}),
    "honours-skip": (f"{HERE}.loading:HonoursSkip", {}),
    "block-filler": (f"{HERE}.loading:BlockFiller", {"whole_blocks": False}),
    "delayed": (f"{HERE}.loading:Delayed", {"load": "async", "async_saves": True, "save_delay": 3}),
    "unreliable": (f"{HERE}.loading:Unreliable", {}),
    "unreliable-async": (f"{HERE}.loading:Unreliable", {"load": "async"}),
    "stops-at-failure": (f"{HERE}.loading:StopsAtFailure", {}),
    "stops-at-failure-async": (f"{HERE}.loading:StopsAtFailure", {"load": "async"}),
    "rounds-failures": (
        f"{HERE}.loading:RoundsFailures",
        {"chunk_tokens": 8, "whole_blocks": True},
    ),
    "rounds-failures-async": (
        f"{HERE}.loading:RoundsFailures",
        {"chunk_tokens": 8, "load": "async"},
    ),
    "foresees-failures": (f"{HERE}.loading:ForeseesFailures", {"load": "async", "load_delay": 3}),
    "in-parts": (f"{HERE}.loading:InParts", {"load": "async"}),
    "stumbles": (f"{HERE}.loading:Stumbles", {"load": "async"}),
    "hybrid": (f"{HERE}.hybrid:HybridConnector", {}),
    "hybrid-async": (f"{HERE}.hybrid:HybridConnector", {"load": "async"}),
    "hybrid-layerwise": (f"{HERE}.hybrid:HybridConnector", {"layerwise": True}),
    "divergent": (f"{HERE}.hybrid:Divergent", {}),
    "hands-out-its-own": (f"{HERE}.habits:HandsOutItsOwn", {}),
    "refuses-latent-layers": (f"{HERE}.habits:RefusesLatentLayers", {"layerwise": True}),
    "unfull-chunk": (f"{HERE}.unfull:KeepsUnfullChunk", {"chunk_tokens": 8, "whole_blocks": False}),
    "keeps-last": (f"{HERE}.habits:KeepsLast", {}),
    "own-metadata": (f"{HERE}.habits:OwnMetadata", {}),
    "instance-hooks": (f"{HERE}.habits:InstanceHooks", {"load": "async"}),
    "decoy": (f"{HERE}.decoy:Decoy", {}),
    "worth-loading": (f"{HERE}.frugal:WorthLoading", {}),
    "one-load-per-step": (f"{HERE}.frugal:OneLoadPerStep", {}),
    "save-budget": (f"{HERE}.frugal:SaveBudget", {}),
    "expiring": (f"{HERE}.frugal:Expiring", {}),
    "one-group-only": (f"{HERE}.hybrid:OneGroupOnly", {}),
    "int8": (
        f"{HERE}.tiers:Tiered",
        {"codec": "int8", "tiers": [{"url": "memory:", "chunks": 2}], "store_chunks": 12},
    ),
    "int4": (
        "kvconform.refimpl.connector:ReferenceConnector",
        {"codec": "int4", "layerwise": True, "chunk_tokens": 6, "whole_blocks": False},
    ),
    "entropy-coded": (
        "kvconform.refimpl.connector:ReferenceConnector",
        {"codec": "int4-zstd", "load": "async", "async_saves": True},
    ),
    "blending": (f"{HERE}.blending:Blending", {}),
    "blending-layerwise": (f"{HERE}.blending:Blending", {"layerwise": True}),
    "consuming": (f"{HERE}.plain:Consuming", {}),
    "plain": (f"{HERE}.plain:Plain", {}),
    "peer": (f"{HERE}.peer:Peer", {"lease": 4, "delay": 2}),
    "peer-timed": (f"{HERE}.peer:Peer", {"lease": 0, "lease_seconds": 300}),
    "converting": (f"{HERE}.converting:Converting", {}),
    "resharding": (f"{HERE}.resharding:Resharding", {"behind": 3}),
    "pusher": (f"{HERE}.pusher:Pusher", {}),
    "hybrid-peer": (f"{HERE}.hybrid_peer:HybridPeer", {}),
    "zeros": (f"{HERE}.zeros:Zeros", {}),
    "reports-by-scheduler": (
        f"{HERE}.reporting:ReportsByScheduler",
        {"load": "async", "async_saves": True},
    ),
    "keeps-reports-back": (
        f"{HERE}.reporting:KeepsReportsBack",
        {"load": "async", "async_saves": True},
    ),
}
"""Name -> connector and extra configuration, without `store`."""

NOT_RECOMMENDED = {"hands-out-its-own": "meta.not-reused"}
"""Correct variants that are not recommended -> the requirement that they fail, and no other."""

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
    "streams-staged": (f"{HERE}.staged:Staged", {"layerwise": True, "async_saves": True}),
    "streams-buffered": (f"{HERE}.staged:DoubleBuffered", {"layerwise": True, "async_saves": True}),
}
"""Variants for a CUDA device or its emulation, in the form of `VARIANTS`."""
