# SPDX-License-Identifier: Apache-2.0
"""Connectors that a new interpreter must find under the same name as the current one."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any

from kvconform.refimpl.connector import ReferenceConnector


class Polls(ReferenceConnector):
    """A connector whose halves each greet a thread shared by the process and wait for its answer.

    The first half that finds no thread starts it.
    """

    asked: queue.Queue[threading.Event | None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if Polls.asked is None:
            Polls.asked = queue.Queue()
            threading.Thread(
                target=_answers, args=(Polls.asked,), name="polls", daemon=True
            ).start()
        answered = threading.Event()
        Polls.asked.put(answered)
        if not answered.wait(5):
            raise TimeoutError("nobody answers")


def _answers(asked: queue.Queue[threading.Event | None]) -> None:
    while (waiting := asked.get()) is not None:
        waiting.set()


class HangsAtFirst(ReferenceConnector):
    """Its first process never gets through a hook."""

    def wait_for_save(self) -> None:
        threading.Event().wait()


class HoldsOn(HangsAtFirst):
    """Not even the watchdog's exception gets through to it."""

    def wait_for_save(self) -> None:
        while True:
            with suppress(BaseException):
                threading.Event().wait()
