# SPDX-License-Identifier: Apache-2.0
"""Capabilities: what a connector declares that it does, and so is judged by."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from kvconform.errors import UsageError, did_you_mean

_YES_NO = (bool, "true or false")
_ROLE = Literal["kv_both", "kv_producer", "kv_consumer"]
Meaning = Literal[
    "bytes_loaded",
    "tokens_loaded",
    "blocks_loaded",
    "tokens_granted",
    "tokens_missed",
    "bytes_saved",
    "tokens_saved",
    "evictions",
    "load_seconds",
    "states_offered",
]
"""Meanings of counters."""
Operation = Literal["lookup", "clear", "move", "pin", "compress"]
"""Operations of a controller."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One capability.

    `default` is assumed when nothing is declared. `kind` is the type of its values, as a type and
    in words. `doc` is one line about it.
    """

    default: Any
    kind: tuple[Any, str]
    doc: str

    def takes(self, value: Any) -> bool:
        """Return whether `value` is of the declared type. Nothing is converted."""
        kind, _ = self.kind
        try:
            TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            return False
        return True


CAPABILITIES: dict[str, Capability] = {
    "store": Capability(
        False, _YES_NO, "keeps KV after its request is gone, for later requests to load"
    ),
    "persistent": Capability(
        False, _YES_NO, "its store outlives the process: a restarted engine loads what it holds"
    ),
    "shared": Capability(
        False, _YES_NO, "its engines find what the others have stored, by the content alone"
    ),
    "saves": Capability(
        "none",
        (Literal["none", "prompt", "all"], "one of none, prompt, all"),
        "what it saves: nothing, prompts only, or generated tokens too",
    ),
    "chunk_tokens": Capability(
        0,
        (Annotated[int, Field(gt=0)], "a whole number above 0"),
        "granularity of what it promises to return, in tokens (0, the default: a block); "
        "with 2 or more, the whole blocks of whole chunks",
    ),
    "skip_save": Capability(
        "",
        (str, "the name of an entry of kv_transfer_params"),
        "the entry of a request's kv_transfer_params that, if true, forbids to store its KV",
    ),
    "least_priority": Capability(
        None,
        (int, "a whole number"),
        "requests of lower priority (greater numbers) are not stored",
    ),
    "skip_last": Capability(
        0,
        (Annotated[int, Field(ge=0)], "a whole number, 0 or more"),
        "how many of a request's last tokens it does not store",
    ),
    "best_effort": Capability(
        False,
        _YES_NO,
        "stores or loads less, or nothing, when it is busy, when it is not worth it, or for "
        "requests that it leaves alone, such as those with adapters or images",
    ),
    "synthesises_kv": Capability(False, _YES_NO, "makes KV that no engine computed"),
    "non_prefix_reuse": Capability(
        False,
        (
            bool | Annotated[float, Field(gt=0, allow_inf_nan=False)],
            "true, false or a tolerance such as 0.5",
        ),
        "reuses KV of content that is not a prefix (false, true, or how far that KV may be off)",
    ),
    "recomputes": Capability(
        0.0,
        (Annotated[float, Field(ge=0, lt=1)], "a part of 1, such as 0.15"),
        "the part of the tokens behind reused KV that are computed again, in their context",
    ),
    "lossy": Capability(
        False,
        (
            bool | Annotated[float, Field(gt=0, lt=1)],
            "true, false or a tolerance such as 0.01",
        ),
        "returns KV that differs within a tolerance (false, or the tolerance)",
    ),
    "async_load": Capability(False, _YES_NO, "answers lookups with an asynchronous load"),
    "hma": Capability(
        False, _YES_NO, "supports the hybrid memory allocator (several KV cache groups)"
    ),
    "composite": Capability(
        False, _YES_NO, "is made of other connectors, as vLLM's MultiConnector is"
    ),
    "context_parallel": Capability(
        True,
        _YES_NO,
        "works where the tokens of a block are split over ranks (decode context parallelism), or "
        "refuses at its start",
    ),
    "pipeline_parallel": Capability(
        True,
        _YES_NO,
        "takes the handshake metadata of every pipeline stage, if it has any",
    ),
    "leases": Capability(
        False,
        _YES_NO,
        "keeps what a lookup has claimed until it is loaded or the request is not admitted",
    ),
    "controller": Capability(
        (),
        (
            tuple[Operation, ...] | list[Operation],
            "a list of lookup and any of clear, move, pin and compress",
        ),
        "what an operator may ask of the stored KV, by the methods of its kvconform_controller()",
    ),
    "fault_injection": Capability(False, _YES_NO, "lets the harness make loads fail"),
    "fault_injection_by_rank": Capability(
        False, _YES_NO, "lets the harness make loads fail of which one rank has lost its share"
    ),
    "kv_events": Capability(False, _YES_NO, "publishes KV events for all that it stores"),
    "names_sources": Capability(
        False, _YES_NO, "counts every token of a load under host, p2p or disk, none as unspecified"
    ),
    "metrics": Capability(
        {},
        (
            dict[Meaning, list[str]],
            f"a mapping of {', '.join(get_args(Meaning)[:-1])} or {get_args(Meaning)[-1]} to lists "
            "of names",
        ),
        "names of counters in the log or among the metrics, by their meaning: bytes, tokens or "
        "blocks that loads wrote, tokens that the engine granted or that lookups did not find, "
        "bytes or tokens that were saved, entries that left a level, seconds of loads, states that "
        "the engine offered",
    ),
    "transfer": Capability(
        False,
        _YES_NO,
        "hands KV from a producer to a consumer engine, by the requests' kv_transfer_params",
    ),
    "notes": Capability(
        False,
        _YES_NO,
        "its consumer tells the producer when it needs the KV no longer (else a lease ends it)",
    ),
    "first_token": Capability(
        False,
        _YES_NO,
        "its router sends the consumer the prompt with the producer's first token at its end",
    ),
    "roles": Capability(
        ("kv_both",),
        (tuple[_ROLE, ...] | list[_ROLE], "a list of kv_both, kv_producer and kv_consumer"),
        "the kv_role values that it works with",
    ),
}


def complete(declared: dict[str, Any]) -> dict[str, Any]:
    """Return all capabilities: the declared values, and the defaults of the others.

    UsageError for unknown names, or else for all values of the wrong type.
    """
    if unknown := [name for name in declared if name not in CAPABILITIES]:
        hints = {name: did_you_mean(name, CAPABILITIES, 1) for name in unknown}
        known = "" if all(hints.values()) else f"; known are {', '.join(sorted(CAPABILITIES))}"
        if len(unknown) == 1:
            raise UsageError(f"unknown capability {unknown[0]!r}{hints[unknown[0]]}{known}")
        named = [f"{name!r}" + re.sub("; (.*)", r" (\1)", hint) for name, hint in hints.items()]
        raise UsageError(f"unknown capabilities: {', '.join(named)}{known}")
    wrong = [
        f"capability {name} must be {CAPABILITIES[name].kind[1]} (it is {value!r})"
        for name, value in declared.items()
        if not CAPABILITIES[name].takes(value)
    ]
    if wrong:
        raise UsageError("; ".join(wrong))
    operations = declared.get("controller", ())
    if operations and "lookup" not in operations:
        raise UsageError(
            f"capability controller is {operations!r}; it must have lookup, which shows what the "
            "other operations did"
        )
    return {name: declared.get(name, known.default) for name, known in CAPABILITIES.items()}


EXCUSES = ("best_effort", "synthesises_kv", "non_prefix_reuse", "lossy")
"""Capabilities by which a connector promises less, not more."""


def common(caps: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return capabilities `caps`, but for what a connector that has `others` does not promise.

    `others` need not name all of them.
    """
    found = dict(caps)
    for name, value in others.items():
        own = caps[name]
        if name in EXCUSES or name == "chunk_tokens":
            found[name] = max(own, value)
        elif name == "saves":
            found[name] = min(own, value, key=("none", "prompt", "all").index)
        elif isinstance(value, bool):
            found[name] = own and value
    return found


