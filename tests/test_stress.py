# SPDX-License-Identifier: Apache-2.0
"""A thousand concurrent requests: none lost, no byte wrong, no block leaked."""

from __future__ import annotations

import pytest

from kvconform.bench_stress import stress

pytestmark = pytest.mark.e2e  # three quarters of a minute


def test_a_thousand_concurrent_requests() -> None:
    found = stress(requests=1000, prompt=200, output=64)
    assert found["tokens"] == 64_000
    assert found["harness_error"] is None
    assert {name: found[name] for name in ("lost", "unfinished", "wrong_bytes", "corrupt_tokens", "leaked_blocks")} == {
        "lost": 0,
        "unfinished": [],
        "wrong_bytes": 0,
        "corrupt_tokens": 0,
        "leaked_blocks": 0,
    }
