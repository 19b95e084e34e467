# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario of a producer and a consumer: two vLLM engines in processes of their own, and a proxy that carries the kv_transfer_params
of one's answers to the other's requests.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from kvconform.adapters.registry import ENVIRONMENT as ADAPTERS
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.scenario import HAND_OVER, Scenario
from kvconform.live import trace as traces
from kvconform.live.baseline import Plains
from kvconform.live.engine import BOOK, Made, _path, patience, transfer_of
from kvconform.live.events import missing, own_events
from kvconform.live.job import Answer, Ask, Counts, Job, Outcome, PhaseDone, Play, plays, tokens
from kvconform.live.pair_engine import EngineGone, PairEngine
from kvconform.live.plugin import TRACE
from kvconform.live.process import Ended
from kvconform.live.start import EMULATE as EMULATE
from kvconform.live.start import ENVIRONMENT

ROLES = {"p": "kv_producer", "d": "kv_consumer"}
LENGTHS = (20, 31, 32, 33, 64, 65, 100, 200)
"""Prompts: shorter than a block, around whole blocks, and several."""
OUTPUT = 12
SHARED = "KVCONFORM_LIVE_SHARED"
"""Environment variable of the probe: what the run without connector has computed counts as computed by some engine."""
LIMIT = 150.0
"""Seconds that an answer may take (patience). Mooncake waits for a dead producer for a minute longer than it was told to."""
START_LIMIT = 200.0
Event = dict[str, Any]


