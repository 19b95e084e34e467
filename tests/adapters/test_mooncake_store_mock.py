# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter `mooncake-store-mock`.

Its store answers as Mooncake's does, and vLLM's MooncakeStoreConnector works over it. The tests
that ask Mooncake itself need the package mooncake-transfer-engine-non-cuda==0.3.13.post1:
`nox -s tests -- --install PACKAGE tests/adapters`.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker",
    reason="this vLLM has no MooncakeStoreConnector",
)

import program_rig
from kvconform.adapters import mooncake_store_mock as mock
from kvconform.live.served import free_port

SETTINGS = Path(__file__).parents[1] / "rigs" / "mooncake_store_mock.toml"


class Memory:
    """Bytes at an address."""

    def __init__(self, data: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(data, len(data))
        self.address = ctypes.addressof(self._bytes)

    def __bytes__(self) -> bytes:
        return self._bytes.raw


def in_files(
    folder: Path, room: int = mock.ROOM, delay: float = 0.0, refusals: int = 0
) -> mock.MooncakeDistributedStore:
    store = mock.MooncakeDistributedStore()
    settings = mock._settings
    settings.folder, settings.room, settings.delay = str(folder), room, delay
    settings.refusals = refusals
    assert store.setup() == 0
    return store


def mooncakes(port: int, room: int = 64 << 20) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master = f"127.0.0.1:{port}"
    end = time.monotonic() + 30
    while store.setup("127.0.0.1", "P2PHANDSHAKE", room, 16 << 20, "tcp", "", master):
        assert time.monotonic() < end
        time.sleep(0.1)
    return store


@pytest.fixture(params=["files", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "files":
        yield in_files(tmp_path)
        return
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
    port = free_port()
    program = Path(sys.executable).parent / "mooncake_master"
    with subprocess.Popen([program, "-rpc_port", str(port), "-metrics_port", "0"]) as master:
        try:
            opened = mooncakes(port)
            yield opened
            opened.close()
        finally:
            master.kill()


def test_what_is_stored_is_read_in_pieces(store: Any) -> None:
    one, other = Memory(b"a" * 30 + b"b" * 30), Memory(bytes(60))
    for memory in (one, other):
        assert store.register_buffer(memory.address, 60) == 0
    assert store.batch_is_exist(["k", "l"]) == [0, 0]
    parts = [[one.address, one.address + 40], [one.address + 10]]
    assert store.batch_put_from_multi_buffers(["k", "l"], parts, [[10, 20], [5]]) == [0, 0]
    assert store.batch_is_exist(["l", "m", "k"]) == [1, 0, 1]
    into = [[other.address, other.address + 20]]
    assert store.batch_get_into_multi_buffers(["k"], into, [[15, 15]]) == [30]
    assert bytes(other) == b"a" * 10 + b"b" * 5 + bytes(5) + b"b" * 15 + bytes(25)


def test_an_object_is_never_overwritten(store: Any) -> None:
    memory = Memory(b"1" * 8 + b"2" * 8 + bytes(8))
    store.register_buffer(memory.address, 24)
    for start in (0, 8):
        put = store.batch_put_from_multi_buffers(["k"], [[memory.address + start]], [[8]])
        assert put == [0]
    store.batch_get_into_multi_buffers(["k"], [[memory.address + 16]], [[8]])
    assert bytes(memory)[16:] == b"1" * 8


def test_an_object_that_is_missing_is_an_error_of_its_own(store: Any) -> None:
    memory = Memory(b"1" * 8 + bytes(8))
    store.register_buffer(memory.address, 16)
    store.batch_put_from_multi_buffers(["k"], [[memory.address]], [[8]])
    places = [[memory.address + 8]] * 2
    missing, found = store.batch_get_into_multi_buffers(["x", "k"], places, [[8], [8]])
    assert (missing, found) == (mock.NOT_FOUND, 8)


def test_a_reset_removes_everything(store: Any) -> None:
    memory = Memory(b"1" * 8)
    store.register_buffer(memory.address, 8)
    store.batch_put_from_multi_buffers(["k", "l"], [[memory.address]] * 2, [[8]] * 2)
    assert store.remove_all(force=True) == 2
    assert store.batch_is_exist(["k", "l"]) == [0, 0]


def test_memory_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    """As over RDMA. Over TCP, Mooncake reads and writes any memory."""
    store = in_files(tmp_path)
    memory = Memory(bytes(16))
    store.register_buffer(memory.address, 8)
    (put,) = store.batch_put_from_multi_buffers(["k"], [[memory.address + 4]], [[8]])
    assert put < 0 and store.batch_is_exist(["k"]) == [0]


def test_a_batch_that_finds_no_room_fails_in_part(tmp_path: Path) -> None:
    store = in_files(tmp_path, room=20)
    memory = Memory(bytes(16))
    store.register_buffer(memory.address, 16)
    put = store.batch_put_from_multi_buffers(["a", "b"], [[memory.address]] * 2, [[16]] * 2)
    assert put == [0, mock.NO_ROOM] and store.batch_is_exist(["a", "b"]) == [1, 0]


def test_a_slow_put_reads_memory_late(tmp_path: Path) -> None:
    store = in_files(tmp_path, delay=0.5)
    memory = Memory(b"1" * 8 + bytes(8))
    store.register_buffer(memory.address, 16)
    put = threading.Thread(
        target=store.batch_put_from_multi_buffers, args=(["k"], [[memory.address]], [[8]])
    )
    began = time.monotonic()
    put.start()
    ctypes.memset(memory.address, ord("2"), 8)
    changed = time.monotonic()
    put.join()
    assert time.monotonic() - began > 0.4
    store.batch_get_into_multi_buffers(["k"], [[memory.address + 8]], [[8]])
    assert bytes(memory)[8:] == b"2" * 8 or changed - began > 0.4


def test_puts_of_an_object_are_refused_before_one_is_taken(tmp_path: Path) -> None:
    store, memory = in_files(tmp_path, refusals=2), Memory(b"abcd")
    store.register_buffer(memory.address, 4)

    def put(key: str) -> list[int]:
        return store.batch_put_from_multi_buffers([key], [[memory.address]], [[4]])

    assert [put("one"), put("one"), put("two"), put("one")] == [
        [mock.TRANSFER_FAILED],
        [mock.TRANSFER_FAILED],
        [mock.TRANSFER_FAILED],
        [0],
    ]
    assert store.batch_is_exist(["one", "two"]) == [1, 0]


def test_a_folder_is_common_to_its_stores_and_outlives_them(tmp_path: Path) -> None:
    memory = Memory(bytes(16))
    first = in_files(tmp_path)
    first.register_buffer(memory.address, 16)
    first.batch_put_from_multi_buffers(["a"], [[memory.address]], [[16]])
    assert in_files(tmp_path).batch_is_exist(["a"]) == [1]
    first.close()
    assert first.batch_is_exist(["a"]) == [-1]
    assert in_files(tmp_path).batch_is_exist(["a"]) == [1]
    assert in_files(tmp_path / "another").batch_is_exist(["a"]) == [0]


OVER_IT = """
import contextlib, json, os, sys
from pathlib import Path
from kvconform.adapters import registry
from kvconform.config.settings import load
from kvconform.contract.capabilities import complete
from kvconform.contract.loader import load_spec
from kvconform.process.servers import Servers
from kvconform.run import smoke
from kvconform.run.case import run_and_judge

# Finding them out takes many runs.
known = complete({"store": True, "saves": "prompt", "chunk_tokens": 4})
declared = {name: value for name, value in known.items() if value is not None}
settings = load({"capabilities": declared}, file={SETTINGS!r})
spec, here, found = load_spec(), Path.cwd(), {}
with Servers(settings, here / "servers", here) as servers:
    settings = servers.settle(settings)
    os.environ.update(settings.env)
    registry.install(settings.adapters)
    target = smoke.target_of(settings)
    for name in ("chunked.interleaved", "lifecycle.damage-garbage"):
        variant = spec.cases[name].variants(["vllm"])[0]
        report = run_and_judge(variant, target, spec, seed=0, tmp=here / name)
        assert report.harness_error is None, report.harness_error
        bad = [row.requirement for row in report.rows if row.verdict == "FAIL" and row.gating]
        found[name] = bad, {row.requirement: row.exercised for row in report.rows}
(here / "found").write_text(json.dumps(found))
"""
"""In a process of its own: the stand-in takes the place of the package."""


def test_vllms_connector_stores_and_loads_over_it(tmp_path: Path) -> None:
    text = OVER_IT.replace("{SETTINGS!r}", repr(str(SETTINGS)))
    status, said = program_rig.forked_python(text, tmp_path)
    assert status == 0, said
    for bad, exercised in json.loads((tmp_path / "found").read_text()).values():
        assert bad == [] and exercised["load.content"] > 0
