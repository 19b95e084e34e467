# SPDX-License-Identifier: Apache-2.0
"""One engine of a pair: builds vLLM as a job says, and then does what the proxy asks for over a socket, until it is told to stop:
`python -m kvconform.live.pair_child JOB SOCKET`.

Asked for: `("ask", Ask, kv_transfer_params | None)`, `("abort", id)`, `("counts",)`, `("reset",)`, `("stop",)`. Said: `("up", pid)`,
`("answer", Answer, kv_transfer_params | None)`, `("counts", Counts)`, `("reset", bool)`, `("error", where, text, traceback)`, `("end",)`.
Models travel as JSON-like dicts, as between processes that share nothing.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from kvconform.live.child import Child, _answer, _params
from kvconform.live.job import FIRST, Ask, Job

RESET_LIMIT = 30.0
"""Seconds until the connector has let go of all blocks: a producer may keep those that nobody fetched for as long as its lease."""
IDLE = 0.01
"""Seconds between two looks at the socket when there is nothing to compute."""


class PairChild:
    """The engine and what runs on it: per request, the Ask, vLLM's internal id, and the step of its arrival."""

    def __init__(self, job: Job, link: Connection) -> None:
        self.job, self.link = job, link
        self.running: dict[str, tuple[Ask, str, int]] = {}
        self.outputs: dict[str, Any] = {}
        self.step = 0
        self.counter = Child(job, sys.stderr)

    def run(self) -> None:
        """Everything. Raises what the engine raises, after saying so."""
        where = "start"
        try:
            from kvconform.live import start

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
        """Do what was asked, then a step; False once it is to stop."""
        busy = bool(self.running)
        while self.link.poll(0 if busy else IDLE):
            what, *rest = self.link.recv()
            if what == "stop":
                return False
            getattr(self, f"_do_{what}")(*rest)
            busy = True
        for output in self.engine.step():
            self._said(output)
        self.step += 1
        for name, (ask, _, began) in list(self.running.items()):
            if ask.abort is not None and self.step - began >= ask.abort:
                self._do_abort(name)
        return True

    def _said(self, output: Any) -> None:
        self.outputs[output.request_id] = output
        if output.finished and output.request_id in self.running:
            ask, internal, _ = self.running.pop(output.request_id)
            answer = _answer(ask, ask.tokens, internal, output)
            self.link.send(("answer", answer.model_dump(), output.kv_transfer_params))

    def _do_ask(self, told: dict[str, Any], transfer: dict[str, Any] | None) -> None:
        ask = Ask.model_validate(told)
        params = _params(ask)
        if transfer is not None:
            params.extra_args = {"kv_transfer_params": transfer}
        internal = str(
            self.engine.add_request(
                ask.id, {"prompt_token_ids": ask.tokens}, params, priority=ask.priority
            )
        )
        self.running[ask.id] = ask, internal, self.step

    def _do_abort(self, name: str) -> None:
        if name in self.running:
            ask, internal, _ = self.running.pop(name)
            self.engine.abort_request([name])
            answer = _answer(ask, ask.tokens, internal, self.outputs.get(name), why="abort")
            self.link.send(("answer", answer.model_dump(), None))

    def _do_counts(self) -> None:
        self.link.send(("counts", self.counter._counts().model_dump()))

    def _do_reset(self) -> None:
        """Empty the local prefix cache: vLLM refuses while the connector holds blocks, and lets it say that it is done only in a step of a
        request.
        """
        limit, number = time.monotonic() + RESET_LIMIT, 0
        done = bool(self.engine.reset_prefix_cache())
        while not done and time.monotonic() < limit:
            number += 1
            self.engine.add_request(
                f"nudge-{number}",
                {"prompt_token_ids": [FIRST]},
                _params(Ask(id="", tokens=[], out=1)),
            )
            while self.engine.has_unfinished_requests():
                self.engine.step()
            time.sleep(0.2)
            done = bool(self.engine.reset_prefix_cache())
        self.link.send(("reset", done))


def main(arguments: list[str]) -> int:
    """Exit code 0 if it was told to stop, and could."""
    with Client(arguments[1], "AF_UNIX") as link:
        PairChild(Job.read(Path(arguments[0])), link).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