class Pair:
    """Producer `p` and consumer `d` of a target, and the proxy between them."""

    def __init__(
        self,
        target: Target,
        scenario: Scenario,
        plain: Outcome,
        *,
        tmp: Path,
        model: Path,
        book: Path,
    ) -> None:
        self.plain, self.tmp = plain, tmp
        names = [ask.id for play in plays(scenario, None, 0) for ask in play.asks]
        self.requests = list(zip(names, scenario.requests, strict=True))
        self.answers: list[Answer] = []
        self.stale: dict[str, str] = {}
        self.resets: list[bool] = []
        self.engines = {name: self._engine(name, target, scenario, model, book) for name in ROLES}

    def _engine(
        self, name: str, target: Target, scenario: Scenario, model: Path, book: Path
    ) -> PairEngine:
        tmp = self.tmp / name
        for folder in ("tmp", "trace", "connector"):
            (tmp / folder).mkdir(parents=True, exist_ok=True)
        transfer = transfer_of(target, self.tmp / "connector")
        assert transfer is not None
        transfer |= {
            "kv_role": ROLES[name],
            "engine_id": f"kvconform-{name}-{self.tmp.name}",
            "kv_load_failure_policy": scenario.on_failure,
        }
        job = Job(
            model=str(model),
            start=scenario.start.model_dump(),
            transfer=transfer,
            plays=[],
            adapters=list(target.adapters),
            device=target.device,
        )
        environment = {
            **ENVIRONMENT,
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TMPDIR": str(tmp / "tmp"),
            TRACE: str(tmp / "trace"),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "PYTHONPATH": _path(),
            ADAPTERS: ",".join(target.adapters),
        }
        environment |= {
            BOOK: str(book),
            SHARED: "1",
        }  # the consumer loads what the producer has computed
        environment |= {EMULATE: "1"} if target.device == "emulated" else {}
        return PairEngine(name, job, tmp, environment)

    # -- what the proxy does ---------------------------------------------------------------------------------------------------
    def prefill(
        self, name: str, label: str = "", abort: int | None = None
    ) -> dict[str, Any] | None:
        """Let the producer compute a prompt; returns the kv_transfer_params of its answer, None if it was aborted."""
        return self.offered(self.begin(name, label, abort))

    def begin(self, name: str, label: str = "", abort: int | None = None) -> str:
        """Hand a prompt to the producer; returns the request's id there."""
        ask = Ask(id=f"p/{name}{label}", tokens=self.plain.answers[name].prompt, out=1, abort=abort)
        self.engines["p"].ask(ask, dict(HAND_OVER))
        return ask.id

    def offered(self, there: str) -> dict[str, Any] | None:
        """The kv_transfer_params of the producer's answer, once it is there."""
        return self.engines["p"].answer(there, patience(LIMIT))[1]

    def decode(
        self,
        name: str,
        params: dict[str, Any] | None,
        label: str = "",
        abort: int | None = None,
        out: int = OUTPUT,
        priority: int = 0,
    ) -> str:
        """Hand a prompt to the consumer, with these parameters; returns the request's id."""
        ask = Ask(
            id=f"{name}{label}",
            tokens=self.plain.answers[name].prompt,
            out=out,
            abort=abort,
            priority=priority,
        )
        self.engines["d"].ask(ask, params)
        return ask.id

    def collect(self, *names: str) -> None:
        """Wait for answers of the consumer."""
        for name in names:
            self.answers.append(self.engines["d"].answer(name, patience(LIMIT))[0])

    def reset(self, *names: str) -> None:
        """Empty the local prefix caches, and note whether that could be done."""
        for name in names or ROLES:
            self.resets.append(self.engines[name].reset())

    # -- scenarios -------------------------------------------------------------------------------------------------------------
    def play_handed(self) -> None:
        """All prompts, one after the other and then all at once, with and without a part in the consumer's local prefix cache."""
        names = list(self.plain.answers)
        for name in names:
            self.collect(self.decode(name, self.prefill(name)))
        self.reset("d")
        together = [self.decode(name, self.prefill(name, "/again"), "/again") for name in names]
        self.collect(*together)
        self.collect(*(self.decode(name, self.prefill(name, "/local"), "/local") for name in names))
        self.reset()

    def play_aborted(self) -> None:
        """Requests are aborted at every step of their way: the producer's, the consumer's before, during and after its load."""
        names = list(self.plain.answers)
        for round_ in range(3):
            for number, name in enumerate(names):
                self.prefill(name, f"/gone-{round_}", abort=1 if number % 3 == 0 else None)
                self.decode(
                    name,
                    self.prefill(name, f"/a-{round_}"),
                    f"/a-{round_}",
                    abort=1 + (number + round_) % 7,
                )
            self.reset("d")
        for name in names:
            self.collect(self.decode(name, self.prefill(name, "/after"), "/after"))
        self.reset()

    def play_replayed(self) -> None:
        """Parameters of a transfer that is long over are sent again, when the producer has given its blocks to others."""
        names = [name for name in self.plain.answers if len(self.plain.answers[name].prompt) >= 64]
        kept = {name: self.prefill(name) for name in names}
        self.collect(*(self.decode(name, dict(kept[name] or {}), "") for name in names))
        self.reset()
        for number in range(12):  # the producer's blocks go round
            other = Ask(id=f"p/other-{number}", tokens=tokens(250, "other", number), out=1)
            self.engines["p"].ask(other)
            self.engines["p"].answer(other.id, patience(LIMIT))
        for name in names:
            self.stale[f"{name}/replayed"] = "replayed"
            self.collect(self.decode(name, dict(kept[name] or {}), "/replayed"))

    def play_altered(self) -> None:
        """Parameters that refer to nothing: an unknown request, an unknown engine, no blocks."""
        names = [name for name in self.plain.answers if len(self.plain.answers[name].prompt) >= 64]
        self.collect(self.decode(names[0], self.prefill(names[0])))
        self.reset("d")
        changes: list[Event] = [
            {"remote_request_id": "nobody"},
            {"remote_engine_id": "nowhere"},
            {"remote_block_ids": None},
        ]
        for number, change in enumerate(changes):
            name = names[(number + 1) % len(names)]
            params = {**(self.prefill(name, f"/{number}") or {}), **change}
            self.stale[f"{name}/altered-{number}"] = "altered"
            self.collect(self.decode(name, params, f"/altered-{number}"))
        self.reset()  # what nobody fetched is let go of when its time is over

    def play_killed(self) -> None:
        """The producer dies: before the consumer has asked for anything of it, and after."""
        names = list(self.plain.answers)
        known, unknown = names[::2], names[1::2]
        self.collect(*(self.decode(name, self.prefill(name)) for name in known))
        kept = {name: self.prefill(name, "/kept") for name in names}
        self.reset("d")
        self.engines["p"].kill()
        self.collect(*(self.decode(name, kept[name], "/orphan") for name in unknown + known))

    def play_requests(self) -> None:
        """The scenario's own: a wave after the other, each handed to the consumer as soon as the producer has answered."""
        for _, wave in itertools.groupby(self.requests, lambda each: each[1].at):
            under_way = list(wave)
            if any(request.reset for _, request in under_way):
                self.reset("d")
            begun = [
                (name, request, self.begin(name, abort=request.early))
                for name, request in under_way
            ]
            handed = []
            for name, request, there in begun:
                params = self.offered(there)
                if request.early is None:
                    handed.append(
                        self.decode(
                            name,
                            params,
                            abort=request.abort,
                            out=request.out,
                            priority=request.priority,
                        )
                    )
            self.collect(*handed)
        self.reset()

    # -- the end ---------------------------------------------------------------------------------------------------------------
    def outcome(self, play: str) -> tuple[Outcome, dict[str, Ended]]:
        """Play it, and end both engines, whatever happened."""
        found = Outcome()
        found.current = play
        counts: Counts | None = None
        try:
            for engine in self.engines.values():
                engine.wait(lambda said: said.up, patience(START_LIMIT))
            getattr(self, f"play_{play}")()
            counts = self.engines["d"].counts()
            found.ended = True
        except EngineGone as gone:
            up = all(engine.said.up for engine in self.engines.values())
            where = next(
                (e.said.error[0] for e in self.engines.values() if e.said.error),
                "pair" if up else "start",
            )
            text = next((e.said.error[2] for e in self.engines.values() if e.said.error), "")
            found.error = {"where": where, "text": str(gone), "traceback": text}
        finally:
            ended = {name: engine.end() for name, engine in reversed(self.engines.items())}
        found.phases = [
            PhaseDone(
                name=play,
                reset_done=all(self.resets) if self.resets else None,
                counts=counts or Counts(),
                answers=self.answers,
            )
        ]
        return found, ended


