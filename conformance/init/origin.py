# SPDX-License-Identifier: Apache-2.0
"""Where this kvconform came from, so that CI can be pinned to the same one."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

GITHUB = re.compile(r"(?:https://|ssh://git@|git@)github\.com[/:]([\w.-]+/[\w.-]+?)(?:\.git)?/?")
REACHABLE = re.compile(r"(https?|ssh|git)://|[\w.-]+@[\w.-]+:")
HIDDEN = re.compile(r"^(https?://)[^/@]*@")


@dataclass(frozen=True)
class Origin:
    """A repository that others reach, and a commit. Both are None where that is unknown."""

    url: str | None = None
    commit: str | None = None

    @property
    def on_github(self) -> str | None:
        """`owner/name`, if it is there."""
        found = GITHUB.fullmatch(self.url or "")
        return found[1] if found else None


def origin() -> Origin:
    """Of what is installed: pip's record of a repository or a checkout, else unknown."""
    try:
        text = importlib.metadata.distribution("kvconform").read_text("direct_url.json")
        record = json.loads(text) if text else {}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return Origin()
    return of_record(record)


def of_record(record: dict[str, Any]) -> Origin:
    """`record`: what pip writes into direct_url.json."""
    url = str(record.get("url", ""))
    if "vcs_info" in record:
        return _public(url, record["vcs_info"].get("commit_id"))
    if url.startswith("file://"):
        folder = unquote(urlsplit(url).path)
        return _public(_git(folder, "remote", "get-url", "origin") or "", _git(folder, "rev-parse", "HEAD"))
    return Origin()


def _public(url: str, commit: str | None) -> Origin:
    """Never with a password or a token, and never a folder of this machine."""
    url = HIDDEN.sub(r"\1", url)
    return Origin(url, commit) if REACHABLE.match(url) and commit else Origin()


def _git(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
