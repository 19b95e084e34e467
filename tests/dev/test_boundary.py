# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark of the placeholder boundary, and of its bar."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvconform.dev import bench, boundary


@pytest.mark.parametrize(("share", "status"), [(0.99, 0), (1.0, 1), (2.5, 1)])
def test_a_boundary_above_the_bar_fails(
    share: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"64_step_us": 900.0, "64_share": 0.2, "1000_share": share}
    monkeypatch.setattr(boundary, "measure", lambda: found)
    assert bench.main(["--boundary"]) == status
    shown = capsys.readouterr()
    assert "1000_share" in shown.out
    assert ("1000_share is" in shown.err) == bool(status)


def test_the_boundary_is_what_is_real_and_what_is_final() -> None:
    cached = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[102, 20])
    output = SimpleNamespace(scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1, "b": 8})
    requests = {
        "a": SimpleNamespace(num_output_placeholders=1, num_tokens=102),
        "b": SimpleNamespace(num_output_placeholders=0, num_tokens=40),
    }
    assert boundary.boundaries(requests, output) == {"a": (101, 102), "b": (20, 28)}
