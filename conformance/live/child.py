# SPDX-License-Identifier: Apache-2.0
"""The child process of a live run: `python -m kvconform.live.child JOB OUT`.

It starts vLLM as the job says, plays its phases, and writes the results to OUT. The parent has a
time limit and ends what is left of this process, whatever the connector does to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import msgspec
from prometheus_client import REGISTRY

from kvconform.live import start
from kvconform.live.job import SHARED, Answer, Ask, Counts, Job, PhaseDone, Play
from kvconform.live.outage import Striking
from kvconform.live.plugin import TRACE
from kvconform.live.trace import later

PATIENCE = 45.0
"""Seconds without a new token of any request, while some wait, after which the run is stalled."""
OUTAGE_PATIENCE = 90.0
"""The same while servers of the connector fail: what it asked them may have to time out first."""
TRIES = 100
"""Steps in a row in which vLLM may refuse to reset its cache while requests run."""
RESET_LIMIT = 15.0
"""Seconds that a reset of the local prefix cache may take.

The connector has to release the last block until then. If it does not, later resets do not wait.
"""
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
"""vLLM's name of each metric in Counts."""


class Stalled(Exception):
    """Requests wait, and vLLM makes no progress."""


class Child:
    """One engine and the phases that it is asked. `out` gets one line of JSON per result.

    `held`: blocks were still in use at the time limit of a reset. `lives`: starts of vLLM so far.
    """

    def __init__(self, job: Job, out: IO[str]) -> None:
        self.job = job
        self.out = out
        self.answers: dict[str, Answer] = {}
        self._counted: dict[str, int] = {}
        self.lives = 1
        self._metrics: set[Any] = set()
        self.llm: Any = None
        self.held = False
        failing = any(play.faults for play in job.plays)
        self.patience = max(OUTAGE_PATIENCE if failing else PATIENCE, job.pace)
        self.reset_limit = OUTAGE_PATIENCE if failing else RESET_LIMIT
        self.striking = Striking(job.desk)

    def write(self, kind: str, **fields: Any) -> None:
        """Write one line."""
        self.out.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.out.flush()

    def run(self) -> None:
        """Start vLLM, play all phases, and shut vLLM down.

        Writes where the engine raised an exception, and raises it again.
        """
        where = "start"
        try:
            start.surroundings()
            self.open()
            self.write("note", pid=os.getpid(), started=True)
            for play in self.job.plays:
                where = play.name
                self.write("begin", name=play.name)
                self.write("phase", **self.play(play).model_dump())
            self.settle()
            where = "shutdown"
            self.write("begin", name=where)
            self.close()
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

    def open(self) -> None:
        """Start vLLM."""
        self._metrics = collectors()
        self.llm = start.engine(self.job)

    def close(self) -> None:
        """Shut vLLM down."""
        self.llm.llm_engine.engine_core.shutdown()

    def restart(self) -> None:
        """Shut vLLM down, and start it again: its engine gets a process and a trace of its own.

        What the engine before has computed counts as computed (SHARED).
        """
        assert self.job.start["processes"]
        self.settle()
        self.close()
        for metric in collectors() - self._metrics:  # a front end of its own would have none
            REGISTRY.unregister(metric)
        self.lives += 1
        os.environ[SHARED] = "1"
        os.environ[TRACE] = str(later(Path(os.environ[TRACE]), self.lives))
        self.open()
        self._counted.clear()
        self.held = False

    # -- a phase
    def play(self, play: Play) -> PhaseDone:
        """Send all requests of a phase, and wait for all answers. Stalled if none progresses."""
        if play.restart:
            self.restart()
        engine = self.llm.llm_engine
        done = self._reset(engine) if play.reset else None
        if play.reset == "connector" and self.job.transfer is not None:
            engine.reset_prefix_cache(reset_connector=True)
        waiting = sorted(play.asks, key=lambda ask: ask.at)
        # By the id that vLLM reports: the request, its prompt, vLLM's internal id, step of arrival.
        running: dict[str, tuple[Ask, list[int], str, int]] = {}
        outputs: dict[str, Any] = {}
        found: list[Answer] = []
        step = 0
        interrupt = play.interrupt
        tries = 0
        last_progress = time.monotonic()
        self.striking.phase(play)
        while waiting or running:
            if self.striking.step(step, len(running)):
                last_progress = time.monotonic()
            if not running and waiting:
                step = max(step, waiting[0].at)
            while waiting and waiting[0].at <= step:
                ask = waiting.pop(0)
                prompt = self._prompt(ask)
                internal = send(engine, ask, prompt)
                running[ask.id] = ask, prompt, internal, step
                if self.job.fail and play.hits:
                    engine.engine_core.engine_core.scheduler.connector.kvconform_fail_load(internal)
            new = engine.step()
            if not new:
                time.sleep(0.001)
            if new or not running:
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self.patience:
                names = ", ".join(sorted(running))
                raise Stalled(f"no request progressed for {self.patience:g} s; waiting: {names}")
            for output in new:
                outputs[output.request_id] = output
                if output.outputs[0].finish_reason is None or output.request_id not in running:
                    continue
                ask, prompt, internal, began = running.pop(output.request_id)
                if ask.turns:
                    ask = next_turn(engine, ask, prompt, internal, output)
                    running[ask.id] = ask, prompt, internal, began
                    continue
                if ask.said:
                    go_on(engine, ask, internal, None)
                found.append(answer_of(ask, prompt, internal, output))
            step += 1
            if interrupt is not None and step >= interrupt and running and tries < TRIES:
                tries += 1
                if interrupted(engine):
                    interrupt = None
            for ask, prompt, internal, began in list(running.values()):
                if ask.abort is not None and step - began >= ask.abort:
                    engine.abort_request([ask.id])
                    del running[ask.id]
                    output = outputs.get(ask.id)
                    found.append(answer_of(ask, prompt, internal, output, why="abort"))
        self.answers |= {answer.id: answer for answer in found}
        return PhaseDone(
            name=play.name,
            reset_done=done,
            restarted=play.restart,
            missed=interrupt is not None,
            counts=self.take_counts(),
            answers=found,
        )

    def _prompt(self, ask: Ask) -> list[int]:
        """Return the token ids of a prompt; a conversation continues an earlier answer."""
        if ask.after is None:
            return ask.tokens
        before = self.answers[ask.after]
        if before.said:
            return [*before.said, *before.tokens[-ask.out :], *ask.tokens]
        return [*before.prompt, *before.tokens, *ask.tokens]

    def settle(self) -> None:
        """Let the engine make the steps that a server's engine makes after its last request.

        In them the connector hears which requests have finished, and completes what it still sends.
        """
        engine = self.llm.llm_engine
        limit = time.monotonic() + RESET_LIMIT
        if not self.job.start["processes"]:
            scheduler = engine.engine_core.engine_core.scheduler
            while scheduler.has_requests() and time.monotonic() < limit:
                engine.step()
                time.sleep(0.001)
        if not self.held:
            self._reset(engine)

    def _reset(self, engine: Any) -> bool:
        """Empty the local prefix cache; return whether vLLM could.

        vLLM refuses while blocks are in use, for example because the connector still saves them.
        An engine in this process only makes a step when it is called.
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

    def metrics(self) -> Iterable[Any]:
        """Return vLLM's metrics."""
        return self.llm.get_metrics()

    def take_counts(self) -> Counts:
        """Return by how much vLLM's counters have grown since the last call."""
        now: dict[str, int] = {}
        for metric in self.metrics():
            name = METRICS.get(metric.name)
            if name is not None:
                now[name] = now.get(name, 0) + int(metric.value)
        found = {name: value - self._counted.get(name, 0) for name, value in now.items()}
        self._counted = now
        return Counts(**found)


