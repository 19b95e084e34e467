# SPDX-License-Identifier: Apache-2.0
"""KV of other runs: a connector found it, because its store is not the run's own.

A store on a server, or in a directory without `{tmp}`, still has what earlier runs saved, and a
later run of the same case asks for the same tokens. That is no fault of the connector, and nothing
about such a run can be judged (docs/decisions/0029-kv-of-other-runs.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvconform.contract.trace import Event
from kvconform.errors import UsageError

REASON = "the store holds KV of an earlier run, or of another process"
OWN_STORE = (
    "give every run a store of its own: {tmp}, a directory of each run, in its path or prefix,"
    " or a server in [[servers]], which is cleared before each run"
)
CAUSE = (
    "The connector reports hits for KV that it does not have. If only its scheduler half is judged,"
    f" perhaps {REASON}: {OWN_STORE}."
)
"""The usual cause of a hit that nothing in the run explains; loads of other runs' KV are proven."""
TRUTH = "lookup.truth"
"""The requirement that such a hit breaks."""
UNHEARD = "unheard"
"""Part of the cause of such a hit (kvconform.judge.describe)."""


class ForeignKV(UsageError):
    """A run loaded KV of another run, so that no run with this store can be judged."""


def foreign(trace: Iterable[Event]) -> Event | None:
    """Return the first event that proves that a run loaded KV of another run, or None."""
    return next((event for event in trace if event["kind"] == "load.foreign"), None)


def sentence(event: Event, options: Mapping[str, Any]) -> str:
    """Return what a load.foreign event means, and what to do; `options`: the connector's."""
    found = f"{REASON}: request {event['req']} loaded KV that nothing in its run had computed"
    better = own(options)
    if better != options:
        return (
            f"{found}; {{tmp}} stands for a directory of each run, as in"
            f" --extra-config '{json.dumps(better)}'"
        )
    if "{tmp}" in json.dumps(options, default=str):
        return f"{found}, though its options have {{tmp}}: it also stores elsewhere; {OWN_STORE}"
    return f"{found}; {OWN_STORE}"


def own(value: Any) -> Any:
    """Return a copy of an option's value with `{tmp}` in place of each directory for files.

    These are absolute paths and file:// URLs of existing directories that can be written to.
    """
    if isinstance(value, Mapping):
        return {name: own(each) for name, each in value.items()}
    if isinstance(value, list):
        return [own(each) for each in value]
    if not isinstance(value, str):
        return value
    scheme = "file://" if value.startswith("file://") else ""
    path = Path(value.removeprefix(scheme))
    is_place = path.is_absolute() and path.is_dir() and os.access(path, os.W_OK)
    return f"{scheme}{{tmp}}" if is_place else value
