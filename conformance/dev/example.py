# SPDX-License-Identifier: Apache-2.0
"""The example report in the documentation, and its excerpt for the README.

`python -m kvconform.dev.example` runs vLLM's ExampleConnector and writes the report;
`python -m kvconform.dev.example FILE` takes the output of such a run from a file.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import kvconform
from kvconform.errors import UsageError

ROOT = Path(kvconform.__file__).resolve().parent.parent
PLACE = Path("docs", "example-connector-report.txt")
ARGUMENTS = ("run", "ExampleConnector", "--extra-config", '{"shared_storage_path": "{tmp}"}')
PANEL = "save.confirmed"
"""The failure that the excerpt shows."""
FIELDS = ("rule", "found", "where")
"""The fields of the failure that it shows."""
MOST = 20
"""Lines of the excerpt."""
BORDER = 100
"""Columns of its border."""


def whole(output: str) -> str:
    """Return the text of the report, without what differs from run to run, below its command."""
    lines = [f"$ kvconform {shlex.join(ARGUMENTS)}"]
    for line in output.splitlines():
        if re.match(r"\d+/\d+ runs, ", line):
            continue
        if line.startswith("reports "):
            line = "reports     kvconform-report"
        lines.append(re.sub(r"  in [\d.]+ s$", "", line.rstrip()))
    return "\n".join(lines) + "\n"


def excerpt(root: Path) -> str:
    """Return the excerpt of the checkout's report, as a code block of Markdown.

    UsageError if the report lacks a part of it.
    """
    lines = (root / PLACE).read_text(encoding="utf-8").splitlines()
    panels = [number for number, line in enumerate(lines) if line.startswith(f"╭─ {PANEL} ")]
    answers = [number for number, line in enumerate(lines) if line.startswith("NOT CONFORMANT")]
    if not panels or not answers:
        raise UsageError(f"{PLACE} has no failure of {PANEL} or no verdict")
    end = next(n for n in range(panels[0], len(lines)) if lines[n].startswith("╰"))
    shown = [
        lines[0],
        "...",
        lines[panels[0]][:BORDER],
        *_shown(lines[panels[0] + 1 : end]),
        lines[end][:BORDER],
        "...",
        *lines[answers[-1] :],
    ]
    if len(shown) > MOST:
        raise UsageError(f"the excerpt of {PLACE} has {len(shown)} lines, at most {MOST} fit")
    return "\n".join(["```", *shown, "```"]) + "\n"


def _shown(panel: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a failure that the excerpt shows."""
    keep = last = False
    for line in panel:
        text = line.removeprefix("│ ").rstrip("│ ")
        last = last or text.startswith("reproduce:")
        if re.match(r"[> ] *\d+  ", text):
            keep = text.startswith(">")
            if keep:
                yield "│"
        elif text[:1].strip():
            keep = text.startswith(FIELDS)
        if text and (keep or last):
            yield f"│ {text}"


def main(arguments: list[str] | None = None) -> int:
    """Write the report, from a run or from the file that is named."""
    given = sys.argv[1:] if arguments is None else arguments
    if given:
        output = Path(given[0]).read_text(encoding="utf-8")
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "kvconform", *ARGUMENTS]
            done = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False
            )
        output = done.stdout
    (ROOT / PLACE).write_text(whole(output), encoding="utf-8")
    print(f"wrote {PLACE}; python -m kvconform.dev.docs puts the excerpt into the README")
    return 0


if __name__ == "__main__":
    sys.exit(main())
