# SPDX-License-Identifier: Apache-2.0
"""The cache behind the reference connector: back ends by URL, bounded tiers, eviction, statistics.

It is an example for connector authors, and does not need vLLM. From the bottom upwards:

- `backend`: what a back end is: bytes by key. `memory`, `file`, `http`, `redis_server`, `s3`: the
  back ends. `urls` opens one by its URL.
- `arena`: a back end in one piece of memory, on the device or pinned. `damage` damages values.
- `seal`: the header of a stored value, which shows damage and mistaken keys.
- `codecs`: how the KV of a layer is stored: as it is, quantised, or quantised and entropy-coded.
- `patience`, `deadline`: how much time a server may cost.
- `eviction`: which entry goes when a level is full. `holds`: which entries must stay.
- `tiers`: levels of back ends, which are a back end together.
- `batches`: several values in one call. `prefetch`: values in memory before they are read.
  `staging`: two buffers between the store and the paged cache.
- `peers`: values of other engines, found by key.
- `controller`: what an operator may ask of the levels: clear, move, pin, compress.
- `chunks`: the store of a connector's rank: chunks of KV, layer by layer, over a back end.
"""
