# SPDX-License-Identifier: Apache-2.0
"""Messages between parent and child of a live run, and the phases of requests of a scenario.

A job says how a child starts vLLM and what it asks. An outcome is what the child wrote: one JSON
object per line, each written as soon as it is known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvconform.compat.environment import vllm_computes_on_gpu
from kvconform.contract.scenario import (
    Entrypoint,
    Fault,
    Phase,
    Prompt,
    Request,
    Scenario,
    Workload,
)
from kvconform.fixtures import tiny_blip

JOB = "KVCONFORM_LIVE_JOB"
"""Environment variable: the file of the job, if its requests enter at the API server."""
BOOK = "KVCONFORM_LIVE_BOOK"
"""Environment variable: a file with KV; the baseline run writes it, other runs read it."""
TOLERANCES = "KVCONFORM_LIVE_TOLERANCES"
"""Environment variable: the encoded Tolerances that the connector declares."""
SHARED = "KVCONFORM_LIVE_SHARED"
"""Environment variable: "1" if another engine may have computed what this connector offers.

Then everything that the baseline run computed counts as computed, and lookups of it are correct.
"""


EMBEDDINGS: Entrypoint = "embeddings"
"""The entrypoint at which a prompt is answered with one vector, and no tokens."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Ask(_Part):
    """One request.

    `tokens`: token ids of the prompt. With `turns`, it is a session, and gets these, one after the
    other, each when it has its `out` tokens; `said`: what it holds before the answer to the last
    one that it got. With `after`, the prompt is the prompt and answer of that earlier request,
    followed by `tokens`. `out`: tokens wanted. `at`: step of arrival. `abort`: steps from its
    arrival until it is aborted. `entrypoint`: it is sent by HTTP, with its cache `salt`, to the
    adapter `lora`. `embeds`: the content of a prompt that is sent as embeddings; `tokens` are zeros
    then, as in vLLM's requests. `image`: the content of an image, whose tokens come first.
    """

    id: str
    tokens: list[int]
    turns: list[list[int]] = []
    said: list[int] = []
    after: str | None = None
    out: int
    at: int = 0
    abort: int | None = None
    priority: int = 0
    entrypoint: Entrypoint | None = None
    salt: str | None = None
    lora: str | None = None
    embeds: str | None = None
    image: str | None = None

    @property
    def words(self) -> list[int]:
        """The token ids that the client sends as text: those behind an image."""
        return self.tokens[tiny_blip.LENGTH :] if self.image else self.tokens


def dtype() -> str:
    """Return the number format of the model and its KV.

    The attention that vLLM has for GPUs computes in 16 bits only.
    """
    return "float16" if vllm_computes_on_gpu() else "float32"


def memory() -> dict[str, Any]:
    """Return vLLM's arguments about memory: on a GPU, engines run at the same time.

    With a size of the KV cache, vLLM does not measure how much memory is left for it.
    """
    if not vllm_computes_on_gpu():
        return {}
    return {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20}


class Play(_Part):
    """A phase of requests; see kvconform.contract.scenario.Phase."""

    name: str
    reset: bool | Literal["connector"] = False
    restart: bool = False
    interrupt: int | None = None
    hits: bool = False
    asks: list[Ask]
    faults: list[Fault] = []


class Job(_Part):
    """One engine and what it is asked.

    `model`, `drafter`: directories. `transfer`: fields of vLLM's KVTransferConfig, None for no
    connector. `desk`: the directory in which the child requests faults (kvconform.live.outage).
    """

    model: str
    drafter: str | None = None
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

    @property
    def served(self) -> bool:
        """Whether its requests enter at the API server."""
        return any(ask.entrypoint for play in self.plays for ask in play.asks)

    @property
    def embeds(self) -> bool:
        """Whether the server makes embeddings of prompts, and no tokens."""
        return any(ask.entrypoint == EMBEDDINGS for play in self.plays for ask in play.asks)

    def write(self, path: Path) -> None:
        """Write the job to a file as JSON."""
        path.write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job from the file that `write` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


class Answer(_Part):
    """The result of a request.

    Per token: its id (`tokens`), its log probability (`logprobs`), the second most likely token
    (`seconds`), and by how much that one was less likely (`gaps`, natural logarithm). `why`: stop,
    length or abort. `internal`: the id that vLLM gave the request. At entrypoint embeddings there
    are no tokens, but an `embedding`.
    """

    id: str
    internal: str = ""
    prompt: list[int]
    said: list[int] = []
    tokens: list[int]
    logprobs: list[float]
    seconds: list[int]
    gaps: list[float]
    why: str | None
    embedding: list[float] = []


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
    """The result of a phase.

    `reset_done`: whether the local prefix cache could be emptied before it; None if that was not
    asked for. `restarted`: whether vLLM was started again before it. `missed`: it ended before the
    reset that was to interrupt it.
    """

    name: str
    reset_done: bool | None
    restarted: bool = False
    missed: bool = False
    counts: Counts
    answers: list[Answer]


