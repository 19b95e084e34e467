# SPDX-License-Identifier: Apache-2.0
"""Adapter `mooncake-store-mock`: a Mooncake store in files, for MooncakeStoreConnector.

The package of Mooncake, its master and its network are replaced; the connector is vLLM's own, with
its threads and its lookup channel. An object is never overwritten, and a batch has one answer per
key, as of Mooncake (tests/adapters compares the two where Mooncake is installed). Memory must be
registered, as for RDMA. A put that finds no room fails with -200; nothing is evicted.

The objects of a run lie in the folder that the option `cache_prefix` names, which several stores
and processes share. The option `kvconform_capacity` is the room for their bytes. The option
`kvconform_put_delay` is how many seconds a put takes before it reads memory. The
option `kvconform_refusals` is how many puts of each object fail first, with -800, as transfers do
that are interrupted. With `kvconform_await_puts` a step ends when its puts have, so that what is
stored does not depend on the thread's time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvconform.adapters.registry import Adapter
from kvconform.files import replace, sizes_below

NOT_FOUND = -704
NO_ROOM = -200
TRANSFER_FAILED = -800
INVALID = -600
ROOM = 64 << 20
"""Bytes that a folder has room for unless `kvconform_capacity` says otherwise."""
_putting = threading.Lock()
_settings = threading.local()
"""`folder`, `room`, `delay` and `refusals` of the worker half that this thread constructs."""


class ReplicateConfig:
    """How an object is replicated. There is one replica of each."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.preferred_segment = ""
        self.group_ids: list[str] = []


class MooncakeDistributedStore:
    """Objects in files, read from and written to registered memory."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._room = ROOM
        self._delay = 0.0
        self._refusals = 0
        self._refused: Counter[str] = Counter()
        self._registered: dict[int, int] = {}

    def setup(self, *args: object, **kwargs: object) -> int:
        """Open the store of the worker half that is being constructed; return 0."""
        self._folder = Path(_settings.folder, "mooncake")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._room = _settings.room
        self._delay = _settings.delay
        self._refusals = _settings.refusals
        return 0

    def close(self) -> int:
        """Forget the registered memory; return 0. The objects stay."""
        self._folder = None
        self._registered.clear()
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        """Allow `size` bytes from an address to be read and written; return 0."""
        self._registered[address] = size
        return 0

    def batch_is_exist(self, keys: Iterable[str]) -> list[int]:
        """Return 1 for each object that exists, else 0; -1 if the store is closed."""
        if self._folder is None:
            return [-1 for _ in keys]
        return [int(self._file(key).exists()) for key in keys]

    def batch_put_from_multi_buffers(
        self,
        keys: Iterable[str],
        addresses: Iterable[Sequence[int]],
        sizes: Iterable[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store memory as objects; return 0 or an error's number for each."""
        if self._delay:
            time.sleep(self._delay)
        return [self._put(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def batch_get_into_multi_buffers(
        self,
        keys: Iterable[str],
        addresses: Iterable[Sequence[int]],
        sizes: Iterable[Sequence[int]],
    ) -> list[int]:
        """Read objects into memory; return the bytes or an error's number for each."""
        return [self._get(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def remove_all(self, force: bool = False) -> int:
        """Remove all objects of the folder; return their number."""
        if self._folder is None:
            return INVALID
        files = list(self._folder.iterdir())
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def _file(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _put(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        if self._folder is None or not self._is_registered(addresses, sizes):
            return INVALID
        file = self._file(key)
        pieces = zip(addresses, sizes, strict=True)
        with _putting:
            if file.exists():
                return 0
            if self._refused[key] < self._refusals:
                self._refused[key] += 1
                return TRANSFER_FAILED
            if sum(sizes_below(self._folder)) + sum(sizes) > self._room:
                return NO_ROOM
            try:
                replace(file, b"".join(ctypes.string_at(*piece) for piece in pieces))
            except OSError:  # the disk is full, or the run is over and its folder is gone
                return NO_ROOM
        return 0

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        if self._folder is None or not self._is_registered(addresses, sizes):
            return INVALID
        try:
            data = self._file(key).read_bytes()
        except FileNotFoundError:
            return NOT_FOUND
        if len(data) > sum(sizes):
            return INVALID
        start = 0
        for address, size in zip(addresses, sizes, strict=True):
            piece = data[start : start + size]
            ctypes.memmove(address, piece, len(piece))
            start += size
        return len(data)

    def _is_registered(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        """Return whether all pieces of memory lie in registered memory."""
        return all(
            any(
                begin <= address and address + size <= begin + length
                for begin, length in self._registered.items()
            )
            for address, size in zip(addresses, sizes, strict=True)
        )


def install() -> None:
    """Put the store in the place of Mooncake's package, and give it its settings."""
    package, module = ModuleType("mooncake"), ModuleType("mooncake.store")
    package.__path__ = []
    for each in (package, module):
        each.__spec__ = importlib.machinery.ModuleSpec(each.__name__, None)
        sys.modules[each.__name__] = each
    package.store = module  # type: ignore[attr-defined]
    module.MooncakeDistributedStore = MooncakeDistributedStore  # type: ignore[attr-defined]
    module.ReplicateConfig = ReplicateConfig  # type: ignore[attr-defined]

    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker

    half, config = worker.MooncakeStoreWorker, worker.MooncakeStoreConfig
    construct = half.__init__

    def constructed(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "cache_prefix" not in options:
            raise ValueError('mooncake-store-mock needs the option cache_prefix = "{tmp}"')
        _settings.folder = options["cache_prefix"]
        _settings.room = options.get("kvconform_capacity", ROOM)
        _settings.delay = options.get("kvconform_put_delay", 0.0)
        _settings.refusals = options.get("kvconform_refusals", 0)
        self.kvconform_await_puts = options.get("kvconform_await_puts", False)
        construct(self, vllm_config, *args, **kwargs)

    wait_for_save = half.wait_for_save

    def waited(self: Any, *args: Any, **kwargs: Any) -> None:
        wait_for_save(self, *args, **kwargs)
        if self.kvconform_await_puts and self.kv_send_thread is not None:
            self.kv_send_thread.request_queue.join()

    half.__init__ = constructed
    half.wait_for_save = waited
    config.load_from_config = staticmethod(
        lambda: config("P2PHANDSHAKE", "127.0.0.1:0", "tcp", "", global_segment_size=ROOM)
    )


ADAPTER = Adapter(
    title="Files for a Mooncake store",
    text="Keeps the objects of MooncakeStoreConnector in files; Mooncake is not needed.",
    package="vllm",
    install=install,
)
