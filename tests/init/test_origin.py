# SPDX-License-Identifier: Apache-2.0
"""Where kvconform was installed from: what CI is pinned to."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvconform.init.origin import Origin, of_record


def vcs(url: str) -> Origin:
    return of_record({"url": url, "vcs_info": {"vcs": "git", "commit_id": "abc123"}})


@pytest.mark.parametrize(
    "url, github",
    [
        ("https://github.com/acme/kvconform.git", "acme/kvconform"),
        ("ssh://git@github.com/acme/kvconform", "acme/kvconform"),
        ("git@github.com:acme/kvconform.git", "acme/kvconform"),
        ("https://git.example.org/kvconform.git", None),
    ],
)
def test_a_repository(url: str, github: str | None) -> None:
    found = vcs(url)
    assert found.commit == "abc123" and found.on_github == github


def test_a_token_is_never_written_down() -> None:
    assert vcs("https://me:secret@example.org/kvconform.git").url == "https://example.org/kvconform.git"


def test_a_checkout_has_the_url_of_its_origin(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    record = {"url": tmp_path.as_uri(), "dir_info": {}}
    assert of_record(record) == Origin()
    git("commit", "-q", "--allow-empty", "-m", "first")
    git("remote", "add", "origin", str(tmp_path))
    assert of_record(record) == Origin(), "a folder of this machine is nothing that CI reaches"
    git("remote", "set-url", "origin", "https://github.com/acme/kvconform")
    assert of_record(record) == Origin("https://github.com/acme/kvconform", git("rev-parse", "HEAD"))


def test_a_wheel_or_an_archive_says_nothing() -> None:
    assert of_record({}) == of_record({"url": "https://example.org/kvconform.whl", "archive_info": {}}) == Origin()
