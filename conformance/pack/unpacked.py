# SPDX-License-Identifier: Apache-2.0
"""The unpacked pack that this process runs from, if any."""

from __future__ import annotations

import json
from pathlib import Path

import kvconform
from kvconform.pack import launch


def notes(site: Path | None = None) -> list[str]:
    """Return what a report says about the pack in `site`, where kvconform lies; none without."""
    site = site or Path(kvconform.__file__).parent.parent
    if not (site / launch.MANIFEST).is_file():
        return []
    manifest = json.loads((site / launch.MANIFEST).read_text(encoding="utf-8"))
    capability = manifest.get("capability")
    compiled = (
        f"with its compiled parts for compute capability {capability}"
        if capability
        else "without its compiled parts"
    )
    names = ", ".join(launch.stand_ins(site)) or "none"
    return [f"vLLM runs from a pack, {compiled}; stand-ins: {names}"]
