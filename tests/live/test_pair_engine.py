# SPDX-License-Identifier: Apache-2.0
"""Tests of one engine of a pair, seen from the parent: what it says, how it can end.

Nothing of it may be left. A short program stands in for vLLM.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconform.contract.scenario import Start
from kvconform.live import pair_engine, process
from kvconform.live.engine import patience
from kvconform.live.job import Answer, Ask, Job
from kvconform.live.pair_engine import EngineGone, PairEngine
from kvconform.live.pair_run import Pair

STAND_IN = """
import os, subprocess, sys, time
from multiprocessing.connection import Client
with Client(sys.argv[2], "AF_UNIX") as link:
    link.send(("up", os.getpid()))
    while True:
        what, *rest = link.recv()
        if what == "stop":
            link.send(("end",))
            break
        if what == "ask" and rest[0]["id"] == "die":
            os._exit(7)
        if what == "ask" and rest[0]["id"] == "raise":
            link.send(("error", "pair", "ValueError: no", "Traceback"))
            break
        if what == "ask" and rest[0]["id"] == "spawn":
            subprocess.Popen([sys.executable, "-c", \
"import os, time; os.setsid(); time.sleep(600)"])
        if what == "ask" and rest[0]["id"] == "hang":
            time.sleep(600)
        if what == "ask":
            told = {"id": rest[0]["id"], "prompt": rest[0]["tokens"], "tokens": [1], \
"logprobs": [0.0], "seconds": [2], "gaps": [1.0]}
            told["why"] = "length"
            link.send(("answer", told, {"seen": rest[1]}))
        if what == "counts":
            link.send(("counts", {"external_hits": 5}))
        if what == "reset":
            link.send(("reset", True))
"""

Make = Callable[[], PairEngine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(
        process,
        "python",
        lambda module, *arguments: [sys.executable, str(tmp_path / "stand_in.py"), *arguments],
    )
    monkeypatch.setattr(pair_engine, "EXIT_LIMIT", 10.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job = Job(model="none", start=Start().model_dump(), transfer=None, plays=[])
    return lambda: PairEngine("p", job, tmp_path / "p", dict(os.environ))


def gone(engine: PairEngine, tmp: Path) -> bool:
    return not process._marked(engine.mark) and not list(tmp.glob("kvc-*"))


def ask(name: str) -> Ask:
    return Ask(id=name, tokens=[7, 8], out=1)


def test_it_answers_and_ends(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.wait(lambda said: said.up, 30)
    engine.ask(ask("a"), {"do_remote_decode": True})
    answer, params = engine.answer("a", 30)
    assert (
        isinstance(answer, Answer)
        and answer.tokens == [1]
        and params == {"seen": {"do_remote_decode": True}}
    )
    assert engine.counts().external_hits == 5 and engine.reset()
    ended = engine.end()
    assert (ended.how, ended.processes, ended.ports, ended.stuck) == ("exit", [], [], [])
    assert gone(engine, tmp_path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("die", "the process of engine p died"), ("raise", "ended with an error: ValueError: no")],
)
def test_one_that_ends_is_told(name: str, sentence: str, make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.wait(lambda said: said.up, 30)
    engine.ask(ask(name))
    with pytest.raises(EngineGone, match=sentence):
        engine.answer(name, 30)
    engine.end()
    assert gone(engine, tmp_path)


def test_one_that_does_not_answer_is_ended(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.wait(lambda said: said.up, 30)
    engine.ask(ask("hang"))
    with pytest.raises(EngineGone, match="did not answer within 0.5 s"):
        engine.answer("hang", 0.5)
    assert engine.end(limit=0.5).how == "timeout"
    assert gone(engine, tmp_path)


def test_one_that_is_killed_cannot_be_reached(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.wait(lambda said: said.up, 30)
    engine.kill()
    assert not process._marked(engine.mark)
    with pytest.raises(EngineGone, match="engine p"):
        engine.counts(5)
    engine.end()
    assert gone(engine, tmp_path)


def test_what_it_started_ends_with_it(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.wait(lambda said: said.up, 30)
    engine.ask(ask("spawn"))
    engine.answer("spawn", 30)
    engine.end()
    assert gone(engine, tmp_path)


@pytest.mark.parametrize(("up", "where"), [(False, "start"), (True, "pair")])
def test_a_pair_that_is_not_up_in_time_has_not_started(up: bool, where: str) -> None:
    """Which is no crash of the connector's: the machine may be slow."""

    def wait(*_: object) -> None:
        raise EngineGone("engine p did not answer within 200 s")

    pair = Pair.__new__(Pair)
    said = SimpleNamespace(up=up, error=None)
    pair.engines = {"p": SimpleNamespace(said=said, wait=wait, end=lambda: None)}  # type: ignore[dict-item]
    pair.resets, pair.answers = [], []
    outcome, _ = pair.outcome("handed")
    assert outcome.error is not None and outcome.error["where"] == where and not outcome.ended


def test_a_slow_machine_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCONFORM_LIVE_SECONDS", raising=False)
    assert patience(150) == 150
    monkeypatch.setenv("KVCONFORM_LIVE_SECONDS", "900")
    assert patience(150) == 450
    monkeypatch.setenv("KVCONFORM_LIVE_SECONDS", "60")
    assert patience(150) == 150
