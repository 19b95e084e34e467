# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that let a real connector run where its hardware or libraries are missing (docs/adapters.md).

One module per adapter: `lmcache_cpu.py` is the adapter `lmcache-cpu`. None is in force unless it is named.
"""
