# SPDX-License-Identifier: Apache-2.0
"""The repository and commit of this kvconform, so that CI can be pinned to the same one."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

GITHUB = re.compile(
    r"(?:https://|ssh://git@|git@)github\.com[/:]([\w.-]+/[\w.-]+?)(?:\.git)?/?", re.ASCII
)
SCHEMES = ("https", "http", "git", "ssh")
HOST = r"[a-z0-9][a-z0-9.-]*"
SHORT = re.compile(rf"git@(?i:{HOST}):(?!/?-)[\w./~+%-]+", re.ASCII)
"""ssh's short form, `git@host:owner/name.git`; other users' names must not be written to a file."""

PATH = re.compile(r"/[\w./~+%-]+", re.ASCII)
"""A path without characters that can hide credentials (`:`, `@`) or mean something to a shell."""


@dataclass(frozen=True)
class Origin:
    """A repository that others can reach, and a commit; both None if unknown."""

    url: str | None = None
    commit: str | None = None

    @property
    def on_github(self) -> str | None:
        """`owner/name` of a repository on GitHub, else None."""
        found = GITHUB.fullmatch(self.url or "")
        return found[1] if found else None


def origin() -> Origin:
    """Return the origin of the installed kvconform from pip's record, if that names one."""
    try:
        text = importlib.metadata.distribution("kvconform").read_text("direct_url.json")
        record = json.loads(text) if text else {}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return Origin()
    return of_record(record)


def of_record(record: dict[str, Any]) -> Origin:
    """Return the origin in `record`, pip's direct_url.json: a git repository or a checkout."""
    url = str(record.get("url", ""))
    if "vcs_info" in record:
        found = record["vcs_info"]
        return _public(url, found.get("commit_id")) if found.get("vcs") == "git" else Origin()
    if url.startswith("file://"):
        folder = unquote(urlsplit(url).path)
        return _public(
            _git(folder, "remote", "get-url", "origin") or "", _git(folder, "rev-parse", "HEAD")
        )
    return Origin()


def public(url: str) -> str | None:
    """Return a repository's URL without credentials.

    It has scheme, host, port and path, and of users only ssh's `git`. None for a local folder, and
    for a URL that may still contain a password or a token.
    """
    if SHORT.fullmatch(url):
        return url
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if (
        parts.scheme not in SCHEMES
        or not re.fullmatch(HOST, host, re.ASCII)
        or not PATH.fullmatch(parts.path)
    ):
        return None
    if parts.scheme == "ssh" and parts.username not in (None, "git"):
        return None  # another user's URL is useless without the user
    user = "git@" if parts.scheme == "ssh" and parts.username else ""
    return f"{parts.scheme}://{user}{host}{'' if port is None else f':{port}'}{parts.path}"


def _public(url: str, commit: str | None) -> Origin:
    shown = public(url)
    if shown and commit and re.fullmatch("[0-9a-f]{4,64}", commit):
        return Origin(shown, commit)
    return Origin()


def _git(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