def asked(scenario: Scenario, seed: int) -> list[Play]:
    """What the run without connector is asked: every prompt once, to its end."""
    asks = [
        Ask(id=f"r{n}", tokens=tokens(length, seed, "pair", n), out=OUTPUT)
        for n, length in enumerate(LENGTHS)
    ]
    if scenario.requests:
        asks = [
            Ask(id=ask.id, tokens=ask.tokens, out=ask.out)
            for play in plays(scenario, None, seed)
            for ask in play.asks
        ]
    return [Play(name="pair", asks=asks)]


def run_pair(
    scenario: Scenario,
    variant: Variant,
    target: Target,
    *,
    seed: int,
    tmp: Path,
    plain_runs: Plains,
    known: tuple[Outcome, Path] | None = None,
) -> tuple[list[Event], list[str], Made, frozenset[str]]:
    """(trace, what was due and did not happen, how it was made, channels). `known`: answers of a run without connector that has all of its
    requests, if there is one. RuntimeError if vLLM fails without a connector.
    """
    assert scenario.pair is not None
    plain, book = known or plain_runs.get(asked(scenario, seed))
    tmp.mkdir(parents=True, exist_ok=True)
    pair = Pair(target, scenario, plain, tmp=tmp, model=plain_runs.model, book=book)
    outcome, ended = pair.outcome(scenario.pair)
    if scenario.pair == "killed":
        del ended["p"]  # by us
    if outcome.ended and any(one.how == "signal" for one in ended.values()):  # while it shut down
        outcome.ended, outcome.current = False, "shutdown"
    events, channels = _trace(scenario, variant, target, pair, outcome, ended, seed)
    words = "\n".join(_last_words(pair.tmp / name / "log") for name in ROLES)
    return (
        events,
        missing(scenario, outcome, _failed(events)),
        Made(outcome, ended["d"], tmp, words),
        channels,
    )


