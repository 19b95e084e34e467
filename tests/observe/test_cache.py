# SPDX-License-Identifier: Apache-2.0
"""Tests of the observer of a cache: the sizes of its levels at the end."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvconform.contract.events import lifecycle
from kvconform.contract.trace import Trace
from kvconform.errors import UsageError
from kvconform.files import sizes_below
from kvconform.observe import cache
from kvconform.observe.cache import CacheObserver
from kvconform.observe.call import Call


class Inspector:
    """A cache of two levels, of which the lower one has a directory."""

    def __init__(self, folder: Path) -> None:
        self.bytes = [0, 7]
        self._folder = folder

    def cache(self) -> dict[str, Any]:
        return {"held": 0, "levels": []}

    def sizes(self) -> list[dict[str, Any]]:
        lower = {"name": "disk", "bytes": self.bytes[1], "path": str(self._folder)}
        return [{"name": "host", "bytes": self.bytes[0]}, lower]


def test_sizes_are_those_at_the_end_and_files_are_measured(tmp_path: Path) -> None:
    inspector = Inspector(tmp_path)
    trace = Trace()
    observer = CacheObserver(trace, inspector, {}, 16, lambda: 4096)
    inspector.bytes = [100, 90]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(60))
    (tmp_path / "other").write_bytes(bytes(20))
    observer.measure(1.0)
    host, disk = [event for event in trace.events if event["kind"] == "cache.size"]
    assert (host["level"], host["bytes"], host["on_disk"], host["fresh"]) == (
        "host",
        100,
        None,
        True,
    )
    assert (disk["bytes"], disk["on_disk"], disk["fresh"]) == (90, 80, False)
    assert (disk["kv"], disk["block"]) == (4096, 16)


def test_files_that_a_killed_process_has_left_are_not_measured(tmp_path: Path) -> None:
    trace = Trace()
    trace.emit("engine.lifecycle", **lifecycle("killed"))
    CacheObserver(trace, Inspector(tmp_path), {}, 16, lambda: 4096).measure(1.0)
    assert [e["on_disk"] for e in trace.events if e["kind"] == "cache.size"] == [None, None]


def test_sizes_that_threads_still_change_are_awaited(tmp_path: Path) -> None:
    looks = iter([(1, 9), (5, 5), (5, 5)])

    class Moving(Inspector):
        def sizes(self) -> list[dict[str, Any]]:
            self.bytes = [*next(looks)]
            return super().sizes()

    trace = Trace()
    inspector = Inspector(tmp_path)
    observer = CacheObserver(trace, inspector, {}, 16, lambda: 0)
    inspector.__class__ = Moving
    observer.measure(60.0)
    sizes = [event["bytes"] for event in trace.events if event["kind"] == "cache.size"]
    assert sizes == [5, 5] and not list(looks)


def test_a_file_that_is_removed_while_files_are_counted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stays").write_bytes(bytes(20))
    (tmp_path / "there" / "deep").mkdir(parents=True)
    (tmp_path / "there" / "deep" / "gone").write_bytes(bytes(20))
    stat = os.stat

    def gone(path: Any, **options: Any) -> Any:
        if str(path).endswith("gone"):
            shutil.rmtree(tmp_path / "there", ignore_errors=True)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", gone)
    assert sum(sizes_below(tmp_path, links=True)) == 20


def test_sizes_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    inspector: Any = Inspector(tmp_path)
    inspector.bytes = np.array([100, 90])
    trace = Trace()
    CacheObserver(trace, inspector, {}, 16, lambda: 0).measure(0.1)
    sizes = [event["bytes"] for event in trace.events if event["kind"] == "cache.size"]
    assert sizes == [100, 90] and {type(size) for size in sizes} == {int}


def test_a_busy_machine_costs_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sleep takes a second there, in which no other thread may have run."""
    now = [0.0]
    monkeypatch.setattr(cache.clock, "monotonic", lambda: now[0])
    for slow, fewest, most in ((1.0, 50, 50), (cache.POLL, 100, 101)):
        monkeypatch.setattr(cache.time, "sleep", lambda _, slow=slow: now.append(now.pop() + slow))
        assert fewest <= len(list(cache.waits(1.0))) <= most


