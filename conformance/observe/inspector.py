# SPDX-License-Identifier: Apache-2.0
"""The optional window that a connector has for the suite, and what it shows.

It is the object that the scheduler half's `kvconform_inspector()` returns. `plan(metadata)` shows
what a step plans (docs/guide-connector-authors.md), `cache()` and `cached(request)` the cache
behind the connector (docs/cache.md). Each part is optional.
"""

from __future__ import annotations

from typing import Any


def inspector_of(connector: Any) -> Any:
    """Return the scheduler half's inspector, or None."""
    make = getattr(connector, "kvconform_inspector", None)
    return make() if callable(make) else None


def shows_plans(inspector: Any) -> bool:
    """Return whether an inspector shows what a step plans to load and save."""
    return callable(getattr(inspector, "plan", None))


def shows_cache(inspector: Any) -> bool:
    """Return whether an inspector shows the cache."""
    return callable(getattr(inspector, "cache", None))
