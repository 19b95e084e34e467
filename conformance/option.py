# SPDX-License-Identifier: Apache-2.0
"""Command-line options that say their default themselves, in brackets at the end of their help."""

from __future__ import annotations

from typing import Any

import typer


def option(*names: str, **details: Any) -> Any:
    """typer.Option without a default of its own telling."""
    return typer.Option(*names, **{"show_default": False, **details})