def test_a_cache_need_not_show_sizes(tmp_path: Path) -> None:
    trace = Trace()
    inspector: Any = Inspector(tmp_path)
    inspector.sizes = None
    observer = CacheObserver(trace, inspector, {}, 16, lambda: 0)
    observer.at_rest(0.0)
    observer.measure(1.0)
    assert [event["kind"] for event in trace.events] == ["cache.ended"]


class Levels:
    """An Inspector of two levels: what they have of a request is set by the test."""

    def __init__(self, *looks: list[int], top: dict[str, Any] | None = None) -> None:
        self.looks = [*looks]
        self.top = {"name": "host", "entries": 1, "bound": 4, "held": 0} if top is None else top

    def cache(self) -> dict[str, Any]:
        disk = {"name": "disk", "entries": 9, "bound": None, "held": 0}
        return {"held": 0, "levels": [self.top, disk]}

    def cached(self, request: Any) -> list[int]:
        return self.looks[0] if len(self.looks) == 1 else self.looks.pop(0)


ARRIVED = {
    "kind": "load.due",
    "req": "b",
    "local": 0,
    "granted": 12,
    "missing": [],
    "reported_failed": False,
}


def a_request(tokens: int = 17, *, skips: bool = False) -> Any:
    return SimpleNamespace(request_id="b", num_tokens=tokens, skip_reading_prefix_cache=skips)


def after_a_load(inspector: Levels, **other: Any) -> list[dict[str, Any]]:
    """Return the events of a load that arrived, and of the end. `other`: fields of the load."""
    trace = Trace()
    observer = CacheObserver(trace, inspector, {"b": a_request()}, 4, lambda: 0)
    observer.after_step([ARRIVED | other])
    trace.emit("run.end")
    observer.at_rest(5.0)
    return trace.events


def test_a_load_may_be_promoted_until_all_requests_have_ended() -> None:
    events = after_a_load(Levels([0, 12], [0, 12], [12, 12]))
    kinds = [event["kind"] for event in events]
    assert kinds == ["cache.state", "run.end", "cache.loaded", "cache.ended"]
    assert events[2]["cached"] == [12, 12] and events[2]["end"] == 12


@pytest.mark.parametrize(
    "inspector",
    [
        Levels([12, 12]),
        Levels([0, 8]),
        Levels([0, 12], top={"name": "host", "entries": 4, "bound": 4, "held": 0}),
        Levels([0, 12], top={"name": "host", "entries": 1, "bound": None, "held": 0, "full": True}),
    ],
    ids=["promoted", "gone again", "no room for another entry", "says that it is full"],
)
def test_a_load_that_cannot_be_promoted_is_noted_at_once(inspector: Levels) -> None:
    kinds = [event["kind"] for event in after_a_load(inspector)]
    assert kinds == ["cache.loaded", "cache.state", "run.end", "cache.ended"]


def test_a_load_behind_tokens_that_the_first_level_lacks_is_noted_at_once() -> None:
    events = after_a_load(Levels([0, 12]), local=4, granted=8)
    assert events[0]["kind"] == "cache.loaded"


def test_a_load_that_is_never_promoted_is_noted_with_the_room_that_there_is() -> None:
    events = after_a_load(Levels([0, 12]))
    loaded = next(event for event in events if event["kind"] == "cache.loaded")
    assert (loaded["cached"], loaded["room"]) == ([0, 12], True)


@pytest.mark.parametrize("other", [{"missing": [4]}, {"reported_failed": True}, {"req": "gone"}])
def test_a_load_that_did_not_arrive_is_not_noted(other: dict[str, Any]) -> None:
    assert "cache.loaded" not in [event["kind"] for event in after_a_load(Levels([0, 12]), **other)]


def test_no_request_is_kept_if_the_engine_does_not_come_to_rest() -> None:
    request = type("Request", (), vars(a_request()))()
    kept = weakref.ref(request)
    observer = CacheObserver(Trace(), Levels([0, 12]), {"b": request}, 4, lambda: 0)
    observer.after_step([ARRIVED])
    observer._requests = {}
    del request
    assert kept() is not None
    observer.release()
    assert kept() is None


