# SPDX-License-Identifier: Apache-2.0
"""The unpacked pack that this process runs from, if any."""

from __future__ import annotations

from pathlib import Path

import kvconform
from kvconform.pack import launch


def notes(site: Path | None = None) -> list[str]:
    """Return what a report says about the pack in `site`, where kvconform lies; none without."""
    site = site or Path(kvconform.__file__).parent.parent
    if not (site / launch.MANIFEST).is_file():
        return []
    names = ", ".join(launch.stand_ins(site)) or "none"
    return [f"vLLM runs from a pack, without its compiled parts; stand-ins: {names}"]