class Outcome:
    """Everything that a child wrote before its end.

    `current`: the last phase (or `shutdown`) that began. `error`: what ended the run (where, text,
    stalled, traceback). `ended`: the child reached its end.
    """

    def __init__(self) -> None:
        self.phases: list[PhaseDone] = []
        self.current: str | None = None
        self.error: dict[str, Any] | None = None
        self.note: dict[str, Any] = {}
        self.ended = False

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read the file that the child wrote. A truncated last line is ignored."""
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
        """Return whether the child has written its last line: its end, or a fatal error."""
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
"""Prompts use token ids from FIRST up to, but not including, VOCABULARY.

Ids below FIRST have a meaning for the model.
"""
FAMILY = 320
"""Tokens of a prompt family."""


TURNS = 3
"""Inputs of a session."""


def tokens(count: int, *seed: Any) -> list[int]:
    """Return `count` random token ids, the same for the same seed."""
    source = random.Random(repr(seed))
    return [source.randrange(FIRST, VOCABULARY) for _ in range(count)]


def prompts(found: Sequence[Prompt], seed: int) -> dict[str, list[int]]:
    """Return the token ids of every prompt by its name."""
    made: dict[str, list[int]] = {}
    for prompt in found:
        if prompt.period is None:
            own = tokens(prompt.tokens, seed, prompt.name)
        else:
            cycle = tokens(prompt.period, prompt.draw, "loop")
            own = [cycle[i % prompt.period] for i in range(prompt.tokens)]
        if prompt.like:
            like = made[prompt.like][prompt.apart : prompt.shared]
            made[prompt.name] = own[: prompt.apart] + like + own[prompt.shared :]
        else:
            made[prompt.name] = own
    return made


def plays(scenario: Scenario, workload: Workload | None, seed: int) -> list[Play]:
    """Return the phases of a scenario.

    A conversation continues the answers of the run itself (`Ask.after`), which are not known yet.
    """
    if workload is None:
        families = seed if scenario.families is None else scenario.families
        return _requests(scenario.requests, families, scenario.entrypoint)
    made = prompts(workload.prompts, seed)
    found = [_phase(phase, workload, made, seed) for phase in workload.phases]
    return [
        play.model_copy(
            update={"faults": [fault for fault in scenario.faults if fault.phase == play.name]}
        )
        for play in found
    ]


def _phase(phase: Phase, workload: Workload, made: dict[str, list[int]], seed: int) -> Play:
    """Return one phase, with a request for every prompt in `made`."""
    asks = []
    first = workload.phases[0].name
    for name, ids in made.items():
        id_ = f"{phase.name}/{name}"
        if phase.take == "continued":
            more = tokens(phase.more, seed, name, phase.name)
            asks.append(Ask(id=id_, tokens=more, after=f"{first}/{name}", out=workload.output))
        elif phase.take == "sessions":
            size = -(-len(ids) // TURNS)
            inputs = [ids[start : start + size] for start in range(0, len(ids), size)]
            asks.append(Ask(id=id_, tokens=inputs[0], turns=inputs[1:], out=workload.output))
        elif phase.take == "halves":
            asks.append(Ask(id=id_, tokens=ids[: max(1, len(ids) // 2)], out=1))
        else:
            asks.append(Ask(id=id_, tokens=ids, out=workload.output))
    return Play(
        name=phase.name,
        reset=phase.reset,
        restart=phase.restart,
        interrupt=phase.interrupt,
        hits=phase.hits,
        asks=asks[::-1] if phase.reverse else asks,
    )


def _requests(requests: Sequence[Request], seed: int, entrypoint: Entrypoint | None) -> list[Play]:
    """Return the phases of requests without a workload; every reset begins a new one."""
    parts: list[list[Ask]] = []
    began = 0
    for number, request in enumerate(requests):
        if request.reset or not parts:
            parts.append([])
            began = request.at
        own = number if request.own is None else request.own
        family = tokens(FAMILY, seed, "family", request.family)
        ids = [
            *tokens(request.lead, seed, "lead", request.lead),
            *family[: request.shared],
            *tokens(request.tail, seed, "own", own),
        ]
        if request.embeds is not None:
            ids = [0] * len(ids)
        if request.image is not None:
            ids = [tiny_blip.IMAGE] * tiny_blip.LENGTH + ids
        parts[-1].append(
            Ask(
                id=".".join((f"r{own}", *request.tenant)),
                tokens=ids or [FIRST],
                out=request.out,
                at=max(0, request.at - began),
                abort=request.abort,
                priority=request.priority,
                entrypoint=entrypoint,
                salt=request.salt,
                lora=request.lora,
                embeds=request.embeds,
                image=request.image,
            )
        )
    return [
        Play(name=f"part{number}", reset=number > 1, hits=number > 1, asks=asks)
        for number, asks in enumerate(parts, 1)
    ]
