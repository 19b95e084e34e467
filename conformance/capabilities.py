# SPDX-License-Identifier: Apache-2.0
"""Capabilities: what a connector declares about itself, so that it is judged only by what it sets out to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvconform.errors import UsageError


@dataclass(frozen=True, slots=True)
class Capability:
    """One capability: the value assumed when nothing is declared, the values allowed (None: any of the default's type), one line."""

    default: Any
    choices: tuple[Any, ...] | None
    doc: str


CAPABILITIES: dict[str, Capability] = {
    "store": Capability(False, None, "keeps KV after its request is gone, for later requests to load"),
    "saves": Capability("none", ("none", "prompt", "all"), "what it saves: nothing, prompts only, or generated tokens too"),
    "chunk_tokens": Capability(1, None, "granularity of what it promises to return, in tokens"),
    "synthesises_kv": Capability(False, None, "makes KV that no engine computed"),
    "non_prefix_reuse": Capability(False, None, "reuses KV of content that is not a prefix"),
    "lossy": Capability(False, None, "returns KV that differs within a tolerance (false, or the tolerance)"),
    "async_load": Capability(False, None, "answers lookups with an asynchronous load"),
    "layerwise": Capability(False, None, "loads or saves layer by layer"),
    "hma": Capability(False, None, "supports the hybrid memory allocator (several KV cache groups)"),
    "fault_injection": Capability(False, None, "lets the harness make loads fail"),
    "roles": Capability(("kv_both",), None, "the kv_role values that it works with"),
}


def complete(declared: dict[str, Any]) -> dict[str, Any]:
    """All capabilities: the declared ones over the defaults. UsageError for a name or a value that does not exist."""
    for name, value in declared.items():
        known = CAPABILITIES.get(name)
        if known is None:
            raise UsageError(f"unknown capability {name!r}; known are {', '.join(sorted(CAPABILITIES))}")
        if known.choices is not None and value not in known.choices:
            raise UsageError(f"capability {name} is {value!r}; it must be one of {', '.join(map(str, known.choices))}")
    return {name: declared.get(name, known.default) for name, known in CAPABILITIES.items()}


def has(value: Any) -> bool:
    """Whether a capability's value counts as present when it is named alone (`layerwise`, `!lossy`, `saves`)."""
    return bool(value) and value != "none"
