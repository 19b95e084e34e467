# SPDX-License-Identifier: Apache-2.0
"""Order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put end-to-end tests first.

    With several processes, a long test that starts late would be waited for.
    """
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
