# SPDX-License-Identifier: Apache-2.0
"""What many short requests leave behind, with fewer of them: a connector that leaks is found, one that does not is not."""

from __future__ import annotations

from typing import Any

from kvconform.churn import churn
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.target import Target


class Hoarder(ReferenceConnector):
    """Keeps every request that was aborted."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.status.name == "FINISHED_ABORTED":
            self.__dict__.setdefault("_hoard", []).append(request)
        return super().request_finished(request, block_ids)


def test_nothing_is_left() -> None:
    found = churn(Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "memory:{tmp}"}), 300)
    assert found["error"] is None and found["failed"] == []
    assert found["end.baseline"] == found["run.quiesces"] == found["hook.no-raise"] == "PASS"


def test_a_leak_is_found() -> None:
    found = churn(Target(f"{__name__}:Hoarder", {"store": "memory:{tmp}"}), 300, engine="reference")
    assert found["error"] is None and found["end.baseline"] == "FAIL"
