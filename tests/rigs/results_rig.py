# SPDX-License-Identifier: Apache-2.0
"""Small reports from which results are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import places
import reports_rig
from kvconform.dev.results.__main__ import ROOT

HERE = places.ROOT / ROOT
HEADER = reports_rig.HEADER | {"connector": "x", "adapters": ["a stand-in"]}
ROW = {"type": "row", "case": "chunked.abort", **reports_rig.RUN}
FOOTER = {"type": "footer", "counts": {}, "verdict": "nonconformant"}


def report(folder: Path, rows: list[dict[str, Any]], *, end: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [HEADER, *({**ROW, **row} for row in rows), *([FOOTER] if end else [])]
    (folder / "report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


ROWS = [
    {
        "requirement": "save.confirmed",
        "engine": "vllm",
        "verdict": "FAIL",
        "exercised": 3,
        "count": 1,
    },
    {"requirement": "save.confirmed", "engine": "reference", "verdict": "PASS", "exercised": 2},
    {"requirement": "load.only-grant", "engine": "vllm", "verdict": "PASS", "exercised": 5},
    {"requirement": "lookup.identity", "engine": "vllm", "verdict": "NOT_EXERCISED"},
]
