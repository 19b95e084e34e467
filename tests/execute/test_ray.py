# SPDX-License-Identifier: Apache-2.0
"""Tests of workers on a Ray cluster: two nodes on this machine, one of which is killed.

They are skipped where the package ray is missing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.execute import cluster as clusters
from kvconform.execute import ray_crew
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice, executor
from kvconform.execute.work import Calls
from kvconform.live.served import free_port
from pieces import Built, Piece, do
from places import RIGS
from warm_rig import wait_for

pytest.importorskip("ray", reason="needs kvconform[ray]")
clusters.ray()
from ray.cluster_utils import Cluster  # noqa: E402

SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
"""A node."""


def two_nodes(**head: int) -> Cluster:
    """Start a cluster of this machine: a head node and another one, with a CPU each."""
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, **head})
    cluster.add_node(**SMALL)
    cluster.wait_for_nodes()
    return cluster


@pytest.fixture(scope="module")
def clients_port() -> int:
    """Return the port at which the head node of `nodes` serves clients from outside."""
    return free_port()


@pytest.fixture(scope="module")
def nodes(clients_port: int) -> Iterator[Cluster]:
    """Return a cluster, which the tests of this module share."""
    cluster = two_nodes(ray_client_server_port=clients_port)
    yield cluster
    cluster.shutdown()


def work(**more: Any) -> Calls[Piece, object]:
    return Calls(do, folders=(str(RIGS),), fresh=True, **more)


def listens(port: int) -> bool:
    """Return whether a server listens at this port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10):
        return True
    return False


def test_a_lost_node_costs_nothing_and_a_lost_process_its_piece(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, because each connection starts new workers."""
    [lost] = nodes.worker_nodes
    [raylet] = (each.process.pid for each in lost.all_processes["raylet"])
    sleeps: list[Piece] = [("sleep", number / 1000) for number in range(50, 70)]

    def pieces() -> Iterator[Piece]:
        yield from (("end-actor", 0), ("exit", 5))
        tries = iter(range(2_000))
        while nodes.worker_nodes and next(tries, None) is not None:  # until that node is lost
            yield "node", 0.5  # long enough to be under way when the node is lost
        yield from (("kill", 0), *sleeps)

    found: list[tuple[Piece, object]] = []
    with (
        monkeypatch.context() as patched,
        executor(Choice("ray", nodes.address), work(), "test", None) as workers,
    ):
        assert workers.count == 2
        patched.setattr(ray_crew, "NODE_LIMIT", 0.0)  # until the actor is dead: its node lives
        for piece, result in workers.run(pieces()):
            patched.undo()
            found.append((piece, result))
            if result == raylet and nodes.worker_nodes:
                nodes.remove_node(lost, allow_graceful=False)
        assert (workers.losses, workers.deaths) == (1, 3), found
        by_deed = {deed: result for (deed, _), result in found}
        ended, exited, killed = (by_deed[deed] for deed in ("end-actor", "exit", "kill"))
        assert isinstance(ended, Death) and ended.where == "Ray"
        assert isinstance(exited, Death) and exited.code == 5
        assert isinstance(killed, Death) and killed.code == -9
        assert found[-len(sleeps) :] == [(piece, piece[1]) for piece in sleeps]
        with pytest.raises(UsageError, match="^no 3$"):
            list(workers.run([("refuse", 3)]))


def test_a_cluster_is_reached_from_a_machine_outside_of_it(
    nodes: Cluster, clients_port: int
) -> None:
    """By its address `ray://HOST:PORT`, whose server runs the pieces for its clients."""
    # A cluster starts this server, and does not wait for it.
    wait_for(lambda: listens(clients_port), 120)
    pieces: list[Piece] = [("twice", 1), ("exit", 5), ("twice", 4)]
    with executor(Choice("ray", f"ray://127.0.0.1:{clients_port}"), work(), "test", 1) as workers:
        assert workers.count == 1
        (_, first), (_, exited), (_, last) = workers.run(pieces)
    assert (first, last) == (2, 8)
    assert isinstance(exited, Death) and exited.code == 5


def test_nodes_with_other_versions_are_named_before_anything_runs(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvconform.compat.installed.vllm_version", lambda: "0.0.1")
    with (
        pytest.raises(EnvironmentProblem, match=r"^node .* has vLLM ") as raised,
        executor(Choice("ray", nodes.address), work(), "test", 1),
    ):
        pass
    assert "this machine 0.0.1" in raised.value.message and "\n" not in raised.value.message


def test_a_worker_that_cannot_be_built_ends_the_run(nodes: Cluster) -> None:
    built = Built("no room", folders=(str(RIGS),))
    with (
        pytest.raises(EnvironmentProblem, match="^no room$"),
        executor(Choice("ray", nodes.address), built, "test", 1) as workers,
    ):
        list(workers.run([("twice", 1)]))


def test_a_cluster_that_is_not_there_is_a_sentence() -> None:
    with (
        pytest.raises(UsageError, match="^the Ray cluster 127.0.0.1:9 cannot be used: ") as raised,
        executor(Choice("ray", "127.0.0.1:9"), work(), "test", 1),
    ):
        pass
    assert "\n" not in raised.value.message


def explored(folder: Path, where: str, **environment: str) -> subprocess.Popen[str]:
    """Begin a campaign on a connector with a bug, which writes to `folder`."""
    connector = "kvconform.refimpl.defects.boundaries:LastToken"
    options = ["--extra-config", '{"store": "{tmp}/store"}', "--examples", "40", "-n", "2"]
    options += ["--shrink", "10", "--out", "found"]
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "kvconform", "explore", connector, *options, "--executor", where],
        cwd=folder,
        # No line breaks that depend on a time.
        env={**os.environ, "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def result_of(process: subprocess.Popen[str], folder: Path) -> tuple[int, list[str], Any]:
    """Return the exit code, what was said but for the pace, and the files of the failures."""
    said, _ = process.communicate(timeout=1800)
    lines = [line for line in said.splitlines() if line.strip() and "per second" not in line]
    files = {each.name: each.read_text() for each in (folder / "found").iterdir()}
    return process.returncode, lines, files


@pytest.mark.long
def test_exploration_finds_the_same_as_local_processes_when_a_node_is_lost(tmp_path: Path) -> None:
    """The cluster is the one that RAY_ADDRESS names, with a worker on each of its nodes."""
    here, there = tmp_path / "here", tmp_path / "there"
    expected = result_of(explored(here, "processes"), here)
    cluster = two_nodes()
    try:
        process = explored(there, "ray", RAY_ADDRESS=cluster.address)
        while process.poll() is None and not (there / "found").is_dir():
            time.sleep(0.2)
        assert process.poll() is None, "it has ended without a failure"
        [lost] = cluster.worker_nodes
        cluster.remove_node(lost, allow_graceful=False)
        found = result_of(process, there)
    finally:
        cluster.shutdown()
    # In between, Ray says that the node is gone.
    said = [line for line in found[1] if line in expected[1]]
    assert (found[0], said, found[2]) == expected and expected[0] == 1
