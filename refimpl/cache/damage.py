# SPDX-License-Identifier: Apache-2.0
"""Damages every value of a store: `python -m kvconform.refimpl.cache.damage URL HOW`.

It prints how many values there were. HOW is removed, truncated, longer or garbage, as for files
(kvconform.process.damaged). A server in the settings of a connector has this as its command
`damage`.
"""

from __future__ import annotations

import sys

from kvconform.process.damaged import DAMAGED
from kvconform.refimpl.cache.urls import open_backend

PATIENCE = 20.0
"""Seconds until a call of the server fails. The machine may be busy."""


def damage(url: str, how: str) -> int:
    """Damage every value; return their number.

    StoreError if the store fails. ValueError for another URL, KeyError for another kind of damage.
    """
    store = open_backend(url, PATIENCE)
    keys = [*store.list()]
    for key in keys:
        damaged = DAMAGED[how](store.get(key) or b"")
        if damaged is None:
            store.delete(key)
        else:
            store.set(key, damaged)
    store.close()
    return len(keys)


if __name__ == "__main__":
    print(damage(*sys.argv[1:]))
