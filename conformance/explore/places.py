# SPDX-License-Identifier: Apache-2.0
"""The option `--corpus`: where a corpus is, as a database of Hypothesis.

A database maps keys to sets of values. What one campaign saves, those of other processes and
machines fetch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kvconform.errors import EnvironmentProblem, UsageError, one_line
from kvconform.files import check_writable

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

REDIS = ("redis", "rediss", "unix")
KINDS = "a folder, read:FOLDER, redis://HOST:PORT/NUMBER, or github:OWNER/REPOSITORY[/ARTIFACT]"
SCHEME = re.compile(r"([a-z][a-z\d+.-]+):(.*)")
ARTIFACT = "kvconform-corpus"
"""The artifact of a GitHub workflow that has a corpus, if the place names none."""
KEPT = timedelta(days=365)
"""How long Redis keeps what no campaign reads."""


def database(places: Sequence[str]) -> ExampleDatabase:
    """Return the database of all places: it reads from all, and writes to those that are writable.

    UsageError for a place that does not exist; EnvironmentProblem if it cannot be reached.
    """
    from hypothesis.database import (
        InMemoryExampleDatabase,
        MultiplexedDatabase,
        ReadOnlyDatabase,
    )

    found = [_database(place) for place in places]
    if all(isinstance(each, ReadOnlyDatabase) for each in found):
        found.append(InMemoryExampleDatabase())
    return found[0] if len(found) == 1 else MultiplexedDatabase(*found)


def _database(place: str) -> ExampleDatabase:
    from hypothesis.database import (
        DirectoryBasedExampleDatabase,
        GitHubArtifactDatabase,
        ReadOnlyDatabase,
    )

    match = SCHEME.fullmatch(place)
    kind, rest = match.groups() if match is not None else ("", place)
    if kind in REDIS:
        return _redis(place)
    if kind == "read":
        if not Path(rest).is_dir():
            raise UsageError(f"--corpus {place}: there is no folder {rest}")
        return ReadOnlyDatabase(DirectoryBasedExampleDatabase(rest))
    if kind == "github":
        owner, _, more = rest.partition("/")
        name, _, artifact = more.partition("/")
        if not (owner and name):
            raise UsageError(f"--corpus {place}: write github:OWNER/REPOSITORY[/ARTIFACT]")
        return ReadOnlyDatabase(GitHubArtifactDatabase(owner, name, artifact or ARTIFACT))
    if kind:
        raise UsageError(f"--corpus {place}: there is no corpus of kind {kind!r}; it is {KINDS}")
    check_writable("--corpus", Path(place))
    return DirectoryBasedExampleDatabase(place)


def _redis(url: str) -> ExampleDatabase:
    shown = re.sub("//[^@/]*@", "//", url)  # without a password
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis
        from redis.exceptions import RedisError
    except ImportError:
        raise UsageError(
            f"--corpus {shown} needs the package redis: pip install 'kvconform[stores]'"
        ) from None
    try:
        client = Redis.from_url(url, socket_timeout=10, socket_connect_timeout=10)
        client.ping()
    except (RedisError, ValueError) as error:
        raise EnvironmentProblem(f"--corpus {shown} cannot be used: {one_line(error)}") from None
    return RedisExampleDatabase(
        client,
        expire_after=KEPT,
        key_prefix=b"kvconform:",
        listener_channel="kvconform-changes",
    )
