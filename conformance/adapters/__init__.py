# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for hardware and libraries that a real connector lacks here (docs/adapters.md).

One module per adapter: `lmcache_cpu.py` is the adapter `lmcache-cpu`. An adapter takes effect only
if it is named.
"""
