# SPDX-License-Identifier: Apache-2.0
"""Small reports that are written by hand, for the commands that read reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEADER = {
    "type": "header",
    "suite": "0.1.0",
    "vllm": "0.32.0",
    "connector": "pkg:Conn",
    "engines": ["vllm"],
    "scheduling": ["sync"],
    "seed": 0,
    "profile": "core",
    "capabilities": {"store": True},
}
RUN = {"engine": "vllm", "scheduling": "sync", "runner": "v1", "depth": 1, "block_size": 4}


def row(requirement: str, verdict: str, case: str = "a.case", **fields: Any) -> dict[str, Any]:
    known = {"type": "row", "requirement": requirement, "case": case, **RUN, "verdict": verdict}
    return {**known, **fields}


def report(
    folder: Path, *rows: dict[str, Any], answer: str | None = "conformant", **header: Any
) -> str:
    """Write a report with this verdict; one that is cut short, without a verdict."""
    folder.mkdir()
    footer = [{"type": "footer", "counts": {}, "verdict": answer}] if answer else []
    (folder / "report.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [HEADER | header, *rows, *footer]),
        encoding="utf-8",
    )
    return str(folder)
