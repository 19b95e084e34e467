# SPDX-License-Identifier: Apache-2.0
"""Parts of the nightly workflow, and the issue that reports on all of them.

    part NAME COMMAND        run a command, print what it prints, and write nightly/NAME.json
    report FOLDER            print a page on all parts whose files are below FOLDER
    publish FOLDER           write that page to the open issue with the label `nightly`, or to a new
                             one if something failed; close it if nothing did

The workflow runs this file with any Python 3.11, before anything is installed. `{seed}` in COMMAND
is replaced by --seed. In the environment, PARTS is the number of parts of this job, and RUN_URL the
page of the run. NEEDS is GitHub's `toJSON(needs)`: it tells which jobs ended without a report.
`publish` uses GitHub's command `gh`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LABEL = "nightly"
TITLE = "Nightly: {count} of {all} parts failed"
SHOWN = 25
"""Lines of a failed part's output that the page shows."""
WIDTH = 300
"""Characters of a line that it shows."""
MOST = 60_000
"""Characters of the page; GitHub takes 65,536."""


@dataclass(frozen=True)
class Part:
    """Outcome of a part. `said`: the last lines of its output.

    `job`: of the workflow. `total`: number of parts of that job.
    """

    name: str
    command: str
    status: int
    seconds: float
    said: list[str]
    job: str = ""
    total: int = 1


def run(name: str, command: str, folder: Path) -> int:
    """Run a part, and write its outcome to the folder; return its exit status."""
    began = time.monotonic()
    said: deque[str] = deque(maxlen=SHOWN)
    with subprocess.Popen(
        shlex.split(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line.rstrip()[:WIDTH])
    seconds = round(time.monotonic() - began)
    job, total = os.environ.get("GITHUB_JOB", ""), int(os.environ.get("PARTS", "1"))
    part = Part(name, command, process.returncode, seconds, list(said), job, total)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"
    file.write_text(json.dumps(asdict(part)) + "\n", encoding="utf-8")
    return process.returncode


def read(folder: Path) -> list[Part]:
    """Return the outcomes below a folder, by name."""
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("**/*.json"))
    return sorted((Part(**json.loads(text)) for text in texts), key=lambda part: part.name)


def without_report(needs: Mapping[str, Mapping[str, object]], parts: Sequence[Part]) -> list[str]:
    """Return a sentence for each job that did not succeed, unless failed parts of it say why."""
    found = []
    for name, job in needs.items():
        mine = [part for part in parts if part.job == name]
        missing = mine[0].total - len(mine) if mine else 0
        if job["result"] == "success":
            continue
        if not mine:
            found.append(f"The job `{name}` ended as {job['result']}, without any report.")
        elif missing > 0:
            found.append(f"{missing} of {mine[0].total} parts of the job `{name}` have no report.")
        elif not any(part.status for part in mine):
            found.append(f"The job `{name}` ended as {job['result']} after its parts had passed.")
    return found


def page(parts: Sequence[Part], missing: Sequence[str], where: str) -> str:
    """Return the page. `missing`: sentences about jobs without a report. `where`: the run's URL."""
    failed = [part for part in parts if part.status]
    lines = [f"{len(failed)} of {len(parts)} parts failed in [this run]({where}).", *missing, ""]
    lines += ["| part | status | minutes |", "|---|---|---|"]
    lines += [
        f"| {part.name} | {part.status or 'passed'} | {part.seconds / 60:.0f} |" for part in parts
    ]
    for part in failed:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", "\n".join(part.said))), default=0))
        lines += ["", f"## {part.name}", "", f"    {part.command}", "", fence, *part.said, fence]
    text = "\n".join(lines) + "\n"
    return text if len(text) <= MOST else text[:MOST] + "\n\nThe rest is left out: see the run.\n"


def publish(parts: Sequence[Part], missing: Sequence[str], where: str) -> None:
    """Open, update or close the issue. CalledProcessError if `gh` fails."""
    count = sum(bool(part.status) for part in parts)
    good = bool(parts) and not count and not missing
    found = _gh("issue", "list", "--label", LABEL, "--state", "open", "--json", "number")
    numbers = sorted(each["number"] for each in json.loads(found))
    text = page(parts, missing, where)
    title = TITLE.format(count=count, all=len(parts))
    if numbers:
        number = str(numbers[0])
        _gh("issue", "edit", number, "--title", title, "--body-file", "-", text=text)
        if good:
            _gh("issue", "close", number)
    elif not good:
        _gh("label", "create", LABEL, "--force")
        _gh("issue", "create", "--title", title, "--label", LABEL, "--body-file", "-", text=text)


def _gh(*words: str, text: str = "") -> str:
    done = subprocess.run(["gh", *words], input=text, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the status of the part, or 0."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="nightly.py", description=__doc__, formatter_class=form)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("part")
    running.add_argument("--seed", default="0")
    running.add_argument("--folder", type=Path, default=Path("nightly"))
    running.add_argument("name")
    running.add_argument("part")
    for verb in ("report", "publish"):
        verbs.add_parser(verb).add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.verb == "part":
        return run(given.name, given.part.replace("{seed}", given.seed), given.folder)
    parts = read(given.folder)
    missing = without_report(json.loads(os.environ.get("NEEDS", "{}")), parts)
    where = os.environ.get("RUN_URL", "")
    if given.verb == "publish":
        publish(parts, missing, where)
    else:
        print(page(parts, missing, where), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
