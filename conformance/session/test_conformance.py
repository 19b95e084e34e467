# SPDX-License-Identifier: Apache-2.0
"""The items of `pytest --pyargs kvconform --connector ...`: one per run of a case."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.session.plugin import WORKER


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise by the selected variants."""
    worker = metafunc.config.pluginmanager.get_plugin(WORKER)
    if worker is None:
        raise pytest.UsageError(
            "name the connector: pytest --pyargs kvconform --connector package.module:Class"
        )
    variants = worker.ordered()
    metafunc.parametrize("variant", variants, ids=[variant.id for variant in variants])


def test_case(request: pytest.FixtureRequest, variant: Any) -> None:
    """Make one run of a case, and the runs it is compared with, and judge all requirements."""
    worker: Any = request.config.pluginmanager.get_plugin(WORKER)
    worker.run(request.node, variant)
