# SPDX-License-Identifier: Apache-2.0
"""The command that runs a failing case again."""

from __future__ import annotations

import shlex

from kvconform.settings import Settings
from kvconform.verdict import Row


def variant_id(row: Row) -> str:
    """Id of the run that a row is about."""
    return f"{row.case}[{row.engine}-{row.scheduling}-{row.runner}-d{row.depth}-b{row.block_size}]"


def command(settings: Settings, row: Row, *, alone: bool) -> str:
    """`kvconform run ...` for the row's run. `alone`: the case has only one run with this engine and scheduling, so its id is enough."""
    parts = ["kvconform", "run", settings.connector]
    if alone:
        parts += ["-k", row.case, "--engine", row.engine, "--scheduling", row.scheduling]
    else:
        parts += ["-k", variant_id(row)]
    parts += ["--seed", str(settings.seed), *settings.arguments]
    return " ".join(shlex.quote(part) for part in parts)
