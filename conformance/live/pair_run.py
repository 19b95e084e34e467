# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario of a producer and a consumer.

These are two vLLM engines, each in its own process. A proxy between them passes the
kv_transfer_params of the producer's answers on with requests to the consumer.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvconform.adapters.registry import ENVIRONMENT as ADAPTERS
from kvconform.config.router import Checked, Params
from kvconform.config.target import Target
from kvconform.contract.capabilities import EXACT, Tolerances
from kvconform.contract.case import Variant
from kvconform.contract.scenario import Scenario
from kvconform.contract.trace import Event
from kvconform.live import trace as traces
from kvconform.live.baseline import Plains
from kvconform.live.engine import Made, import_path, patience, transfer_of
from kvconform.live.events import bare, missing, own_events
from kvconform.live.job import (
    BOOK,
    SHARED,
    TOLERANCES,
    Answer,
    Ask,
    Counts,
    Job,
    Outcome,
    PhaseDone,
    Play,
    plays,
    tokens,
)
from kvconform.live.pair_engine import EngineGone, PairEngine
from kvconform.live.plugin import TRACE
from kvconform.live.process import Ended
from kvconform.live.start import EMULATE, ENVIRONMENT

ROLES = {"p": "kv_producer", "d": "kv_consumer"}
"""The `kv_role` of each engine, by its name in the trace."""
LENGTHS = (20, 31, 32, 33, 64, 65, 100, 200)
"""Tokens of the prompts: less than a block, around whole blocks, and several blocks."""
OUTPUT = 12
"""Tokens of an answer."""
"""Environment variable of the probe: what the baseline run computed, some engine has computed."""
LIMIT = 150.0
"""Seconds that an answer may take, before `patience` scales them.

Mooncake waits for a dead producer for a minute longer than configured.
"""
START_LIMIT = 200.0
"""Seconds that an engine may take to start, before `patience` scales them."""


