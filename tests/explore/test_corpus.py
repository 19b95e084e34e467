# SPDX-License-Identifier: Apache-2.0
"""Tests of the corpus: what is saved is found again, by campaigns that run later or meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from corpus_rig import BOTH, MODES, campaign, opened, some
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.explore import corpus as corpora
from kvconform.explore.campaign import Campaign
from kvconform.explore.corpus import Corpus
from kvconform.explore.outcome import Failure, Outcome
from kvconform.explore.places import database
from kvconform.process.forking import forked_after_import
from stores import url_of

CRASH = Failure("hook.no-raise", "it raised", hook="start_load_kv")


@contextmanager
def a_place(kind: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a place for --corpus: a folder, or a database of a Redis server."""
    if kind == "folder":
        yield str(tmp / "corpus")
    else:
        with url_of("redis", tmp, monkeypatch) as url:
            host, port = url.removeprefix("redis:").strip("/").rsplit(":", 1)
            yield f"redis://{host}:{port.partition('/')[0]}/5"


@pytest.fixture(params=["folder", "redis"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    with a_place(request.param, tmp_path, monkeypatch) as found:
        yield found


def test_a_later_campaign_begins_with_what_was_found(place: str) -> None:
    corpus = opened(place)
    workloads = corpus.guided(iter(some(40)), BOTH, MODES)
    first = [next(workloads) for _ in range(4)]
    assert first == some(4)
    assert corpus.add(first[0], Outcome(pairs=[("a", "x"), ("b", "x")])) == 2
    assert corpus.add(first[1], Outcome(pairs=[("a", "x")])) == 0
    assert corpus.add(first[2], Outcome(pairs=[("c", "x")], failures=[CRASH])) == 1
    assert corpus.add(first[3], Outcome(pairs=[("d", "x")])) == 1
    corpus.fail(CRASH, first[2], shrunk=False)
    like = next(workloads), next(workloads)
    # one is new, one is like a kept one
    assert sum(each.data in [workload.data for workload in some(40)] for each in like) == 1
    again = opened(place)
    assert (again.campaign, again.failing, again.received) == (1, 1, 0)
    assert again.seeds == [first[0], first[3]]
    assert again.pairs == {("a", "x"), ("b", "x"), ("d", "x")}
    fresh = again.guided(iter(some(9, seed=2)), BOTH, MODES)
    assert [next(fresh) for _ in range(4)] == [first[2], first[0], first[3], some(1, seed=2)[0]]
    other = Corpus(database([place]), "another connector")
    assert not other.seeds and not other.failing


def test_campaigns_that_run_meanwhile_see_each_other(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "PAUSE", 0.0)
    monkeypatch.setattr(corpora, "SHARE", 0)
    one, two = opened(place), opened(place)
    assert (one.campaign, two.campaign) == (0, 1)
    workloads = two.guided(iter(some(9)), BOTH, MODES)
    assert next(workloads) == some(9)[0]
    found, failed = some(2, seed=7)
    one.add(found, Outcome(pairs=[("a", "x")]))
    one.fail(CRASH, failed, shrunk=True)
    assert next(workloads) == failed, "what failed elsewhere runs here, too"
    assert two.received == 2 and two.seeds == [found] and two.pairs == {("a", "x")}
    assert two.add(found, Outcome(pairs=[("a", "x")])) == 0
    campaign = Campaign(corpus=two)
    [known] = campaign.add(failed, Outcome(failures=[CRASH]))
    assert known.shrunk, "it is not shrunk twice"


def test_the_smallest_workload_of_a_failure_stays_until_it_fails_no_more(place: str) -> None:
    small, middle, large = sorted(some(3), key=lambda each: each.size)
    one, two = opened(place), opened(place)
    one.fail(CRASH, middle, shrunk=False)
    two.fail(CRASH, large, shrunk=False)  # neither knows of the other yet
    three = opened(place)
    assert three.failing == 1 and not three.is_shrunk(CRASH, middle)
    three.fail(CRASH, large, shrunk=True)
    three.fail(CRASH, small, shrunk=True)
    four = opened(place)
    assert four.is_shrunk(CRASH, small) and four.failing == 1
    assert next(four.guided(iter(()), BOTH, MODES)) == small
    for outcome in (Outcome(error="x"), Outcome(unsupported=True), Outcome(failures=[CRASH])):
        four.add(small, outcome)
        assert opened(place).failing == 1
    four.add(small, Outcome())
    assert opened(place).failing == 0


@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_in_which_failures_are_read_does_not_matter(
    backwards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis returns a set; only the smallest workload of a failure is replayed, and stays."""
    small, large = sorted(some(2), key=lambda each: each.size)
    one, two = opened(tmp_path), opened(tmp_path)
    for corpus, workload in ((one, large), (two, small)):
        corpus.fail(CRASH, workload, shrunk=False)
    fetch = Corpus._fetch
    monkeypatch.setattr(
        Corpus, "_fetch", lambda self, kind: sorted(fetch(self, kind), key=len, reverse=backwards)
    )
    found = opened(tmp_path)
    assert next(found.guided(iter(()), BOTH, MODES)) == small
    assert len(fetch(found, "failures")) == 1


def test_two_processes_use_one_corpus(place: str) -> None:
    both = [forked_after_import().Process(target=campaign, args=(place,)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(200)
        assert each.exitcode == 0
    found = opened(place)
    assert len(found.seeds) == 24 and len(found.pairs) == 24
    numbers = {int(name.removeprefix("campaign ")) for name, _ in found.pairs}
    assert len(numbers) == 2
    assert found.seeds[:12] == some(12, seed=min(numbers)), "in the order in which they were found"


def test_an_entry_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    corpus = opened(tmp_path)
    corpus.add(some(1)[0], Outcome(pairs=[("a", "x")]))
    key = corpus._key("workloads")
    DirectoryBasedExampleDatabase(tmp_path).save(key, b'{"data": 1')
    DirectoryBasedExampleDatabase(tmp_path).save(key, b'{"data": {}, "seed": 0}')
    again = opened(tmp_path)
    assert len(again.seeds) == 1 and again.unreadable is not None


class Flaky(DirectoryBasedExampleDatabase):
    """A database that cannot be reached for a while."""

    down = False

    def save(self, key: bytes, value: bytes) -> None:
        if self.down:
            raise ConnectionError("nobody is there")
        super().save(key, value)

    def fetch(self, key: bytes) -> Iterator[bytes]:
        if self.down:
            raise ConnectionError("nobody is there")
        yield from super().fetch(key)


def test_what_cannot_be_saved_now_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky = Flaky(tmp_path)
    corpus = Corpus(flaky, "x")
    corpus.begin()
    flaky.down = True
    corpus.add(some(1)[0], Outcome(pairs=[("a", "x")]))
    corpus.add(some(2)[1], Outcome(pairs=[("b", "x")]))
    monkeypatch.setattr(corpus, "_next_look", 0.0)
    corpus.look()
    assert corpus.lost == "ConnectionError: nobody is there" and not opened(tmp_path).seeds
    flaky.down = False
    corpus.end()
    assert corpus.lost is None and opened(tmp_path).seeds == some(2)
    flaky.down = True
    with pytest.raises(EnvironmentProblem, match="read: ConnectionError: nobody is there"):
        Corpus(flaky, "x")


def test_a_corpus_that_saves_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: Callable[..., None] = lambda *_: None  # noqa: E731
    monkeypatch.setattr(DirectoryBasedExampleDatabase, "save", ignored)  # a full disk
    with pytest.raises(EnvironmentProblem, match="cannot be written: what was saved is not there"):
        opened(tmp_path)


def test_several_places(tmp_path: Path) -> None:
    opened(tmp_path / "a").add(some(1)[0], Outcome(pairs=[("a", "x")]))
    only_read = Corpus(database([f"read:{tmp_path / 'a'}"]), "x")
    only_read.begin()
    assert only_read.campaign == 1 and len(only_read.seeds) == 1
    both = Corpus(database([f"read:{tmp_path / 'a'}", str(tmp_path / "b")]), "x")
    both.begin()
    both.add(some(2)[1], Outcome(pairs=[("b", "x")]))
    assert len(opened(tmp_path / "a").seeds) == 1, "nothing was written there"
    assert opened(tmp_path / "b").seeds == some(2)[1:]


def test_places(tmp_path: Path) -> None:
    def of(*places: str) -> ExampleDatabase:
        return database(places)

    folder = DirectoryBasedExampleDatabase(str(tmp_path))
    assert of(str(tmp_path)) == folder
    assert of(str(tmp_path), "github:one/two/three") == MultiplexedDatabase(
        folder, ReadOnlyDatabase(GitHubArtifactDatabase("one", "two", "three"))
    )
    github = ReadOnlyDatabase(GitHubArtifactDatabase("one", "two", "kvconform-corpus"))
    assert of("github:one/two", str(tmp_path)) == MultiplexedDatabase(github, folder)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("read:/no/such/folder", "there is no folder /no/such/folder"),
        ("github:one", "write github:OWNER/REPOSITORY"),
        ("s3://bucket/x", "there is no corpus of kind 's3'; it is a folder, read:FOLDER, redis:"),
        ("redis://127.0.0.1:1/0", "cannot be used: .*refused"),
        ("redis://127.0.0.1:port", "cannot be used: "),
    ],
)
def test_a_place_that_is_none_is_a_sentence(place: str, said: str) -> None:
    with pytest.raises((UsageError, EnvironmentProblem), match=f"--corpus {place}.*{said}"):
        database([place])


def test_a_password_is_not_shown() -> None:
    with pytest.raises(EnvironmentProblem) as refused:
        database(["redis://me:secret@127.0.0.1:1/0"])
    assert "redis://127.0.0.1:1/0 cannot be used" in refused.value.message
    assert "secret" not in refused.value.message
