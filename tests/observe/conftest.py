# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of what is observed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvconform.contract.trace import Trace
from kvconform.observe.probe import Probe


@pytest.fixture
def trace() -> Iterator[Trace]:
    """A trace that the active probe writes."""
    made, before = Trace(), Probe.active
    Probe.active = Probe(made)
    yield made
    Probe.active = before
