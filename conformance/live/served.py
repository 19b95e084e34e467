# SPDX-License-Identifier: Apache-2.0
"""The child process of a run whose requests enter at vLLM's OpenAI-compatible server.

Usage: `python -m kvconform.live.served JOB OUT`.

The server is vLLM's own, from `run_server` on, and listens on a free port of 127.0.0.1. The client
in the same event loop sends its requests over that socket. The engine has a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterable
from itertools import groupby
from pathlib import Path
from typing import IO, Any, TypeVar

import aiohttp

from kvconform.contract.scenario import BLOCK_SIZE, MAX_MODEL_LEN
from kvconform.fixtures import tiny_lora, tiny_tokenizer
from kvconform.live.child import Child, Stalled, main
from kvconform.live.entry import BASE, PATHS, body, name_of
from kvconform.live.job import EMBEDDINGS, Answer, Ask, Job, PhaseDone, Play, dtype, memory

Result = TypeVar("Result")
START_LIMIT = 240.0
"""Seconds that the server may take to start."""
SHUTDOWN = 20
"""Seconds that vLLM's engine may take to end by itself (--shutdown-timeout)."""
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""Environment of the server: it serves the endpoints that load adapters and reset caches."""


class Refused(Exception):
    """The server answered a request with an error."""


class Served(Child):
    """One API server and the phases that it is asked."""

    def __init__(self, job: Job, out: IO[str]) -> None:
        super().__init__(job, out)
        self.loop = asyncio.new_event_loop()
        self.folder = Path(job.model).parent
        self.loaded: dict[str, str] = {}
        self.url = ""
        self.server: Any = None
        self.session: Any = None

    def _wait(self, task: Coroutine[Any, Any, Result]) -> Result:
        """Run a task in the event loop, in which the server runs, too."""
        return self.loop.run_until_complete(task)

    # -- start and end
    def open(self) -> None:
        """Start the server, and wait until it is ready."""
        os.environ.update(ENVIRONMENT)
        self._wait(self._open())

    async def _open(self) -> None:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        port = free_port()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments(self.job, port))
        validate_parsed_serve_args(args)
        self.url = f"http://127.0.0.1:{port}"
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.patience))
        self.server = asyncio.ensure_future(run_server(args))
        limit = time.monotonic() + START_LIMIT
        while not await self._healthy():
            if self.server.done():
                await self.server
                raise RuntimeError("vLLM's API server ended before it was ready")
            if time.monotonic() > limit:
                raise RuntimeError(f"vLLM's API server was not ready after {START_LIMIT:g} s")
            await asyncio.sleep(0.1)

    async def _healthy(self) -> bool:
        """Return whether the server answers."""
        try:
            async with self.session.get(f"{self.url}/health") as response:
                return bool(response.status == 200)
        except (aiohttp.ClientConnectionError, TimeoutError):
            return False

    def settle(self) -> None:
        """Empty the local prefix cache, which waits for what the connector still sends."""
        if not self.held:
            self._wait(self._empty())

    def close(self) -> None:
        """End the server as an operator does, with SIGTERM."""
        self._wait(self._close())
        self.loop.close()

    async def _close(self) -> None:
        await self.session.close()
        os.kill(os.getpid(), signal.SIGTERM)
        await self.server

    # -- a phase
    def play(self, play: Play) -> PhaseDone:
        """Send all requests of a phase, those of one `at` at the same time."""
        return self._wait(self._play(play))

    async def _play(self, play: Play) -> PhaseDone:
        done = await self._empty() if play.reset else None
        found: list[Answer] = []
        for _, group in groupby(sorted(play.asks, key=lambda ask: ask.at), lambda ask: ask.at):
            asks = list(group)
            for ask in asks:
                await self._load_adapter(ask.lora)
            found += await asyncio.gather(*(self._ask(ask) for ask in asks))
        self.answers |= {answer.id: answer for answer in found}
        return PhaseDone(name=play.name, reset_done=done, counts=self.take_counts(), answers=found)

    async def _ask(self, ask: Ask) -> Answer:
        """Send a request, and return the result."""
        assert ask.entrypoint is not None
        said = await self._post(PATHS[ask.entrypoint], body(ask), {"X-Request-Id": ask.id})
        return answer_of(ask, said)

    async def _load_adapter(self, lora: str | None) -> None:
        """Load an adapter by HTTP, in place of the version that the server has; None: nothing."""
        if lora is None or self.loaded.get(name_of(lora)) == lora:
            return
        path = tiny_lora.make(self.folder / "tiny-lora" / lora)
        order: dict[str, Any] = {"lora_name": name_of(lora), "lora_path": str(path)}
        if name_of(lora) in self.loaded:
            order["load_inplace"] = True
        await self._post("/v1/load_lora_adapter", order)
        self.loaded[name_of(lora)] = lora

    async def _empty(self) -> bool:
        """Empty the local prefix cache; return whether vLLM could. See Child._reset."""
        limit = time.monotonic() + self.reset_limit
        while not (await self._post("/reset_prefix_cache", {}))["success"]:
            if time.monotonic() > limit or self.held:
                self.held = True
                return False
            await asyncio.sleep(0.05)
        return True

    async def _post(
        self, path: str, order: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Any:
        """Return what the server answers. Refused if that is an error, Stalled if it is late."""
        try:
            async with self.session.post(self.url + path, json=order, headers=headers) as response:
                if response.status != 200:
                    raise Refused(f"{path}: {response.status} {(await response.text())[:200]}")
                if response.content_type != "application/json":
                    return await response.text()
                return await response.json()
        except TimeoutError:
            raise Stalled(f"{path} got no answer in {self.patience:g} s") from None

    def metrics(self) -> Iterable[Any]:
        """Return vLLM's metrics."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return get_metrics_snapshot()