def test_holds_that_threads_still_have_are_awaited() -> None:
    held = iter([2, 1, 0])

    class Held(Levels):
        def cache(self) -> dict[str, Any]:
            return super().cache() | {"held": next(held)}

    trace = Trace()
    CacheObserver(trace, Held([0, 0]), {}, 4, lambda: 0).at_rest(60.0)
    assert [event["held"] for event in trace.events] == [0]


def looked_up(
    observer: CacheObserver, request: Any, *answers: tuple[int, int | None], ok: bool = True
) -> None:
    """Let the observer see lookups: local tokens, and what the connector answered."""
    listeners: dict[str, Any] = {}
    observer.listen(SimpleNamespace(on=lambda hook, after: listeners.update({hook: after})))
    for local, tokens in answers:
        call = Call(None, "get_num_new_matched_tokens", "scheduler", 0, (request, local), {})
        call.result, call.result_event = (tokens, False), {"value_ok": ok}
        listeners[call.hook](call)


def test_the_last_token_of_a_prompt_is_not_usable() -> None:
    trace = Trace()
    looked_up(CacheObserver(trace, Levels([4, 16]), {}, 4, lambda: 0), a_request(16), (0, 4))
    assert [event["usable"] for event in trace.events] == [12]


@pytest.mark.parametrize(
    ("request_", "ok", "damaged"),
    [(a_request(), False, False), (a_request(skips=True), True, False), (a_request(), True, True)],
    ids=["no legal answer", "vLLM drops the answer", "the store was damaged"],
)
def test_some_lookups_are_not_compared_with_the_cache(
    request_: Any, ok: bool, damaged: bool
) -> None:
    trace = Trace()
    trace.damaged = damaged
    looked_up(CacheObserver(trace, Levels([4, 16]), {}, 4, lambda: 0), request_, (0, 4), ok=ok)
    assert trace.events == []


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"cached": lambda: []}, r"cached\(\) returned \[\]: it must be one number per level"),
        ({"cached": lambda: None}, r"cached\(\) returned what docs/cache.md does not allow"),
        ({"cached": lambda: [4]}, r"cached.*one number per level of cache\(\), which has 2"),
        ({"cached": lambda: 1 // 0}, r"cached\(\) raised ZeroDivisionError"),
        ({"cache": lambda: {"levels": []}}, r"cache\(\) returned what .*\['held'\]: Field req"),
    ],
)
def test_an_answer_of_another_form_is_a_sentence(answers: dict[str, Any], words: str) -> None:
    inspector: Any = Levels([0, 0])
    for name, answer in answers.items():
        setattr(inspector, name, lambda *_, answer=answer: answer())
    observer = CacheObserver(Trace(), inspector, {}, 4, lambda: 0)

    def look() -> None:
        observer.after_step([])
        looked_up(observer, a_request(), (0, 4))

    with pytest.raises(UsageError, match=rf"kvconform_inspector\(\)\.{words}"):
        look()


@pytest.mark.parametrize("sizes", [None, [{"name": "host"}], [{"name": 1, "bytes": 2}]])
def test_sizes_of_another_form_are_a_sentence(tmp_path: Path, sizes: Any) -> None:
    inspector: Any = Inspector(tmp_path)
    inspector.sizes = list
    observer = CacheObserver(Trace(), inspector, {}, 16, lambda: 0)
    inspector.sizes = lambda: sizes
    with pytest.raises(UsageError, match=r"kvconform_inspector\(\)\.sizes\(\) returned what"):
        observer.measure(1.0)


def test_lookups_are_collected_by_the_level_that_could_give_more() -> None:
    trace = Trace()
    observer = CacheObserver(trace, Levels([4, 14]), {}, 4, lambda: 0)
    looked_up(observer, a_request(), (0, 4), (8, 4), (0, None), (14, 0))
    observer.at_rest(0.0)
    reached = [event for event in trace.events if event["kind"] == "cache.reached"]
    assert [(event["level"], event["lookups"]) for event in reached] == [
        (
            "disk",
            [
                {"req": "b", "known": 4, "usable": 12, "claimed": 4},
                {"req": "b", "known": 8, "usable": 12, "claimed": 12},
            ],
        )
    ]
