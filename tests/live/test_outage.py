# SPDX-License-Identifier: Apache-2.0
"""Tests of faults of back ends, without vLLM.

They cover how a scenario names faults, how the child requests and the parent executes them, when
they strike, and what is reported when they cannot.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from kvconform.config.settings import Settings
from kvconform.contract.events import check_event
from kvconform.contract.loader import SpecError, load_spec
from kvconform.contract.scenario import Fault, Scenario, Start, lacking, spared
from kvconform.contract.steps import NOTHING_TO_DAMAGE
from kvconform.live import engine, outage
from kvconform.live.engine import make_run
from kvconform.live.job import Ask, Play, plays
from kvconform.live.outage import Attendant, Desk, Striking, Unanswered
from kvconform.live.run import unhurried
from kvconform.process.servers import Servers
from kvconform.refimpl.cache.chunks import ChunkStore, open_store
from kvconform.refimpl.cache.patience import Patient

SPEC = load_spec(live=True)
ADDRESS = "127.0.0.1:{port:store}"
STORE: dict[str, Any] = {
    "name": "store",
    "command": ["{python}", "-m", "kvconform.refimpl.cache.http", "{port:store}"],
    "ready": {"tcp": ADDRESS},
    "clear": {"http": f"http://{ADDRESS}/clear", "method": "POST"},
    "timeout": 60.0,
}


def fault(do: str, **more: Any) -> Fault:
    return Fault.model_validate({"phase": "reload", "do": do, **more})


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    settings = Settings.model_validate({"servers": [STORE]})
    with Servers(settings, tmp_path / "of-servers", tmp_path / "logs") as found:
        yield found


@pytest.fixture
def store(servers: Servers) -> Iterator[ChunkStore]:
    """A store that waits for its server as long as a busy machine may need."""
    Patient.silent.clear()
    yield opened(servers, patience=20.0)
    Patient.silent.clear()


def opened(servers: Servers, patience: float) -> ChunkStore:
    return open_store(f"http://127.0.0.1:{servers.ports.numbers['store']}", patience=patience)


def asked(attendant: Attendant, *faults: Fault) -> list[str]:
    """What a child hears that asks for these, one after the other, while the parent looks."""
    heard: list[str] = []

    def ask() -> None:
        desk = Desk(attendant.folder)
        for each in faults:
            try:
                desk.ask(each, 30.0)
                heard.append("")
            except Unanswered as error:
                heard.append(str(error))

    child = threading.Thread(target=ask)
    child.start()
    while child.is_alive():
        attendant.look()
        time.sleep(0.02)
    return heard


# -- scenarios
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"faults": [{"phase": "cold", "do": "pause"}]}, "`pause` needs `still`"),
        ({"faults": [{"phase": "cold", "do": "explode"}]}, "do"),
        ({"faults": [{"phase": "cold", "do": "damage"}]}, "`damage` needs `files`"),
        ({"faults": [{"phase": "cold", "do": "kill", "files": "longer"}]}, "nothing else has"),
        (
            {"faults": [{"phase": "cold", "do": "kill"}], "start": {"processes": True}},
            "start.processes false",
        ),
        (
            {"faults": [{"phase": "cold", "do": "kill"}], "workload": None, "requests": [{}]},
            "need a workload",
        ),
    ],
)
def test_faults_that_make_no_sense_do_not_load(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Scenario.model_validate({"id": "x", "text": "t", "workload": "conversation", **data})


def test_a_phase_that_the_workload_does_not_have_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "id: mine\ntext: t\nworkload: conversation\nfaults: [{phase: relaod, do: kill}]\n"
    )
    with pytest.raises(SpecError, match=r"workload conversation has no phase 'relaod'.*reload"):
        load_spec(live=True, cases=[str(path)])


def test_a_phase_gets_its_faults_and_a_run_without_connector_gets_none() -> None:
    scenario: Any = SPEC.cases["live.server-restarted"]
    found = plays(scenario, SPEC.workloads["conversation"], 0)
    assert [each for play in found for each in play.faults] == scenario.faults
    assert all(each.phase == play.name for play in found for each in play.faults)
    assert not any(play.faults for play in unhurried(found))


def test_what_the_settings_lack_is_said() -> None:
    assert (
        lacking([], []) is None
        and lacking([fault("kill")], [False]) is None
        and lacking([fault("clear")], [True]) is None
    )
    assert lacking([fault("damage", files="removed")], []) is None
    assert "a server of its own" in str(lacking([fault("kill")], []))
    assert "`clear`" in str(lacking([fault("clear")], [True, False]))


def test_a_fault_that_never_struck_is_told() -> None:
    faults = [fault("kill"), fault("restart"), fault("kill", phase="turn")]
    struck = [
        {"kind": "live.fault", "phase": "reload", "number": 0},
        {"kind": "live.fault", "phase": "turn", "number": 0},
    ]
    assert spared(faults, struck) == ["the fault `restart` of phase reload never struck"]
    damage = [fault("damage", files="removed")]
    nothing = {"kind": "store.damaged", "what": "removed", "count": 0}
    assert spared(damage, [struck[0], nothing]) == [NOTHING_TO_DAMAGE]


# -- the child asks, the parent does it
def test_a_server_is_killed_and_comes_back_empty(
    servers: Servers, store: ChunkStore, tmp_path: Path
) -> None:
    store.put(0, "key", "layer", b"bytes")
    store.commit(0, "key")
    assert store.has("key") and store.get("key", "layer") == b"bytes"
    attendant = Attendant(tmp_path, [servers], tmp_path)
    assert asked(attendant, fault("kill")) == [""]
    assert not servers.all["store"].running and not store.has("key")
    assert isinstance(store.backend, Patient) and store.backend.is_silent
    assert asked(Attendant(tmp_path / "no", [servers], tmp_path), *[]) == []
    (tmp_path / "again").mkdir()
    assert asked(Attendant(tmp_path / "again", [servers], tmp_path), fault("restart")) == [""]
    Patient.silent.clear()
    store.put(0, "other", "layer", b"bytes")
    store.commit(0, "other")
    assert store.has("other") and not store.has("key")


def test_a_server_forgets(servers: Servers, store: ChunkStore, tmp_path: Path) -> None:
    store.put(0, "key", "layer", b"bytes")
    store.commit(0, "key")
    assert store.has("key")
    assert asked(Attendant(tmp_path, [servers], tmp_path), fault("clear")) == [""]
    assert not store.has("key") and servers.all["store"].running


def test_files_of_the_connector_are_damaged(tmp_path: Path) -> None:
    stored = tmp_path / "store"
    stored.mkdir()
    (stored / "chunk").write_bytes(b"\x01\x02")
    attendant = Attendant(tmp_path, [], stored)
    assert asked(attendant, fault("damage", files="garbage")) == [""]
    assert (stored / "chunk").read_bytes() == b"\xfe\xfd"


def test_a_pause_ends_by_itself_and_the_child_goes_on_meanwhile(
    servers: Servers, store: ChunkStore, tmp_path: Path
) -> None:
    store.put(0, "key", "layer", b"bytes")
    store.commit(0, "key")
    attendant, began = Attendant(tmp_path, [servers], tmp_path), time.monotonic()
    assert asked(attendant, fault("pause", still=8)) == [""]
    assert time.monotonic() - began < 7
    assert not opened(servers, patience=0.5).has("key")
    while time.monotonic() - began < 8.5:
        attendant.look()
        time.sleep(0.05)
    Patient.silent.clear()
    assert store.has("key")


def test_one_fault_is_over_before_the_next_begins(servers: Servers, tmp_path: Path) -> None:
    server, began = servers.all["store"], time.monotonic()
    assert asked(
        Attendant(tmp_path, [servers], tmp_path), fault("kill", still=1.5), fault("restart")
    ) == [
        "",
        "",
    ]
    assert server.running and time.monotonic() - began > 1.5


def test_whatever_stands_still_at_the_end_goes_on(
    servers: Servers, store: ChunkStore, tmp_path: Path
) -> None:
    attendant = Attendant(tmp_path, [servers], tmp_path)
    assert asked(attendant, fault("pause", still=60)) == [""]
    attendant.close()
    store.put(0, "key", "layer", b"bytes")
    store.commit(0, "key")
    assert store.has("key")


def test_a_server_that_stands_still_can_be_ended(servers: Servers) -> None:
    servers.freeze("store")
    began = time.monotonic()
    servers.down()
    assert not servers.all["store"].running and time.monotonic() - began < 20


def test_a_server_that_cannot_come_back_is_the_harness_s_problem(
    servers: Servers, tmp_path: Path
) -> None:
    server = servers.all["store"]
    server.spec = server.spec.model_copy(
        update={"command": ["{python}", "-c", "raise SystemExit(3)"]}
    )
    attendant = Attendant(tmp_path, [servers], tmp_path)
    (heard,) = asked(attendant, fault("restart"))
    assert "server store" in heard and attendant.problems == [heard]


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    with pytest.raises(Unanswered, match="fault 'kill' was not carried out within 0.2 s"):
        Desk(tmp_path).ask(fault("kill"), 0.2)


CHILD = """
import json, socket, sys
from pathlib import Path
from kvconform.live.job import Job
from kvconform.live.outage import Desk
job = Job.read(Path(sys.argv[1]))
desk = Desk(Path(job.desk))
for play in job.plays:
    for fault in play.faults:
        desk.ask(fault)
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=2).close()
    answer = "up"