class Pair:
    """Producer `p` and consumer `d` of a target, and the proxy between them.

    `stale`: why the parameters of a request are wrong on purpose, by the request's id.
    """

    def __init__(
        self,
        target: Target,
        scenario: Scenario,
        plain: Outcome,
        *,
        tmp: Path,
        model: Path,
        book: Path,
        tolerances: Tolerances,
    ) -> None:
        self.plain = plain
        self.tolerances = tolerances
        self.tmp = tmp
        names = [ask.id for play in plays(scenario, None, 0) for ask in play.asks]
        self.requests = list(zip(names, scenario.requests, strict=True))
        self.answers: list[Answer] = []
        self.stale: dict[str, str] = {}
        self.router = Checked(target.router)
        self.sent: dict[str, Params] = {}
        self.resets: list[bool] = []
        self.engines = {name: self._engine(name, target, scenario, model, book) for name in ROLES}

    def _engine(
        self, name: str, target: Target, scenario: Scenario, model: Path, book: Path
    ) -> PairEngine:
        """Start the engine `name`, with its files in a folder of its own."""
        tmp = self.tmp / name
        for folder in ("tmp", "trace", "connector"):
            (tmp / folder).mkdir(parents=True, exist_ok=True)
        transfer = transfer_of(target, self.tmp / "connector")
        assert transfer is not None
        transfer |= {
            "kv_role": ROLES[name],
            "engine_id": self.engine_id(name),
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
            "PYTHONPATH": import_path(),
            ADAPTERS: ",".join(target.adapters),
            BOOK: str(book),
            SHARED: "1",  # the consumer loads what the producer has computed
            TOLERANCES: self.tolerances.encode(),
        }
        if target.device == "emulated":
            environment[EMULATE] = "1"
        return PairEngine(name, job, tmp, environment)

    def engine_id(self, name: str) -> str:
        """Return the id of the engine `name`."""
        return f"kvconform-{name}-{self.tmp.name}"

    # -- the proxy
    def prefill(
        self, name: str, label: str = "", abort: int | None = None
    ) -> dict[str, Any] | None:
        """Let the producer compute a prompt; return the kv_transfer_params of its answer.

        None for an aborted request.
        """
        return self.offered(self.begin(name, label, abort))

    def begin(self, name: str, label: str = "", abort: int | None = None) -> str:
        """Send a prompt to the producer; return the request's id there."""
        ask = Ask(id=f"p/{name}{label}", tokens=self.plain.answers[name].prompt, out=1, abort=abort)
        self.sent[ask.id] = self.router.prefill(ask.id, self.engine_id("p"))
        self.engines["p"].ask(ask, self.sent[ask.id])
        return ask.id

    def offered(self, there: str) -> Params:
        """Wait for the producer's answer, and return the consumer's kv_transfer_params."""
        returned = self.engines["p"].answer(there, patience(LIMIT))[1]
        return self.router.decode(there, self.engine_id("p"), self.sent[there], returned)

    def decode(
        self,
        name: str,
        params: dict[str, Any] | None,
        label: str = "",
        abort: int | None = None,
        out: int = OUTPUT,
        priority: int = 0,
    ) -> str:
        """Send a prompt to the consumer, with these kv_transfer_params; return the request's id."""
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
        """Wait for answers of the consumer, and keep them."""
        for name in names:
            self.answers.append(self.engines["d"].answer(name, patience(LIMIT))[0])

    def reset(self, *names: str) -> None:
        """Empty the local prefix caches of these engines, or both; note whether vLLM could."""
        for name in names or ROLES:
            self.resets.append(self.engines[name].reset())

    # -- scenarios
    def play_handed(self) -> None:
        """Hand over all prompts: one by one, all at once, and with a part in a local cache.

        That is the consumer's local prefix cache.
        """
        names = list(self.plain.answers)
        for name in names:
            self.collect(self.decode(name, self.prefill(name)))
        self.reset("d")
        together = [self.decode(name, self.prefill(name, "/again"), "/again") for name in names]
        self.collect(*together)
        self.collect(*(self.decode(name, self.prefill(name, "/local"), "/local") for name in names))
        self.reset()

    def play_aborted(self) -> None:
        """Abort requests at different moments.

        These are requests of the producer, and of the consumer before, during and after the load.
        """
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
        """Send parameters of a completed transfer again.

        The producer has reused its blocks by then.
        """
        names = [name for name in self.plain.answers if len(self.plain.answers[name].prompt) >= 64]
        kept = {name: self.prefill(name) for name in names}
        self.collect(*(self.decode(name, dict(kept[name] or {}), "") for name in names))
        self.reset()
        for number in range(12):  # makes the producer reuse its blocks
            other = Ask(id=f"p/other-{number}", tokens=tokens(250, "other", number), out=1)
            self.engines["p"].ask(other)
            self.engines["p"].answer(other.id, patience(LIMIT))
        for name in names:
            self.stale[f"{name}/replayed"] = "replayed"
            self.collect(self.decode(name, dict(kept[name] or {}), "/replayed"))

    def play_altered(self) -> None:
        """Send parameters with an unknown request, and with an unknown engine."""
        self._alter({"remote_request_id": "nobody"}, {"remote_engine_id": "nowhere"})

    def play_incomplete(self) -> None:
        """Send parameters without blocks."""
        self._alter({"remote_block_ids": None})

    def _alter(self, *changes: Event) -> None:
        names = [name for name in self.plain.answers if len(self.plain.answers[name].prompt) >= 64]
        self.collect(self.decode(names[0], self.prefill(names[0])))
        self.reset("d")
        for number, change in enumerate(changes):
            name = names[(number + 1) % len(names)]
            params = {**(self.prefill(name, f"/{number}") or {}), **change}
            self.stale[f"{name}/altered-{number}"] = "altered"
            self.collect(self.decode(name, params, f"/altered-{number}"))
        # The producer releases blocks that were not fetched when their lease is over.
        self.reset()

    def play_killed(self) -> None:
        """Kill the producer when it has computed all prompts, before the consumer loads them.

        The consumer has loaded half of the prompts from it before.
        """
        names = list(self.plain.answers)
        known = names[::2]
        unknown = names[1::2]
        self.collect(*(self.decode(name, self.prefill(name)) for name in known))
        kept = {name: self.prefill(name, "/kept") for name in names}
        self.reset("d")
        self.engines["p"].kill()
        self.collect(*(self.decode(name, kept[name], "/orphan") for name in unknown + known))

    def play_requests(self) -> None:
        """Play the scenario's own requests, one wave after the other.

        Each is sent to the consumer as soon as the producer has answered it.
        """
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

    # -- the end
    def outcome(self, play: str) -> tuple[Outcome, dict[str, Ended]]:
        """Play `play`, one of PLAYS, and end both engines.

        An engine that ends early, or does not answer in time, is the outcome's error.
        """
        found = Outcome()
        found.current = play
        counts: Counts | None = None
        try:
            for engine in self.engines.values():
                engine.wait(lambda said: said.up, patience(START_LIMIT))
            PLAYS[play](self)
            counts = self.engines["d"].counts()
            found.ended = True
        except EngineGone as gone:
            up = all(engine.said.up for engine in self.engines.values())
            where = "pair" if up else "start"
            text = ""
            errors = [e.said.error for e in self.engines.values() if e.said.error]
            if errors:
                where, _, text = errors[0]
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


