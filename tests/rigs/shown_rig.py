# SPDX-License-Identifier: Apache-2.0
"""Correct connectors whose inspectors show a part of what an inspector may show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvconform.refimpl.variants.tiers import CacheInspector, Tiered


class CacheOnly(Tiered):
    """Shows its cache, and no plans."""

    def kvconform_inspector(self) -> Any:
        full = CacheInspector(self)
        return SimpleNamespace(cache=full.cache, cached=full.cached)


class PlansOnly(Tiered):
    """Shows its plans, and no cache."""

    def kvconform_inspector(self) -> Any:
        return SimpleNamespace(plan=CacheInspector(self).plan)