except OSError:
    answer = "gone"
Path(sys.argv[2]).write_text(json.dumps({"kind": "note", "store": answer}) + "\\n" + \
json.dumps({"kind": "end"}) + "\\n")
"""


@pytest.mark.parametrize(("deeds", "answer"), [(["kill"], "gone"), (["kill", "restart"], "up")])
def test_a_run_s_child_gets_what_it_asks_for(
    deeds: list[str], answer: str, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few lines stand in for vLLM."""
    program = tmp_path / "child.py"
    program.write_text(CHILD.replace("PORT", str(servers.ports.numbers["store"])))
    monkeypatch.setattr(
        engine, "python", lambda module, *arguments: [sys.executable, str(program), *arguments]
    )
    asks = [Ask(id="a", tokens=[3], out=1)]
    wanted = [Play(name="reload", asks=asks, faults=[fault(deed) for deed in deeds])]
    made = make_run(
        Start(), wanted, None, tmp=tmp_path / "run", model=tmp_path, book=None, servers=[servers]
    )
    assert (
        made.outcome.ended and made.outcome.note == {"store": answer} and made.ended.how == "exit"
    )


# -- when they strike
class Watched:
    """Stands in for the probe of a process, and for the desk."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.hooks: dict[str, Any] = {}
        self.granted: list[str] = []
        self.asked: list[str] = []
        loads = SimpleNamespace(open_grants=lambda: self.granted)
        self.scheduler = SimpleNamespace(loads=loads, observer=SimpleNamespace(outage=False))
        self.probe = SimpleNamespace(on=lambda hook, before: self.hooks.update({hook: before}))
        self.trace = SimpleNamespace(
            damaged=False,
            emit=lambda kind, **fields: self.events.append(
                {"kind": kind, "seq": 0, "step": 0, **fields}
            ),
        )

    def ask(self, found: Fault) -> int:
        self.asked.append(found.do)
        return 3 if found.files else 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr(outage, "_recorder", lambda: found)
    monkeypatch.setattr(outage, "Desk", lambda folder: found)
    return found


def phase(*faults: Fault) -> Play:
    return Play(name="reload", asks=[Ask(id="a", tokens=[3], out=1)], faults=list(faults))


def test_faults_strike_at_their_steps(watched: Watched) -> None:
    found = Striking("desk")
    found.phase(phase(fault("kill"), fault("restart", at=2), fault("clear", at=2)))
    assert [found.step(0, 0), found.step(1, 3), found.step(2, 3), found.step(3, 3)] == [
        True,
        False,
        True,
        False,
    ]
    assert watched.asked == ["kill", "restart", "clear"] and watched.scheduler.observer.outage
    assert [(e["number"], e["running"]) for e in watched.events] == [(0, 0), (1, 3), (2, 3)]
    assert not [problem for event in watched.events for problem in check_event(event)]


def test_what_is_loaded_from_damaged_files_counts_as_damaged(watched: Watched) -> None:
    found = Striking("desk")
    found.phase(phase(fault("damage", files="garbage")))
    found.step(0, 0)
    event = watched.events[-1]
    assert (event["kind"], event["what"], event["count"]) == ("store.damaged", "garbage", 3)
    assert watched.trace.damaged


def test_before_a_load_means_one_that_the_engine_has_granted(watched: Watched) -> None:
    found = Striking("desk")
    found.phase(phase(fault("kill", before="load", at=1)))
    watched.granted = ["a"]
    found.step(0, 1)
    watched.hooks["start_load_kv"](None)  # too early
    watched.granted = []
    found.step(1, 1)
    watched.hooks["start_load_kv"](None)  # every step has this hook, and most have nothing to load
    watched.hooks["wait_for_save"](None)
    assert watched.asked == []
    watched.granted = ["a", "b"]
    watched.hooks["start_load_kv"](None)
    watched.hooks["start_load_kv"](None)
    assert (
        watched.asked == ["kill"]
        and watched.events[0]["loading"] == 2
        and watched.events[0]["before"] == "load"
    )


def test_what_is_left_of_a_phase_never_strikes(watched: Watched) -> None:
    found = Striking("desk")
    found.phase(phase(fault("kill", before="save", at=9)))
    found.step(0, 1)
    watched.hooks["wait_for_save"](None)
    found.phase(phase())
    found.step(9, 1)
    watched.hooks["wait_for_save"](None)
    assert watched.asked == [] and watched.events == []


def test_without_a_desk_nothing_strikes(watched: Watched) -> None:
    found = Striking(None)
    found.phase(phase(fault("kill")))
    assert not found.step(0, 0) and watched.asked == []
