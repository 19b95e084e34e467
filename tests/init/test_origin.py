# SPDX-License-Identifier: Apache-2.0
"""Tests of how the origin of the installed kvconform is found, to which CI is pinned."""

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


@pytest.mark.parametrize(
    "url, shown",
    [
        ("https://me:s3cret@example.org/kvconform.git", "https://example.org/kvconform.git"),
        ("https://s3cret@example.org:8443/kvconform.git", "https://example.org:8443/kvconform.git"),
        ("https://us@er:s3cret@example.org/x.git", "https://example.org/x.git"),
        ("https://example.org/x.git?private_token=s3cret", "https://example.org/x.git"),
        ("https://example.org/x.git#s3cret", "https://example.org/x.git"),
        ("git://me:s3cret@example.org/x.git", "git://example.org/x.git"),
        ("ssh://git:s3cret@example.org/x.git", "ssh://git@example.org/x.git"),
        ("ssh://s3cret@example.org/x.git", None),
        ("s3cret@example.org:x.git", None),
        ("https://example.org/me:s3cret@other/x.git", None),
        ("https://example.org:s3cret/x.git", None),
        ("https://s3cret", None),
        ("ext::sh -c s3cret", None),
        ("https://example.org/x.git; touch s3cret", None),
        ("https://example.org/$(s3cret)", None),
        ("ssh://-oProxyCommand=s3cret/x.git", None),
        ("git@example.org:-s3cret", None),
        ("git@example.org:x.git\ns3cret", None),
    ],
)
def test_a_password_or_a_token_is_never_written_down(url: str, shown: str | None) -> None:
    found = vcs(url)
    assert found == (Origin(shown, "abc123") if shown else Origin()) and "s3cret" not in str(found)


def test_without_a_commit_nothing_is_pinned() -> None:
    for commit in (None, "", "main; touch x"):
        assert (
            of_record(
                {
                    "url": "https://example.org/x.git",
                    "vcs_info": {"vcs": "git", "commit_id": commit},
                }
            )
            == Origin()
        )
    assert (
        of_record(
            {"url": "https://example.org/x", "vcs_info": {"vcs": "hg", "commit_id": "abc123"}}
        )
        == Origin()
    ), "CI clones with git"


def test_a_checkout_has_the_url_of_its_origin(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@example.org",
            *arguments,
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    record = {"url": tmp_path.as_uri(), "dir_info": {}}
    assert of_record(record) == Origin()
    git("commit", "-q", "--allow-empty", "-m", "first")
    git("remote", "add", "origin", str(tmp_path))
    assert of_record(record) == Origin(), "a folder of this machine is nothing that CI reaches"
    git("remote", "set-url", "origin", "https://github.com/acme/kvconform")
    assert of_record(record) == Origin(
        "https://github.com/acme/kvconform", git("rev-parse", "HEAD")
    )


def test_a_wheel_or_an_archive_says_nothing() -> None:
    assert (
        of_record({})
        == of_record({"url": "https://example.org/kvconform.whl", "archive_info": {}})
        == Origin()
    )