def send(engine: Any, ask: Ask, prompt: list[int]) -> str:
    """Add a request, or begin a session if more input follows; return vLLM's internal id."""
    params = sampling_params(ask)
    if not ask.turns:
        found = engine.add_request(
            ask.id, {"prompt_token_ids": prompt}, params, priority=ask.priority
        )
        return str(found)
    request = _processed(engine, ask.id, prompt, ask, resumable=True)
    engine.input_processor.assign_request_id(request)
    _hand_over(engine, request)
    return str(request.request_id)


def next_turn(engine: Any, ask: Ask, prompt: list[int], internal: str, output: Any) -> Ask:
    """Give a session its next input, and return what is left to do for it."""
    more, *later = ask.turns
    go_on(engine, ask, internal, more)
    # vLLM drops the last token of the answer, which is not computed.
    answer = output.outputs[0].token_ids[-ask.out : -1]
    return ask.model_copy(update={"turns": later, "said": [*(ask.said or prompt), *answer, *more]})


def go_on(engine: Any, ask: Ask, internal: str, more: list[int] | None) -> None:
    """Give a session more input, or end it if there is none, as AsyncLLM does.

    LLMEngine.add_request would make it a request of its own.
    """
    request = _processed(engine, internal, more or [0], ask, resumable=more is not None)
    request.external_req_id = ask.id
    _hand_over(engine, request)


