# SPDX-License-Identifier: Apache-2.0
"""The case file of a failure that exploration found: its diagnosis, its command, its workload."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from kvconform.explore.campaign import Found
from kvconform.explore.workload import WIDTH, text_of
from kvconform.files import replace
from kvconform.report.layout import wrapped


def keep(found: Found, folder: Path, again: str) -> None:
    """Write the failure's case to `folder`, over an earlier version of it.

    `again`: the command that runs a case. The file is replaced as a whole, so that an interrupted
    campaign leaves no half of it. `found.path` is then the file's path.
    """
    failure, workload = found.failure, found.workload
    requirement, detail, risk = failure.key
    key = "-".join(part for part in (requirement, detail, risk and "risk") if part)
    name = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
    state = "and shrunk" if found.shrunk else "not shrunk to the end"
    data = {
        **workload.data,
        "id": f"found.{name}",
        "text": f"Found by exploration, {state}: fails {failure.requirement}.",
    }
    where = f"step {failure.step}" + (f", request {failure.req}" if failure.req else "")
    path = folder / f"{name}.yaml"
    said = "\n".join(wrapped(f"{failure.requirement} ({where}): {failure.message}", WIDTH))
    command = f"{again} --case {shlex.quote(str(path))} --seed {workload.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    replace(path, text_of(data, f"{said}\n{command}"))
    found.path = path
