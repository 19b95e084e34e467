# SPDX-License-Identifier: Apache-2.0
"""Which requirement is about which hook, and about which field of the engine's outputs: `python -m kvconform.dev.coverage` prints the table.

The hooks and fields are read from the installed vLLM's source (vLLM is not imported); what a requirement is about, it says in `touches`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvconform.compat.interface import items
from kvconform.contract.loader import Spec, load_spec

NOT_READ = {
    "SchedulerOutput.scheduled_encoder_inputs": "the encoder cache's",
    "SchedulerOutput.scheduled_encoder_input_stats": "the encoder cache's",
    "SchedulerOutput.encoder_input_updates": "the encoder cache's",
    "SchedulerOutput.free_encoder_mm_hashes": "the encoder cache's",
    "SchedulerOutput.ec_connector_metadata": "the encoder cache connector's",
    "SchedulerOutput.ec_manager_metadata": "the encoder cache's",
    "SchedulerOutput.aux_output_connector_metadata": "another connector's",
    "SchedulerOutput.has_structured_output_requests": "set after the connector has seen the output",
    "SchedulerOutput.pending_structured_output_tokens": "set after the connector has seen the output",
    "SchedulerOutput.num_invalid_spec_tokens": "set after the connector has seen the output",
    "SchedulerOutput.num_spec_tokens_to_schedule": "the drafter's; drafts that count are in scheduled_spec_decode_tokens",
    "SchedulerOutput.skip_drafts": "the drafter's",
    "SchedulerOutput.kv_cache_block_copies": "the model runner's: copied before anything that a connector sees",
    "NewRequestData.pooling_params": "says nothing about KV",
    "NewRequestData.replay_start": "the model runner's: of one model only",
}
"""Fields that are no connector's business, and why."""

LATER = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")
"""Hooks that releases have which are newer than the one that the specification was read from (0.33)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A hook (`hook`) or a field (`Class.field`), the requirements about it, and why none has to be."""

    item: str
    requirements: list[str]
    not_read: str | None


def table(spec: Spec) -> list[Row]:
    """One row per item, in the order of vLLM's source."""
    about: dict[str, list[str]] = {}
    for req in spec.requirements.values():
        for item in req.touches:
            about.setdefault(item, []).append(req.id)
    return [Row(item, about.get(item, []), NOT_READ.get(item)) for item in dict.fromkeys(items())]


def problems(spec: Spec) -> list[str]:
    """Sentences about items that nothing is about although it should be, or should not be although something is."""
    rows = table(spec)
    found = [
        f"no requirement touches {row.item}"
        for row in rows
        if not row.requirements and row.not_read is None
    ]
    found += [
        f"{row.item} is {row.not_read}, but {row.requirements[0]} touches it"
        for row in rows
        if row.requirements and row.not_read
    ]
    return found


def render(spec: Spec) -> str:
    """The table in Markdown."""
    lines = ["| hook or field | requirements |", "|---|---|"]
    for row in table(spec):
        names = ", ".join(f"`{name}`" for name in row.requirements)
        lines.append(
            f"| `{row.item}` | {names or ('not read: ' + row.not_read if row.not_read else '**none**')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table; 1 if something is missing from it."""
    spec = load_spec()
    print(render(spec), end="")
    missing = problems(spec)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