def _processed(engine: Any, id_: str, tokens: list[int], ask: Ask, *, resumable: bool) -> Any:
    return engine.input_processor.process_inputs(
        id_,
        {"prompt_token_ids": list(tokens)},  # vLLM extends the list
        sampling_params(ask),
        supported_tasks=engine.get_supported_tasks(),
        resumable=resumable,
    )


def _hand_over(engine: Any, request: Any) -> None:
    engine.output_processor.add_request(request, None, None, 0)
    # Both halves extend their list of tokens. AsyncLLM's engine is in a process of its own.
    tokens = list(request.prompt_token_ids)
    engine.engine_core.add_request(msgspec.structs.replace(request, prompt_token_ids=tokens))


def interrupted(engine: Any) -> bool:
    """Reset vLLM's cache and the connector's while requests run; return whether vLLM could.

    vLLM raises RuntimeError while blocks are held for loads or by finished requests. It has
    preempted the running requests then, which does no harm.
    """
    try:
        engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError as error:
        if "Failed to reset KV cache" not in str(error):
            raise
        return False
    return True


def collectors() -> set[Any]:
    """Return the Prometheus metrics that this process has registered."""
    return set(REGISTRY._collector_to_names)


def sampling_params(ask: Ask) -> Any:
    """Return the SamplingParams of a request: greedy tokens with their log probabilities."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=ask.out, ignore_eos=True, logprobs=2, detokenize=False
    )


def answer_of(
    ask: Ask, prompt: list[int], internal: str, output: Any, why: str | None = None
) -> Answer:
    """Return the result of a request.

    `output` is vLLM's last output for it; None, for no output yet, gives an answer without tokens.
    """
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
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = []
    seconds = []
    gaps = []
    for token, options in zip(tokens, completion.logprobs or (), strict=False):
        others = sorted(
            ((value.logprob, key) for key, value in options.items() if key != token), reverse=True
        )
        own = options[token].logprob
        logprobs.append(round(own, 6))
        seconds.append(others[0][1] if others else -1)
        gaps.append(round(own - others[0][0], 6) if others else 99.0)
    return Answer(
        id=ask.id,
        internal=internal,
        prompt=prompt,
        said=ask.said,
        tokens=tokens,
        logprobs=logprobs,
        seconds=seconds,
        gaps=gaps,
        why=why or completion.finish_reason,
    )


def main(arguments: list[str], kind: type[Child] = Child) -> int:
    """Run the job; return exit code 0 if all phases reached their end."""
    job = Job.read(Path(arguments[0]))
    for folder in job.pythonpath:
        sys.path.append(folder)
    with Path(arguments[1]).open("a", encoding="utf-8") as out:
        kind(job, out).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
