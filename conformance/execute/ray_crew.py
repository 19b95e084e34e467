# SPDX-License-Identifier: Apache-2.0
"""The crew on a Ray cluster: each worker is an actor that keeps a process on its node.

Results are small and are sent back with the call, so they do not go through the object store.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvconform.errors import EnvironmentProblem, one_line
from kvconform.execute.actor import Keeper, Order
from kvconform.execute.answers import SHOWN, Answer, Death, Loss, unpacked
from kvconform.execute.cluster import Cluster
from kvconform.execute.crew import STOP_LIMIT, Message
from kvconform.execute.work import Work

NODE_LIMIT = 60.0
"""Seconds after the death of an actor in which its node may turn out to be dead, too.

Ray takes a node for dead after five unanswered questions, three seconds apart on an idle machine.
"""
OUT_OF_MEMORY = "NODE_OUT_OF_MEMORY"
"""In Ray's error about an actor that it ended because its node was short of memory."""


@dataclass
class _Actor:
    """`node`: id of its node, once it has started."""

    handle: Any
    node: str | None = None
    ready: bool = False


class OnRay:
    """Workers on a Ray cluster, a CPU each; on a GPU a whole one, if the work needs it."""

    depth = 2

    def __init__(
        self, work: Work[Any, Any], kind: str, address: str | None, count: int | None
    ) -> None:
        self._kind = kind
        self._cluster = Cluster(address, work.folders, work.packages, count)
        self._ray = self._cluster.ray
        self._gpus = work.gpus
        self._order = Order(
            pickle.dumps(work),
            work.fresh,
            tuple(work.folders),
            self._cluster.here,
            STOP_LIMIT,
        )
        self._actors: dict[str, _Actor] = {}
        self._calls: dict[Any, str] = {}
        self._remote = self._ray.remote(max_restarts=0, max_task_retries=0)(Keeper)

    def size(self) -> int:
        """Return the number of CPUs of the cluster."""
        return max(1, self._cluster.cpus())

    def start(self, name: str) -> None:
        """Create an actor; it starts when its node has a CPU for it."""
        title = f"kvconform {self._kind} {name}"
        handle = self._remote.options(name=title, num_cpus=1, num_gpus=self._gpus).remote(
            self._order, title
        )
        self._actors[name] = _Actor(handle)
        self._calls[handle.start.remote()] = name

    def give(self, name: str, piece: object) -> None:
        """Pickle a piece and send it."""
        self._calls[self._actors[name].handle.run.remote(pickle.dumps(piece))] = name

    def wait(self, seconds: float | None) -> list[tuple[str, Message]]:
        """Return the messages of workers; wait for one, but at most `seconds`."""
        calls = list(self._calls)
        ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=seconds)
        found: list[tuple[str, Message]] = []
        for call in ready:
            name = self._calls.pop(call, None)
            if name is not None:  # None: its worker has just turned out to be gone
                found.append((name, self._message(name, call)))
        return found

    def _message(self, name: str, call: Any) -> Message:
        errors = self._ray.exceptions
        actor = self._actors[name]
        try:
            answer = self._ray.get(call)
        except errors.RayTaskError as error:
            raise EnvironmentProblem(f"a worker on Ray failed: {one_line(error)}") from error
        except errors.RayError as error:
            return self._gone(name, error)
        if isinstance(answer, tuple):
            actor.node, answer = answer
        if isinstance(answer, Death):
            return answer
        found = unpacked(answer)
        actor.ready = actor.ready or found.kind == "ready"
        return found

    def survives(self, name: str) -> bool:
        """Return whether the actor lives: it has started another process."""
        return name in self._actors

    def _gone(self, name: str, error: Exception) -> Message:
        """Remove an actor that cannot be reached; return what became of it."""
        errors = self._ray.exceptions
        actor = self._actors.pop(name)
        self._calls = {call: each for call, each in self._calls.items() if each != name}
        self._ray.kill(actor.handle)  # it may be out of reach only
        if isinstance(error, errors.RuntimeEnvSetupError | errors.ActorUnschedulableError):
            return Answer("refused", EnvironmentProblem(f"Ray: {one_line(error)}"))
        if OUT_OF_MEMORY in str(error):
            return Loss("Ray ended the worker, because its node was short of memory")
        if not isinstance(error, errors.ActorDiedError) or self._is_dead(actor.node):
            return Loss("its node is gone")
        return Death(None, printed="\n".join(str(error).splitlines()[-SHOWN:]), where="Ray")

    def _is_dead(self, node: str | None) -> bool:
        """Return whether a node is dead; wait NODE_LIMIT seconds for news of that."""
        end = time.monotonic() + NODE_LIMIT
        while node in self._cluster.nodes():
            if time.monotonic() > end:
                return False
            time.sleep(0.5)
        return True

    def stop(self, busy: Collection[str]) -> None:
        """End all actors; those that are idle end their processes first. Ends the connection."""
        idle = [each for name, each in self._actors.items() if each.ready and name not in busy]
        calls = [actor.handle.stop.remote() for actor in idle]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=STOP_LIMIT)
        for actor in self._actors.values():
            self._ray.kill(actor.handle)
        self._actors.clear()
        self._calls.clear()
        self._cluster.close()