def _trace(
    scenario: Scenario,
    variant: Variant,
    target: Target,
    pair: Pair,
    outcome: Outcome,
    ended: dict[str, Ended],
    seed: int,
) -> tuple[list[Event], frozenset[str]]:
    """Both engines' traces, one after the other, with our events at the end."""
    start: dict[str, Any] = {
        "case": variant.case.id,
        "seed": seed,
        "connector": target.connector,
        "engine": "live",
    }
    parts = {
        name: traces.collect(pair.tmp / name / "trace", ended=outcome.ended, **start)
        for name in ROLES
    }
    first = next((part[0] for part in parts.values() if part), None)
    if first is None:
        from kvconform.live.events import _bare

        first = _bare(variant, start, Made(outcome, ended["d"], pair.tmp, ""))[0]
    channels = [traces.channels(part) for part in parts.values() if part]
    found: list[Event] = [
        {**first, "role": "kv_both"},
        {"kind": "run.engines", "step": 0, "engines": ROLES},
    ]
    for name, part in parts.items():
        place: dict[int, int] = {}
        for event in part[1:]:
            place[event["seq"]] = len(found)
            moved = {
                key: place.get(event[key], event[key])
                for key in traces.REFERENCES
                if event.get(key) is not None
            }
            if name == "p" and event["kind"] == "engine.crash" and scenario.pair == "killed":
                continue  # nobody's fault but ours
            found.append({**event, **moved, "on": name})
    own = own_events(
        scenario,
        outcome,
        _together(ended),
        _unlabelled(pair),
        _failed(found),
        {scenario.pair or ""},
    )
    tokens_of = {event["req"]: event for event in own if event["kind"] == "live.tokens"}
    for name, stale in pair.stale.items():
        told = tokens_of.get(name)
        wrong = told is not None and not told["same"] and not told["ambiguous"]
        gone = stale == "replayed"
        own.insert(
            -1,
            {
                "kind": "pair.request",
                "on": "d",
                "req": name,
                "generation": 0,
                "of": f"p/{name}",
                "stale": stale,
                "aborted": False,
                "offered": 0,
                "local": 0,
                "promised": 0,
                "loaded": 0,
                "wrong": wrong,
                "failed": False,
                "held": False,
                "released": 0,
                "gone": gone,
            },
        )
    last = found[-1]["step"]
    found += [{**event, "step": event.get("step", last)} for event in own]
    for number, event in enumerate(found):
        event["seq"] = number
    return found, (frozenset.intersection(*channels) if channels else frozenset()) | {"live"}


def _unlabelled(pair: Pair) -> dict[str, Answer]:
    """What each request of the pair should have got: that of the prompt without a connector."""
    return {answer.id: pair.plain.answers[answer.id.partition("/")[0]] for answer in pair.answers}


def _together(ended: dict[str, Ended]) -> Ended:
    """The end of both: the way of the one that ended worse, and what either has left."""
    both = list(ended.values())
    worst = max(both, key=lambda one: ("exit", "timeout", "signal").index(one.how))
    return Ended(
        worst.how,
        worst.status,
        worst.seconds,
        [p for e in both for p in e.processes],
        [p for e in both for p in e.ports],
        [f for e in both for f in e.files],
        [s for e in both for s in e.stuck],
    )


def _failed(events: list[Event]) -> int:
    return sum(event["kind"] == "transfer.failed" for event in events)


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line for line in lines if line.strip())[-2000:]
