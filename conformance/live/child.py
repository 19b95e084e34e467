# SPDX-License-Identifier: Apache-2.0
"""The child process: builds vLLM as a job says, goes through its phases, and writes what came of them: `python -m kvconform.live.child
JOB OUT`. Whatever the connector does to this process is seen by the parent, which has a time limit and ends what is left of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from kvconform.live.job import Answer, Ask, Counts, Job, PhaseDone, Play
from kvconform.live.outage import Striking

PATIENCE = 45.0
"""Seconds without a token of any request, while some wait, after which nothing is going to happen any more."""
OUTAGE_PATIENCE = 90.0
"""The same where servers of the connector fail: what it asked of them may have to run into a time limit first."""
RESET_LIMIT = 15.0
"""Seconds that a reset of the local prefix cache may take: until the connector has let go of the last block. Once it has not, nobody
waits again."""
METRICS = {
    "vllm:external_prefix_cache_queries": "external_queries",
    "vllm:external_prefix_cache_hits": "external_hits",
    "vllm:prefix_cache_hits": "local_hits",
    "vllm:num_preemptions": "preemptions",
    "vllm:spec_decode_num_draft_tokens": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:generation_tokens": "generated",
    "vllm:prompt_tokens": "prompt",
}


class Stalled(Exception):
    """Requests wait, and nothing happens."""


class Child:
    """One engine. `out` gets a line per thing that is known."""

    def __init__(self, job: Job, out: IO[str]) -> None:
        self.job, self.out = job, out
        self.answers: dict[str, Answer] = {}
        self._counted: dict[str, int] = {}
        self.llm: Any = None
        self.held = False
        failing = any(play.faults for play in job.plays)
        self.patience, self.reset_limit = (
            (OUTAGE_PATIENCE, OUTAGE_PATIENCE) if failing else (PATIENCE, RESET_LIMIT)
        )
        self.patience = max(self.patience, job.pace)
        self.striking = Striking(job.desk)

    def write(self, kind: str, **fields: Any) -> None:
        self.out.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.out.flush()

    def run(self) -> None:
        """Everything. Raises what the engine raises, after noting where it was."""
        where = "start"
        try:
            from kvconform.live import start

            start.surroundings()
            self.llm = start.engine(self.job)
            self.write("note", pid=os.getpid(), started=True)
            for play in self.job.plays:
                where = play.name
                self.write("begin", name=play.name)
                self.write("phase", **self.play(play).model_dump())
            self._settle(self.llm.llm_engine)
            where = "shutdown"
            self.write("begin", name=where)
            self.llm.llm_engine.engine_core.shutdown()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.write(
                "error",
                where=where,
                text=text,
                stalled=isinstance(error, Stalled),
                traceback=traceback.format_exc()[-6000:],
            )
            raise
        self.write("end")

    # -- a phase -------------------------------------------------------------------------------------------------------------------
    def play(self, play: Play) -> PhaseDone:
        """Ask everything, and wait for all answers."""
        engine = self.llm.llm_engine
        done = self._reset(engine) if play.reset else None
        waiting = sorted(play.asks, key=lambda ask: ask.at)
        running: dict[
            str, tuple[Ask, list[int], str, int]
        ] = {}  # by the id that vLLM reports: ask, prompt, internal id, step of arrival
        outputs: dict[str, Any] = {}
        found: list[Answer] = []
        step, heard = 0, time.monotonic()
        self.striking.phase(play)
        while waiting or running:
            if self.striking.step(step, len(running)):
                heard = time.monotonic()
            if not running and waiting:
                step = max(step, waiting[0].at)
            while waiting and waiting[0].at <= step:
                ask = waiting.pop(0)
                prompt = self._prompt(ask)
                internal = str(
                    engine.add_request(
                        ask.id, {"prompt_token_ids": prompt}, _params(ask), priority=ask.priority
                    )
                )
                running[ask.id] = ask, prompt, internal, step
                if self.job.fail and play.hits:
                    engine.engine_core.engine_core.scheduler.connector.kvconform_fail_load(internal)
            said = engine.step()
            if not said:
                time.sleep(0.001)
            if said or not running:
                heard = time.monotonic()
            elif time.monotonic() - heard > self.patience:
                raise Stalled(
                    f"no request went on for {self.patience:g} s; waiting: {', '.join(sorted(running))}"
                )
            for output in said:
                outputs[output.request_id] = output
                if output.finished and output.request_id in running:
                    ask, prompt, internal, _ = running.pop(output.request_id)
                    found.append(_answer(ask, prompt, internal, output))
            step += 1
            for ask, prompt, internal, began in list(running.values()):
                if ask.abort is not None and step - began >= ask.abort:
                    engine.abort_request([ask.id])
                    del running[ask.id]
                    found.append(_answer(ask, prompt, internal, outputs.get(ask.id), why="abort"))
        self.answers |= {answer.id: answer for answer in found}
        return PhaseDone(name=play.name, reset_done=done, counts=self._counts(), answers=found)

    def _prompt(self, ask: Ask) -> list[int]:
        before = self.answers[ask.after] if ask.after is not None else None
        return [*before.prompt, *before.tokens, *ask.tokens] if before is not None else ask.tokens

    def _settle(self, engine: Any) -> None:
        """Let the engine make the steps that a server's makes when nobody asks any more: the connector hears who has finished, and what it
        still sends is waited for.
        """
        limit = time.monotonic() + RESET_LIMIT
        if not self.job.start["processes"]:
            while (
                engine.engine_core.engine_core.scheduler.has_requests() and time.monotonic() < limit
            ):
                engine.step()
                time.sleep(0.001)
        if not self.held:
            self._reset(engine)

    def _reset(self, engine: Any) -> bool:
        """Empty the local prefix cache. vLLM refuses as long as blocks are in use, as they are while a connector still saves them; an
        engine in this process lives by being asked.
        """
        limit = time.monotonic() + self.reset_limit
        here = not self.job.start["processes"]
        while not engine.reset_prefix_cache():
            if time.monotonic() > limit or self.held:
                self.held = True
                return False
            if here:
                engine.step()
            time.sleep(0.01)
        return True

    def _counts(self) -> Counts:
        """VLLM's counters since the last call."""
        now: dict[str, int] = {}
        for metric in self.llm.get_metrics():
            name = METRICS.get(metric.name)
            if name is not None:
                now[name] = now.get(name, 0) + int(metric.value)
        found = {name: value - self._counted.get(name, 0) for name, value in now.items()}
        self._counted = now
        return Counts(**found)


