# SPDX-License-Identifier: Apache-2.0
"""Connectors that fail badly when a request is aborted, and work otherwise."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

from vllm.v1.request import RequestStatus

from kvconform.refimpl.connector import ReferenceConnector


class OnAbort(ReferenceConnector):
    """Calls `terrible` in request_finished of an aborted request."""

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if request.status == RequestStatus.FINISHED_ABORTED:
            self.terrible()
        return super().request_finished(request, block_ids)

    def terrible(self) -> None:
        raise NotImplementedError


class Locks(OnAbort):
    """Waits for ever (interruptibly), holding a lock that every constructor here wants."""

    lock = threading.Lock()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with self.lock:
            super().__init__(vllm_config, role, kv_cache_config)

    def terrible(self) -> None:
        self.lock.acquire()
        time.sleep(3600)


class Stuck(OnAbort):
    """Locks a C mutex twice: no signal gets it out of there."""

    def terrible(self) -> None:
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)


class Exits(OnAbort):
    """Ends the process, as a library of its own would after a fatal error."""

    def terrible(self) -> None:
        os._exit(7)


class Raises(OnAbort):
    """Raises: no danger to the harness, a failure like any other."""

    def terrible(self) -> None:
        raise RuntimeError("lost the connection to the store")
