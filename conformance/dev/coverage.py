# SPDX-License-Identifier: Apache-2.0
"""The requirements about each hook and each field of the engine's outputs.

`python -m kvconform.dev.coverage` prints the table. The hooks and fields are read from the
installed vLLM's source (vLLM is not imported); `touches` of a requirement names those it is about.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvconform.compat.interface import items
from kvconform.contract.loader import Spec, load_spec

_SET_TOO_LATE = "set after the connector has seen the output"

NOT_READ = {
    "SchedulerOutput.scheduled_encoder_inputs": "of the encoder cache",
    "SchedulerOutput.scheduled_encoder_input_stats": "of the encoder cache",
    "SchedulerOutput.encoder_input_updates": "of the encoder cache",
    "SchedulerOutput.free_encoder_mm_hashes": "of the encoder cache",
    "SchedulerOutput.ec_connector_metadata": "of the encoder cache connector",
    "SchedulerOutput.ec_manager_metadata": "of the encoder cache",
    "SchedulerOutput.aux_output_connector_metadata": "of another connector",
    "SchedulerOutput.has_structured_output_requests": _SET_TOO_LATE,
    "SchedulerOutput.pending_structured_output_tokens": _SET_TOO_LATE,
    "SchedulerOutput.num_invalid_spec_tokens": _SET_TOO_LATE,
    "SchedulerOutput.num_spec_tokens_to_schedule": (
        "of the drafter; scheduled drafts are in scheduled_spec_decode_tokens"
    ),
    "SchedulerOutput.skip_drafts": "of the drafter",
    "SchedulerOutput.kv_cache_block_copies": (
        "of the model runner: copied before anything that a connector sees"
    ),
    "NewRequestData.pooling_params": "unrelated to KV",
    "NewRequestData.replay_start": "of the model runner, for one model only",
}
"""Fields that connectors do not read, and why."""

LATER = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")
"""Hooks that a newer release (0.33) has, but not the one that the specification was read from."""


@dataclass(frozen=True, slots=True)
class Row:
    """A hook (`hook`) or a field (`Class.field`), and the requirements about it.

    `not_read` says why it needs no requirement, or is None.
    """

    item: str
    requirements: list[str]
    not_read: str | None


def table(spec: Spec) -> list[Row]:
    """Return one row per hook or field, in the order of vLLM's source."""
    about: dict[str, list[str]] = {}
    for req in spec.requirements.values():
        for item in req.touches:
            about.setdefault(item, []).append(req.id)
    return [Row(item, about.get(item, []), NOT_READ.get(item)) for item in dict.fromkeys(items())]


def problems(spec: Spec) -> list[str]:
    """Return a sentence per item that lacks a requirement, or has one and should not."""
    rows = table(spec)
    found = [
        f"no requirement touches {row.item}"
        for row in rows
        if not row.requirements and row.not_read is None
    ]
    found += [
        f"{row.item} is listed as not read, but {row.requirements[0]} touches it"
        for row in rows
        if row.requirements and row.not_read
    ]
    return found


def render(spec: Spec) -> str:
    """Return the table in Markdown."""
    lines = ["| hook or field | requirements |", "|---|---|"]
    for row in table(spec):
        if row.requirements:
            about = ", ".join(f"`{name}`" for name in row.requirements)
        elif row.not_read:
            about = f"not read: {row.not_read}"
        else:
            about = "**none**"
        lines.append(f"| `{row.item}` | {about} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table, and on stderr what is missing from it; return 1 if something is."""
    spec = load_spec()
    print(render(spec), end="")
    missing = problems(spec)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
