# SPDX-License-Identifier: Apache-2.0
"""How two requests with the same tokens differ, one of which got the KV of the other.

What tells a request apart is a mapping with the fields `salt`, `adapter`, `items` and `embeds`: an
event `request.identity`, or what `Add.identity` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvconform.contract.events import is_restart
from kvconform.contract.trace import Event

CLAIMED = "lookup.identity"
"""The requirement on lookups that claim KV of another identity."""

EMBEDS = "prompt embeddings"
ITEMS = "multi-modal items"
PLACE = "place of the multi-modal items"
ORDER = "order of the multi-modal items"
MODEL = "model or layout since a restart"
"""What differs between two requests that are alike: the model, data type or split of the ranks."""

NONE: Mapping[str, Any] = {"salt": None, "adapter": None, "items": [], "embeds": None}
"""A request that only its tokens tell apart."""


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return how two requests with the same tokens differ.

    `what` differs, with both values in words; `kind` is salt, adapter, items, embeds or model.
    """
    found = [
        {"kind": kind, "what": what, "here": first, "there": second}
        for kind, what, first, second in _differences(here, there)
    ]
    alike = {"kind": "model", "what": MODEL, "here": "", "there": ""}
    return found or [alike]


def _differences(
    here: Mapping[str, Any], there: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    if here["salt"] != there["salt"]:
        yield "salt", "cache salt", _value(here["salt"]), _value(there["salt"])
    one, other = here["adapter"], there["adapter"]
    if one and other and one["name"] == other["name"]:
        for field in ("path", "number"):
            if one[field] != other[field]:
                what = f"{field} of the LoRA adapter"
                yield "adapter", what, _value(one[field]), _value(other[field])
    elif one != other:
        yield "adapter", "LoRA adapter", _adapter(one), _adapter(other)
    if here["embeds"] != there["embeds"]:
        yield "embeds", EMBEDS, _embeds(here["embeds"]), _embeds(there["embeds"])
    if here["items"] != there["items"]:
        ids, others = ([item["id"] for item in each["items"]] for each in (here, there))
        what = ITEMS
        if ids == others:
            what = PLACE
        elif sorted(ids) == sorted(others):
            what = ORDER
        yield "items", what, _items(here["items"]), _items(there["items"])


def apart(differs: Sequence[Mapping[str, str]], here: str, there: str) -> str:
    """Return differences in words: `the cache salt ('x' for b, none for a)`.

    `here` and `there`: the requests. They may have the same id.
    """
    one, other = (here, there) if here != there else (f"this {here}", f"the earlier {there}")
    return " and ".join(
        f"the {each['what']}"
        + (f" ({each['here']} for {one}, {each['there']} for {other})" if each["here"] else "")
        for each in differs
    )


def told_apart_by(known: Mapping[str, Any]) -> str:
    """Return in words what tells a request apart from others with the same tokens."""
    parts = []
    if known["salt"] is not None:
        parts.append(f"cache salt {_value(known['salt'])}")
    if known["adapter"]:
        parts.append(f"LoRA adapter {_adapter(known['adapter'])}")
    if known["embeds"]:
        parts.append(f"{EMBEDS} {_embeds(known['embeds'])}")
    if known["items"]:
        parts.append(f"{ITEMS} {_items(known['items'])}")
    return ", ".join(parts)


def another(differs: Sequence[Mapping[str, str]]) -> str:
    """Return what differs, in a few words: `another cache salt and other multi-modal items`."""
    parts = []
    for each in differs:
        is_plural = each["what"] in (ITEMS, EMBEDS)
        parts.append(f"{'other' if is_plural else 'another'} {each['what']}")
    return " and ".join(parts)


def differing(trace: Sequence[Event], event: Event) -> list[dict[str, str]]:
    """Return how the request that got or claimed other KV and the one of this KV differ.

    Nothing is returned for other events than a kv.wrong of another identity and a lookup, and where
    the other request is not known.
    """
    if event["kind"] == "lookup":
        named = namesake_of(trace, event)
        return list(named["differs"]) if named is not None else []
    if event["kind"] != "kv.wrong" or event["found"] != "other_identity":
        return []
    other = event["origin_req"]
    if other is None:
        return []
    mine = event["req"], event["generation"]
    lives = [
        (e["req"], e["generation"])
        for e in trace
        if e["kind"] == "req.scheduled" and e["req"] == other and e["seq"] < event["seq"]
    ]
    theirs = next((life for life in reversed(lives) if life != mine), (other, 0))
    found = differences(_known(trace, *mine), _known(trace, *theirs))
    return found if restarted(trace) or found[0]["what"] != MODEL else []


def tenant(trace: Sequence[Event], event: Event) -> tuple[Any, ...]:
    """Return the cache salt, and the adapter's name and path, of the request of an event."""
    known = _known(trace, event["req"], event.get("generation", 0))
    adapter = known["adapter"]
    return known["salt"], *(() if adapter is None else (adapter["name"], adapter["path"]))


def namesake_of(trace: Iterable[Event], lookup: Event) -> Event | None:
    """Return the event that names the request whose KV a lookup claims; None if there is none."""
    told = ("lookup", "lookup.namesake")
    after = (e for e in trace if e["seq"] > lookup["seq"] and e["kind"] in told)
    found = next(after, None)
    return found if found is not None and found["kind"] == "lookup.namesake" else None


def restarted(trace: Sequence[Event]) -> bool:
    """Return whether the engine was restarted, maybe with another model."""
    return any(map(is_restart, trace))


def _known(trace: Sequence[Event], req: str, generation: int) -> Mapping[str, Any]:
    """Return what tells an incarnation of a request apart, with all that its session was given."""
    return next(
        (
            e
            for e in reversed(trace)
            if e["kind"] == "request.identity" and (e["req"], e["generation"]) == (req, generation)
        ),
        NONE,
    )


def _value(value: object) -> str:
    return "none" if value is None else repr(value)


def _adapter(adapter: Mapping[str, Any] | None) -> str:
    if not adapter:
        return "none"
    path = f" at {adapter['path']}" if adapter["path"] else ""
    return f"{adapter['name']!r}{path}"


def _embeds(embeds: Mapping[str, Any] | None) -> str:
    if not embeds:
        return "none"
    rows = f" ({embeds['rows']} rows)" if embeds.get("rows") else ""
    if embeds["then"] is None:
        return f"{embeds['of']!r}{rows}"
    return f"{embeds['of']!r} and from row {embeds['until']} on {embeds['then']!r}{rows}"


def _items(items: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{item['id']!r} at {item['at']}" for item in items) or "none"