PLAYS: dict[str, Callable[[Pair], None]] = {
    "handed": Pair.play_handed,
    "aborted": Pair.play_aborted,
    "replayed": Pair.play_replayed,
    "altered": Pair.play_altered,
    "incomplete": Pair.play_incomplete,
    "killed": Pair.play_killed,
    "requests": Pair.play_requests,
}
"""What the proxy does, by the `pair` of a scenario."""


def asked(scenario: Scenario, seed: int) -> list[Play]:
    """Return the phase of the baseline run: every prompt once, to its end."""
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
    tolerances: Tolerances = EXACT,
) -> tuple[list[Event], list[str], Made, frozenset[str]]:
    """Run a scenario of a pair, below `tmp`.

    Returns its trace, messages about what was due and did not happen, how it was made, and the
    channels of the trace. `known`: a baseline run that contains all its requests, and its book, if
    there is one. `tolerances`: how far loaded KV may be off. Raises RuntimeError if vLLM fails
    without a connector.
    """
    assert scenario.pair is not None
    plain, book = known or plain_runs.get(asked(scenario, seed))
    tmp.mkdir(parents=True, exist_ok=True)
    pair = Pair(
        target, scenario, plain, tmp=tmp, model=plain_runs.model(), book=book, tolerances=tolerances
    )
    outcome, ended = pair.outcome(scenario.pair)
    if scenario.pair == "killed":
        del ended["p"]  # killed by the scenario
    died_in_shutdown = outcome.ended and any(one.how == "signal" for one in ended.values())
    if died_in_shutdown:
        outcome.ended = False
        outcome.current = "shutdown"
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
    """Return both engines' traces, one after the other, then own events; and the channels."""
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
        first = bare(variant, start, Made(outcome, ended["d"], pair.tmp, ""))[0]
    channels = [traces.channels(part) for part in parts.values() if part]
    found: list[Event] = [
        {**first, "role": "kv_both"},
        {"kind": "run.engines", "step": 0, "engines": ROLES, "own": {}},
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
                continue  # caused by the scenario
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
        compared = tokens_of.get(name)
        wrong = compared is not None and not compared["same"] and not compared["ambiguous"]
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
                "unlike": False,
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
    common = frozenset.intersection(*channels) if channels else frozenset()
    return found, common | {"live"}


def _unlabelled(pair: Pair) -> dict[str, Answer]:
    """Return, for each request of the pair, the baseline run's answer to the same prompt."""
    return {answer.id: pair.plain.answers[answer.id.partition("/")[0]] for answer in pair.answers}


def _together(ended: dict[str, Ended]) -> Ended:
    """Return one end for both engines: the worse of the two, and what both left behind."""
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
    """Return the number of failed loads."""
    return sum(event["kind"] == "transfer.failed" for event in events)


def _last_words(log: Path) -> str:
    """Return the last 2000 characters of a log, without empty lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line for line in lines if line.strip())[-2000:]
