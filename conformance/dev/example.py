# SPDX-License-Identifier: Apache-2.0
"""The example report in the documentation, and its excerpt for the README.

`python -m kvconform.dev.example` runs vLLM's ExampleConnector and writes the report;
`python -m kvconform.dev.example FILE` takes the output of such a run from a file.
"""

from __future__ import annotations

import os
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
FIELDS = ("rule", "found", "where", "reproduce")
"""The fields of the failure that it shows."""
MOST = 20
"""Lines of the excerpt."""
WIDTH = "100"
"""Columns of the report."""


def whole(output: str) -> str:
    """Return the text of the report, without what differs from run to run, below its command."""
    lines = [f"$ kvconform {shlex.join(ARGUMENTS)}"]
    for line in output.splitlines():
        if re.match(r"\d+ of \d+ runs made, ", line):
            continue
        if line.startswith("reports "):
            line = re.sub(r"^(reports +)\S+", r"\1kvconform-report", line)
        lines.append(re.sub(r"  in [\d.]+ s$", "", line.rstrip()))
    return "\n".join(lines) + "\n"


def excerpt(root: Path) -> str:
    """Return the excerpt of the checkout's report, as a code block of Markdown.

    UsageError if the report lacks a part of it.
    """
    lines = (root / PLACE).read_text(encoding="utf-8").splitlines()
    titles = [n for n, line in enumerate(lines) if re.match(rf"── \d+\. {PANEL} ─", line)]
    answers = [number for number, line in enumerate(lines) if line.startswith("NOT CONFORMANT")]
    if not titles or not answers:
        raise UsageError(f"{PLACE} has no failure of {PANEL} or no verdict")
    end = next(n for n in range(titles[0], len(lines)) if not lines[n])
    shown = [
        lines[0],
        "...",
        lines[titles[0]],
        *_shown(lines[titles[0] + 1 : end]),
        "...",
        *lines[answers[-1] :],
    ]
    if len(shown) > MOST:
        raise UsageError(f"the excerpt of {PLACE} has {len(shown)} lines, at most {MOST} fit")
    return "\n".join(["```", *shown, "```"]) + "\n"


def _shown(section: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a failure that the excerpt shows."""
    keep = False
    for line in section:
        if re.match(r"[> ] *\d+  ", line):
            keep = line.startswith(">")
        elif line[:1].strip():
            keep = line.startswith(FIELDS)
        if keep:
            yield line


def main(arguments: list[str] | None = None) -> int:
    """Write the report, from a run or from the file that is named."""
    given = sys.argv[1:] if arguments is None else arguments
    if given:
        output = Path(given[0]).read_text(encoding="utf-8")
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "kvconform", *ARGUMENTS]
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "COLUMNS": WIDTH},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
        output = done.stdout
    (ROOT / PLACE).write_text(whole(output), encoding="utf-8")
    print(f"wrote {PLACE}; python -m kvconform.dev.docs puts the excerpt into the README")
    return 0


if __name__ == "__main__":
    sys.exit(main())
