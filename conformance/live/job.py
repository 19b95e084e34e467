# SPDX-License-Identifier: Apache-2.0
"""What a child process of the live engine is told, and what it writes: one JSON object per line, as it goes on.

From a scenario to what a child process is told: phases of requests with token ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvconform.contract.scenario import Fault, Phase, Prompt, Request, Scenario, Workload


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Ask(_Part):
    """A request: prompt token ids (behind prompt and answer of request `after`, if that is given), tokens wanted, step of arrival, steps
    until it is aborted.
    """

    id: str
    tokens: list[int]
    after: str | None = None
    out: int
    at: int = 0
    abort: int | None = None
    priority: int = 0


class Play(_Part):
    """A phase; see kvconform.contract.scenario.Phase."""

    name: str
    reset: bool = False
    hits: bool = False
    asks: list[Ask]
    faults: list[Fault] = []


class Job(_Part):
    """One engine and what is asked of it. `transfer`: fields of vLLM's KVTransferConfig, None for no connector. `desk`: the directory where
    faults of servers are asked for (kvconform.live.outage).
    """

    model: str
    start: dict[str, Any]
    transfer: dict[str, Any] | None
    adapters: list[str] = []
    device: Literal["cpu", "emulated", "cuda"] = "cpu"
    pythonpath: list[str] = []
    plays: list[Play]
    fail: bool = False
    desk: str | None = None
    pace: float = 0.0
    book: bool = True
    scale_loads: float | None = None

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


class Answer(_Part):
    """What a request came to: token ids, and per token its log probability, the second most likely token, and how much less likely that was
    (natural logarithm). `why`: stop, length, abort. `internal`: the id that vLLM gave it.
    """

    id: str
    internal: str = ""
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    seconds: list[int]
    gaps: list[float]
    why: str | None


class Counts(_Part):
    """vLLM's own metrics over a phase (differences of counters)."""

    external_queries: int = 0
    external_hits: int = 0
    local_hits: int = 0
    preemptions: int = 0
    drafts: int = 0
    accepted: int = 0
    generated: int = 0
    prompt: int = 0


class PhaseDone(_Part):
    """The end of a phase."""

    name: str
    reset_done: bool | None
    counts: Counts
    answers: list[Answer]


class Outcome:
    """All that a child wrote, as far as it came. `error`: (where, type, text, traceback) of what ended it; `ended`: it came to its end."""

    def __init__(self) -> None:
        self.phases: list[PhaseDone] = []
        self.current: str | None = None
        self.error: dict[str, Any] | None = None
        self.note: dict[str, Any] = {}
        self.ended = False

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """From the file that the child wrote; a last line that is cut off is left out."""
        found = cls()
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for line in lines:
            try:
                data = json.loads(line)
            except ValueError:
                break
            kind = data.pop("kind")
            if kind == "begin":
                found.current = data["name"]
            elif kind == "phase":
                found.phases.append(PhaseDone.model_validate(data))
            elif kind == "error":
                found.error = data
            elif kind == "end":
                found.ended = True
            else:
                found.note |= data
        return found

    @staticmethod
    def over(path: Path) -> bool:
        """Whether the child has written its last line: that it came to its end, or what it died of."""
        if not path.is_file():
            return False
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            last = file.read().splitlines()[-1:]
        return bool(last) and (last[0].startswith((b'{"kind": "end"', b'{"kind": "error"')))

    @property
    def answers(self) -> dict[str, Answer]:
        """All answers by the request's id."""
        return {answer.id: answer for phase in self.phases for answer in phase.answers}


FIRST, VOCABULARY = 3, 512
"""Token ids from FIRST on; below are those with a meaning."""
FAMILY = 320


def tokens(count: int, *seed: Any) -> list[int]:
    """Random token ids, the same for the same seed."""
    source = random.Random(repr(seed))
    return [source.randrange(FIRST, VOCABULARY) for _ in range(count)]


def prompts(found: Sequence[Prompt], seed: int) -> dict[str, list[int]]:
    """The token ids of every prompt by name."""
    made: dict[str, list[int]] = {}
    for prompt in found:
        own = tokens(prompt.tokens, seed, prompt.name)
        if prompt.period is not None:
            cycle = tokens(prompt.period, prompt.draw, "loop")
            own = [cycle[i % prompt.period] for i in range(prompt.tokens)]
        made[prompt.name] = (made[prompt.like][: prompt.shared] if prompt.like else []) + own[
            prompt.shared if prompt.like else 0 :
        ]
    return made


def plays(scenario: Scenario, workload: Workload | None, seed: int) -> list[Play]:
    """The phases of a scenario. A conversation is continued from the answers of the run itself (`Ask.after`), as nobody knows them yet."""
    if workload is None:
        return list(
            _requests(scenario.requests, seed if scenario.families is None else scenario.families)
        )
    found = [
        _phase(phase, workload, prompts(workload.prompts, seed), seed) for phase in workload.phases
    ]
    return [
        play.model_copy(
            update={"faults": [fault for fault in scenario.faults if fault.phase == play.name]}
        )
        for play in found
    ]


def _phase(phase: Phase, workload: Workload, made: dict[str, list[int]], seed: int) -> Play:
    asks, first = [], workload.phases[0].name
    for name, ids in made.items():
        if phase.take == "continued":
            more = tokens(phase.more, seed, name, phase.name)
            asks.append(
                Ask(
                    id=f"{phase.name}/{name}",
                    tokens=more,
                    after=f"{first}/{name}",
                    out=workload.output,
                )
            )
            continue
        part = ids[: max(1, len(ids) // 2)] if phase.take == "halves" else ids
        asks.append(
            Ask(
                id=f"{phase.name}/{name}",
                tokens=part,
                out=1 if phase.take == "halves" else workload.output,
            )
        )
    return Play(
        name=phase.name,
        reset=phase.reset,
        hits=phase.hits,
        asks=asks[::-1] if phase.reverse else asks,
    )


def _requests(requests: Sequence[Request], seed: int) -> list[Play]:
    """One phase per reset."""
    parts: list[list[Ask]] = []
    began = 0
    for number, request in enumerate(requests):
        if request.reset or not parts:
            parts.append([])
            began = request.at
        own = number if request.own is None else request.own
        ids = tokens(FAMILY, seed, "family", request.family)[: request.shared] + tokens(
            request.tail, seed, "own", own
        )
        parts[-1].append(
            Ask(
                id=f"r{own}",
                tokens=ids or [FIRST],
                out=request.out,
                at=max(0, request.at - began),
                abort=request.abort,
                priority=request.priority,
            )
        )
    return [
        Play(name=f"part{number}", reset=number > 1, hits=number > 1, asks=asks)
        for number, asks in enumerate(parts, 1)
    ]
