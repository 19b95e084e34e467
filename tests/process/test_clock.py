# SPDX-License-Identifier: Apache-2.0
"""Tests of the clock that can be set forward."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType
from typing import Any

import pytest

from kvconform.process import clock

CLOCKS = ("monotonic", "perf_counter", "time")
NAMES = (*CLOCKS, *(f"{name}_ns" for name in CLOCKS))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A module that imported all clocks by name before the clock was first set forward."""
    for name in CLOCKS:
        monkeypatch.setattr(time, name, clock._REAL[name])
        monkeypatch.setattr(time, f"{name}_ns", clock._REAL_NS[name])
    monkeypatch.setattr(clock._Gained, "installed", False)
    monkeypatch.setattr(clock._Gained, "monotonic", 0.0)

    def make(name: str) -> ModuleType:
        made = ModuleType(name)
        for each in NAMES:
            setattr(made, f"my_{each}", getattr(time, each))
        monkeypatch.setitem(sys.modules, name, made)
        return made

    with clock.of_run():
        yield make


@pytest.mark.parametrize("name", NAMES)
def test_a_clock_goes_forward_by_either_name(name: str, module: Callable[[str], Any]) -> None:
    connector = module("some_connector.worker")
    unit = 1e9 if name.endswith("_ns") else 1
    imported, own = getattr(connector, f"my_{name}")() / unit, getattr(time, name)() / unit
    for _ in range(2):  # the second time, nothing is replaced
        clock.advance(500)
    assert 999 < getattr(connector, f"my_{name}")() / unit - imported < 1100
    assert 999 < getattr(time, name)() / unit - own < 1100


@pytest.mark.parametrize("name", ["_pytest.some", "kvconform.some", "asyncio.some", "torch.some"])
def test_what_measures_real_time_keeps_it(name: str, module: Callable[[str], Any]) -> None:
    tool = module(name)
    before = tool.my_monotonic()
    clock.advance(500)
    assert tool.my_monotonic() - before < 100
    assert threading._time is clock.monotonic  # type: ignore[attr-defined]


def test_an_imported_wall_clock_is_right_again_after_a_run(module: Callable[[str], Any]) -> None:
    connector = module("some_connector")
    with clock.of_run():
        clock.advance(500)
        assert connector.my_time() - clock._REAL["time"]() > 499
    assert abs(connector.my_time() - clock._REAL["time"]()) < 60


def test_a_lazy_module_is_not_loaded(
    module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_spec("this")
    assert spec is not None and spec.loader is not None
    spec.loader = LazyLoader(spec.loader)
    lazy = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    spec.loader.exec_module(lazy)
    clock.advance(1)
    assert "d" not in object.__getattribute__(lazy, "__dict__")
