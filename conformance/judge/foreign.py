# SPDX-License-Identifier: Apache-2.0
"""KV of other runs: a connector found it, because its store is not the run's own.

Each run has a directory of its own, for which options have `{tmp}`. A store elsewhere still has
what earlier runs saved, and a later run of the same case asks for the same tokens. That is no fault
of the connector, and nothing about such a run can be judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvconform.contract.trace import Event

REASON = "the store holds KV of an earlier run, or of another process"
REMEDY = "put {tmp}, which stands for a directory of each run, into its path or namespace"
CAUSE = (
    f"Perhaps {REASON}: {REMEDY} (--extra-config). Otherwise the connector reports hits for KV that"
    " it does not have."
)
"""The usual cause of a hit that nothing in the run explains."""
TRUTH = "lookup.truth"
"""The requirement that such a hit breaks."""
UNHEARD = "unheard"
"""Part of the cause of such a hit (kvconform.judge.describe)."""
_PLACE = re.compile(
    r"path|dir|root|folder|store|storage|disk|file|namespace|prefix|url|uri", re.IGNORECASE
)
"""Names of options that say where a connector stores KV."""


def foreign(traces: Iterable[Iterable[Event]]) -> Event | None:
    """Return the first event of runs that proves that KV of another run was loaded, or None."""
    events = (event for trace in traces for event in trace)
    return next((event for event in events if event["kind"] == "load.foreign"), None)


def sentence(event: Event, options: Mapping[str, Any] | None = None) -> str:
    """Return what a load.foreign event means, and what to do; `options`: the connector's."""
    found = (
        f"{REASON}: request {event['req']} loaded KV that nothing in its run had computed; {REMEDY}"
    )
    if options is None or not (better := own(options)):
        return found
    example = json.dumps(better)
    return f"{found}, as in --extra-config '{example}'"


def own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `{tmp}` in those that seem to say where the store is.

    Without such an option, one called `path` is added, as an example. Nothing is returned if
    another option has `{tmp}` already.
    """
    places = [
        name
        for name, value in options.items()
        if isinstance(value, str) and "{tmp}" not in value and _PLACE.search(name)
    ]
    if not places and "{tmp}" in json.dumps(options, default=str):
        return {}
    return {**options, **dict.fromkeys(places or ["path"], "{tmp}")}