def has(value: Any) -> bool:
    """Return whether a capability counts as present when it is named alone.

    Examples: `hma`, `!lossy`, `saves`.
    """
    return bool(value) and value != "none"


MOST_LOSSY = 1 / 32
"""Largest tolerance: beyond 1/30 the codes that the harness writes into KV are ambiguous."""


def tolerance(lossy: bool | float) -> float:
    """Return how far loaded KV may be off, as a fraction of the largest value.

    It is the declared tolerance, at most MOST_LOSSY.
    """
    return min(float(lossy), MOST_LOSSY)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far loaded KV of a real model may be off.

    `lossy`: the largest difference, as a part of the largest value; None if nothing may be lost.
    `reused`: of KV that was computed behind other tokens, the root mean square of the difference
    of a layer, as a part of that of its values; infinite if the connector declares no number, None
    if it reuses prefixes only.
    """

    lossy: float | None = None
    reused: float | None = None

    @classmethod
    def of(cls, caps: dict[str, Any]) -> Tolerances:
        """Return those that the capabilities declare."""
        lossy = caps["lossy"]
        reused = caps["non_prefix_reuse"]
        return cls(
            lossy=None if lossy is False else MOST_LOSSY if lossy is True else float(lossy),
            reused=None if reused is False else inf if reused is True else float(reused),
        )

    def encode(self) -> str:
        """Return a text for `decode`."""
        return json.dumps([self.lossy, self.reused])

    @classmethod
    def decode(cls, text: str) -> Tolerances:
        """Undo `encode`."""
        return cls(*json.loads(text))


EXACT = Tolerances()
"""Those of a connector that declares none."""