def _params(ask: Ask) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=ask.out, ignore_eos=True, logprobs=2, detokenize=False
    )


def _answer(
    ask: Ask, prompt: list[int], internal: str, output: Any, why: str | None = None
) -> Answer:
    """What came of a request; nothing yet if vLLM has said nothing about it."""
    if output is None:
        return Answer(
            id=ask.id,
            internal=internal,
            prompt=prompt,
            tokens=[],
            logprobs=[],
            seconds=[],
            gaps=[],
            why=why,
        )
    said = output.outputs[0]
    tokens, logprobs, seconds, gaps = list(said.token_ids), [], [], []
    for token, options in zip(tokens, said.logprobs or (), strict=False):
        best = sorted(
            ((value.logprob, key) for key, value in options.items() if key != token), reverse=True
        )
        own = options[token].logprob
        logprobs.append(round(own, 6))
        seconds.append(best[0][1] if best else -1)
        gaps.append(round(own - best[0][0], 6) if best else 99.0)
    return Answer(
        id=ask.id,
        internal=internal,
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        seconds=seconds,
        gaps=gaps,
        why=why or said.finish_reason,
    )


def main(arguments: list[str]) -> int:
    """Exit code 0 if all phases came to their end."""
    job = Job.read(Path(arguments[0]))
    for folder in job.pythonpath:
        sys.path.append(folder)
    with Path(arguments[1]).open("a", encoding="utf-8") as out:
        Child(job, out).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