def arguments(job: Job, port: int) -> list[str]:
    """Return the arguments of `vllm serve` for a job."""
    start = job.start
    asks = [ask for play in job.plays for ask in play.asks]
    adapters = {ask.lora for ask in asks if ask.lora is not None}
    shows_images = any(ask.image for ask in asks)
    tokenizer = Path(job.model)  # a model that takes images has one
    if not shows_images:
        tokenizer = tiny_tokenizer.make(tokenizer.parent / "tiny-tokenizer")
    found = {
        "host": "127.0.0.1",
        "port": port,
        "model": job.model,
        "tokenizer": tokenizer,
        "served-model-name": BASE,
        "dtype": dtype(),
        "seed": 0,
        "block-size": BLOCK_SIZE,
        "num-gpu-blocks-override": start["blocks"],
        "max-model-len": MAX_MODEL_LEN,
        "max-num-seqs": start["max_seqs"],
        "max-num-batched-tokens": start["budget"],
        **{name.replace("_", "-"): value for name, value in memory().items()},
        "shutdown-timeout": SHUTDOWN,
        "uvicorn-log-level": "warning",
        "generation-config": "vllm",
    }
    switches = {
        "enforce-eager": True,
        "enable-chunked-prefill": True,
        "enable-prefix-caching": start["prefix_caching"],
        "async-scheduling": start["scheduling"] == "async",
        "enable-lora": bool(adapters),
        "enable-prompt-embeds": any(ask.embeds for ask in asks),
    }
    if start["priority"]:
        found["scheduling-policy"] = "priority"
    if shows_images:
        found["limit-mm-per-prompt"] = json.dumps({"image": 1})
    if adapters:
        # One slot stays empty. In a batch with adapters, vLLM 0.32 computes requests without one
        # with the last slot's weights on a CPU (vllm-project/vllm#48421).
        found["max-loras"] = len({name_of(lora) for lora in adapters}) + 1
        found["max-lora-rank"] = tiny_lora.RANK
    if job.embeds:
        found["runner"] = "pooling"
    if job.transfer is not None:
        found["kv-transfer-config"] = json.dumps(job.transfer)
    words = [f"--{name}={value}" for name, value in found.items()]
    return words + [f"--{'' if on else 'no-'}{name}" for name, on in switches.items()]


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answer_of(ask: Ask, said: dict[str, Any]) -> Answer:
    """Return the result of a request from the server's JSON."""
    if ask.entrypoint == EMBEDDINGS:
        (one,) = said["data"]
        values = [round(value, 6) for value in one["embedding"]]
        return Answer(
            id=ask.id,
            prompt=ask.tokens,
            tokens=[],
            logprobs=[],
            seconds=[],
            gaps=[],
            why="stop",
            embedding=values,
        )
    (choice,) = said["choices"]
    tokens = list(choice["token_ids"])
    options = likely_chat(choice) if ask.entrypoint == "chat" else likely(choice)
    answer = Answer(
        id=ask.id,
        prompt=ask.tokens,
        tokens=tokens,
        logprobs=[],
        seconds=[],
        gaps=[],
        why=choice["finish_reason"],
    )
    for token, found in zip(tokens, options, strict=True):
        others = sorted(
            ((value, key) for key, value in found.items() if key != token), reverse=True
        )
        own = found[token]
        answer.logprobs.append(round(own, 6))
        answer.seconds.append(others[0][1] if others else -1)
        answer.gaps.append(round(own - others[0][0], 6) if others else 99.0)
    return answer


def likely(choice: dict[str, Any]) -> list[dict[int, float]]:
    """Return the log probabilities of the likeliest tokens, per token of a completion."""
    found = choice["logprobs"]["top_logprobs"]
    return [{token_of(word): value for word, value in one.items()} for one in found]


def likely_chat(choice: dict[str, Any]) -> list[dict[int, float]]:
    """Return the same of a chat completion, whose answer has another form."""
    return [
        {token_of(one["token"]): one["logprob"] for one in (entry, *entry["top_logprobs"])}
        for entry in choice["logprobs"]["content"]
    ]


def token_of(word: str) -> int:
    """Return the token id of `token_id:17`."""
    return int(word.removeprefix("token_id:"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Served))
