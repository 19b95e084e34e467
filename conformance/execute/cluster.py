# SPDX-License-Identifier: Apache-2.0
"""The connection to a Ray cluster: sources that travel, and the check of its nodes.

Ray is imported here only, and only when an executor of it is chosen.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kvconform.errors import EnvironmentProblem, UsageError, one_line
from kvconform.execute.luggage import pack
from kvconform.execute.nodes import Node, difference, look
from kvconform.files import scratch_root

ADDRESS = "RAY_ADDRESS"
"""Ray's environment variable: the cluster, if `--executor ray` names none."""
STARTED_HERE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Settings of a cluster that is started for an executor.

Nothing is reported to Ray's makers, no devices are hidden, and workers have this process's priority
instead of the lowest.
"""
REACH_LIMIT = 10.0
"""Seconds that a connection to the cluster may take."""
LOCAL = "local"
"""What Ray calls a new cluster of this machine."""
CURRENT = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
"""Ray's file with the address of the cluster of this machine."""
LOOK_LIMIT = 300.0
"""Seconds that a node has to unpack what travels, and to answer which versions it has."""
TRIES = 3
"""How often a node is asked: nodes that share a machine and its files may begin before all of what
travels is unpacked.
"""
VARIABLES = ("VLLM_", "KVCONFORM_", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")
"""Beginnings of environment variables that travel."""


def ray() -> ModuleType:
    """Return the module `ray`. UsageError if it is not installed."""
    for name, value in STARTED_HERE.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UsageError(
            "--executor ray needs the package ray: pip install 'kvconform[ray]'"
        ) from None
    return ray


class Cluster:
    """A connection to a Ray cluster; close it. There is one per process.

    - `address`: as for ray.init; None: the variable RAY_ADDRESS, else a cluster of this machine,
      which is started if there is none.
    - `count`: of workers: as many CPUs has a cluster that is started here.
    - `folders`, `packages`: import folders and packages that travel, as for `luggage.pack`.

    UsageError if Ray is missing or the cluster cannot be reached; EnvironmentProblem for a node
    with other versions than this machine.
    """

    def __init__(
        self,
        address: str | None,
        folders: Sequence[str],
        packages: Sequence[str],
        count: int | None = None,
    ) -> None:
        self.ray = ray()
        if self.ray.is_initialized():
            raise UsageError("this process is connected to a Ray cluster already")
        with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as folder:
            file = Path(folder) / "kvconform.zip"
            self.bytes = pack(file, folders, packages)
            runtime_env = {"working_dir": str(file), "env_vars": _variables()}
            self._connect(address, runtime_env, count)
        try:
            self.here = look()
            self._check()
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None, runtime_env: dict[str, Any], count: int | None) -> None:
        os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")  # in a job of Ray's
        try:
            found = _reachable(address)
            with _signals_kept():
                self.ray.init(
                    found,
                    num_cpus=count if found == LOCAL else None,
                    runtime_env=runtime_env,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except Exception as error:  # of the system, Ray or gRPC
            where = address or os.environ.get(ADDRESS) or "of this machine"
            raise UsageError(
                f"the Ray cluster {where} cannot be used: {one_line(error).rstrip('.')}"
            ) from error

    def close(self) -> None:
        """End the connection, and the cluster if it was started for it."""
        with _signals_kept():
            self.ray.shutdown()

    def cpus(self) -> int:
        """Return the number of CPUs of all nodes."""
        return int(self.ray.cluster_resources().get("CPU", 0))

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the living nodes by their id, as Ray describes them."""
        return {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}

    def _check(self) -> None:
        """Compare the versions of all nodes that have a CPU with those of this machine."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = self.ray.remote(num_cpus=0, max_retries=0)(look)
        asked: dict[str, tuple[str, Any, Any]] = {}
        for identifier, node in self.nodes().items():
            if node["Resources"].get("CPU", 0) < 1:
                continue  # no worker runs there
            there = NodeAffinitySchedulingStrategy(identifier, soft=False)
            call = task.options(name="kvconform versions", scheduling_strategy=there)
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            asked[identifier] = name, call, call.remote()
        found = {each: self._said(*question) for each, question in asked.items()}
        for each, said in found.items():
            differs = said and difference(self.here, asked[each][0], said)
            if differs:
                raise EnvironmentProblem(differs)
        if not any(found.values()):
            raise EnvironmentProblem("the Ray cluster has no node with a CPU")

    def _said(self, name: str, call: Any, answer: Any, tries: int = TRIES) -> Node | None:
        """Return what a node has; None for a node that has just died.

        `call`: what `answer` is the answer to. It is repeated if it raises.
        """
        errors = self.ray.exceptions
        try:
            found: Node = self.ray.get(answer, timeout=LOOK_LIMIT)
        except (errors.TaskUnschedulableError, errors.NodeDiedError):
            return None
        except Exception as error:  # of Ray, or of the import on the node
            if isinstance(error, errors.RayTaskError) and tries > 1:
                time.sleep(1)
                return self._said(name, call, call.remote(), tries - 1)
            raise EnvironmentProblem(
                f"node {name} of the Ray cluster cannot run kvconform: {one_line(error)}"
            ) from error
        return found


def _reachable(address: str | None) -> str:
    """Return the address to give to Ray, after a connection to it: Ray itself tries for minutes.

    OSError if a cluster that is named cannot be reached. A cluster of this machine that has ended
    without removing its file is passed over; LOCAL stands for a new one.
    """
    named = address or os.environ.get(ADDRESS)
    if named:
        _reach(named)
        return named
    try:
        current = CURRENT.read_text(encoding="utf-8").strip()
        _reach(current)
    except OSError:
        return LOCAL
    return current or LOCAL


def _reach(address: str) -> None:
    """Open a connection and close it. Addresses without a port, such as `auto`, are not tried."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_LIMIT).close()


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
