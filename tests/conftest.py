# SPDX-License-Identifier: Apache-2.0
"""Order of the tests, and what one leaves for the next."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from warm_rig import Warm


# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")
gc.disable()  # the imports of the tests create many objects, hardly any of which are garbage


def pytest_collection_finish() -> None:
    """Exclude what the tests import from garbage collection."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules report what is left at exit as leaks


def pytest_sessionfinish() -> None:
    """Spare what is there the garbage collection with which pytest ends."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put end-to-end tests first.

    With several processes, a long test that starts late would be waited for.
    """
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """A server that has vLLM imported, for tests of the whole program."""
    import warm_rig

    with warm_rig.warm() as server:
        yield server


@pytest.fixture(autouse=True)
def _situations_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the situations of a specification that a test loads from the tests after it."""
    situation = sys.modules.get("kvconform.contract.situation")
    if situation is not None:
        monkeypatch.setattr(situation._Known, "entries", situation._Known.entries)


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests() -> None:
    """Take the threads that earlier tests have left for those before any connector.

    Otherwise every run that forks would begin in a fresh interpreter, which imports vLLM.
    """
    alive = sys.modules.get("kvconform.process.alive")
    if alive is not None:
        alive.begin()
