# SPDX-License-Identifier: Apache-2.0
"""The child process of one engine of a pair: `python -m kvconform.live.pair_child JOB SOCKET`.

It starts vLLM as the job says, and then does what the proxy requests over the socket, until the
proxy requests its end. Models travel as JSON-like dicts, as between processes that share nothing.

Requests: `("ask", Ask, kv_transfer_params | None)`, `("abort", id)`, `("counts",)`, `("reset",)`,
`("stop",)`. Messages back: `("up", pid)`, `("answer", Answer, kv_transfer_params | None)`,
`("counts", Counts)`, `("reset", bool)`, `("error", where, text, traceback)`, `("end",)`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from kvconform.live import start
from kvconform.live.child import Child, answer_of, sampling_params
from kvconform.live.job import FIRST, Ask, Job

RESET_LIMIT = 30.0
"""Seconds that a reset of the local prefix cache may take.

A producer may hold blocks that were not fetched until their lease is over.
"""
IDLE = 0.01
"""Seconds that an idle engine waits for a request before its next step."""


class PairChild:
    """One engine and its running requests: the Ask, vLLM's internal id, the step of arrival."""

    def __init__(self, job: Job, link: Connection) -> None:
        self.job = job
        self.link = link
        self.running: dict[str, tuple[Ask, str, int]] = {}
        self.outputs: dict[str, Any] = {}
        self.step = 0
        self.counter = Child(job, sys.stderr)
        self.actions: dict[str, Callable[..., None]] = {
            "ask": self._ask,
            "abort": self._abort,
            "counts": self._send_counts,
            "reset": self._reset,
        }

    def run(self) -> None:
        """Start vLLM, serve the proxy, and shut vLLM down.

        Reports an exception of the engine to the proxy, and raises it again.
        """
        where = "start"
        try:
            start.surroundings()
            self.counter.llm = start.engine(self.job)
            self.engine = self.counter.llm.llm_engine
            self.link.send(("up", os.getpid()))
            where = "pair"
            while self._serve():
                pass
            where = "shutdown"
            self.engine.engine_core.shutdown()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.link.send(("error", where, text, traceback.format_exc()[-6000:]))
            raise
        self.link.send(("end",))

    def _serve(self) -> bool:
        """Do what was requested, then make a step; return False once the end is requested."""
        busy = bool(self.running)
        while self.link.poll(0 if busy else IDLE):
            what, *rest = self.link.recv()
            if what == "stop":
                return False
            self.actions[what](*rest)
            busy = True
        for output in self.engine.step():
            self._take(output)
        self.step += 1
        for name, (ask, _, began) in list(self.running.items()):
            if ask.abort is not None and self.step - began >= ask.abort:
                self._abort(name)
        return True

    def _take(self, output: Any) -> None:
        """Keep an output of the engine; send the answer if its request is finished."""
        self.outputs[output.request_id] = output
        if output.finished and output.request_id in self.running:
            ask, internal, _ = self.running.pop(output.request_id)
            answer = answer_of(ask, ask.tokens, internal, output)
            self.link.send(("answer", answer.model_dump(), output.kv_transfer_params))

    def _ask(self, fields: dict[str, Any], transfer: dict[str, Any] | None) -> None:
        """Add a request to the engine, with these kv_transfer_params."""
        ask = Ask.model_validate(fields)
        params = sampling_params(ask)
        if transfer is not None:
            params.extra_args = {"kv_transfer_params": transfer}
        internal = str(
            self.engine.add_request(
                ask.id, {"prompt_token_ids": ask.tokens}, params, priority=ask.priority
            )
        )
        self.running[ask.id] = ask, internal, self.step

    def _abort(self, name: str) -> None:
        """Abort a request that still runs, and send what it has."""
        if name in self.running:
            ask, internal, _ = self.running.pop(name)
            self.engine.abort_request([name])
            answer = answer_of(ask, ask.tokens, internal, self.outputs.get(name), why="abort")
            self.link.send(("answer", answer.model_dump(), None))

    def _send_counts(self) -> None:
        """Send vLLM's counters since they were last requested."""
        self.link.send(("counts", self.counter.take_counts().model_dump()))

    def _reset(self) -> None:
        """Empty the local prefix cache, and send whether vLLM could.

        vLLM refuses while the connector holds blocks, and lets the connector report that it has
        released them only in a step with a request. So requests of one token are run until then.
        """
        limit = time.monotonic() + RESET_LIMIT
        number = 0
        done = bool(self.engine.reset_prefix_cache())
        while not done and time.monotonic() < limit:
            number += 1
            self.engine.add_request(
                f"nudge-{number}",
                {"prompt_token_ids": [FIRST]},
                sampling_params(Ask(id="", tokens=[], out=1)),
            )
            while self.engine.has_unfinished_requests():
                self.engine.step()
            time.sleep(0.2)
            done = bool(self.engine.reset_prefix_cache())
        self.link.send(("reset", done))


def main(arguments: list[str]) -> int:
    """Run the engine; return exit code 0 if it was stopped on request without an error."""
    with Client(arguments[1], "AF_UNIX") as link:
        PairChild(Job.read(Path(arguments[0])), link).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
