# SPDX-License-Identifier: Apache-2.0
"""Tests of workers on a Ray cluster: several nodes on this machine, one of which is killed.

They need the package ray, which the environment of the other tests lacks: they are skipped there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.execute import cluster as clusters
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice, executor
from kvconform.execute.work import Calls
from pieces import Built, Piece, do
from places import RIGS

pytest.importorskip("ray", reason="needs kvconform[ray]")
clusters.ray()
from ray.cluster_utils import Cluster  # noqa: E402

NODES = 3


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Return a cluster of this machine: a head node that runs no workers, and NODES with a CPU."""
    small = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    for _ in range(NODES):
        cluster.add_node(num_cpus=1, **small)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def work(**more: Any) -> Calls[Piece, object]:
    return Calls(do, folders=(str(RIGS),), fresh=True, **more)


def test_a_lost_node_costs_nothing_and_a_lost_process_its_piece(nodes: Cluster) -> None:
    """One test, because each connection starts new workers."""
    pieces: list[Piece] = [("sleep", 0.05 + number / 1000) for number in range(60)]
    pieces[7], pieces[40] = ("exit", 5), ("kill", 0)
    where = Choice("ray", nodes.address)
    found: list[object] = []
    with executor(where, work(), "test", None) as workers:
        assert workers.count == NODES
        for piece, result in workers.run(pieces):
            assert piece == pieces[len(found)]
            found.append(result)
            if len(found) == 15:
                nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
        assert workers.losses == 1 and workers.deaths == 2
        codes = [each.code for each in found if isinstance(each, Death)]
        assert codes == [5, -9]
        for number in (7, 40):
            found[number] = pieces[number][1]
        assert found == [number for _, number in pieces]
        with pytest.raises(UsageError, match="^no 3$"):
            list(workers.run([("refuse", 3)]))


def test_a_connector_that_ends_the_actor_is_no_lost_node(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.execute import ray_crew

    monkeypatch.setattr(ray_crew, "NODE_LIMIT", 1.0)
    with executor(Choice("ray", nodes.address), work(), "test", 1) as workers:
        [(_, first), (_, second)] = workers.run([("end-actor", 0), ("twice", 4)])
        assert isinstance(first, Death) and first.where == "Ray" and second == 8
        assert (workers.deaths, workers.losses) == (1, 0)


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


@pytest.mark.long
def test_exploration_finds_the_same_as_local_processes(tmp_path: Path) -> None:
    said = {}
    for where in ("processes", "ray"):
        folder = tmp_path / where
        folder.mkdir()
        connector = "kvconform.refimpl.defects.boundaries:LastToken"
        options = ["--extra-config", '{"store": "{tmp}/store"}', "--examples", "40", "-n", "3"]
        command = [sys.executable, "-m", "kvconform", "explore", connector, *options]
        done = subprocess.run(
            [*command, "--shrink", "10", "--out", "found", "--executor", where],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if "per second" not in line]
        files = {each.name: each.read_text() for each in (folder / "found").iterdir()}
        said[where] = (done.returncode, lines, files)
    assert said["ray"] == said["processes"] and said["ray"][0] == 1
