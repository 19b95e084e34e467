# SPDX-License-Identifier: Apache-2.0
"""The reports of several ranks as one: vLLM's own aggregator joins them, and what comes out is set against what went in."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

from kvconform.trace import Trace


class Joined:
    """Joins one engine's reports step by step. `count`: what the connector's get_finished_count said, None for one of each rank.
    `aggregator` is the engine's own, where it has one already."""

    def __init__(self, trace: Trace, connector: Any, ranks: int, count: int | None, aggregator: Any = None) -> None:
        self._trace, self._expected = trace, count or ranks
        self._aggregator = aggregator or KVOutputAggregator.from_connector(connector, ranks)
        self._left: dict[tuple[str, str], int] = {}  # direction, request id -> reports that have not come yet
        self._failing: set[str] = set()

    def join(self, results: list[Any], rank: int = -1) -> Any:
        """A rank's result (the last one's), with the reports of all in it. Changes it; emits ranks.joined if there was anything to join."""
        due, failures, errors = self._due([getattr(result, "kv_connector_output", None) for result in results])
        result = self._aggregator.aggregate(results, range(len(results))[rank])
        joined = getattr(result, "kv_connector_output", None)
        ids = {way: set(getattr(joined, name, None) or ()) for way, name in _FIELDS.items()}
        found = {(way, req) for way in _FIELDS for req in ids[way]}
        failed, invalid = set(getattr(joined, "failed_recving", None) or ()), set(getattr(joined, "invalid_block_ids", None) or ())
        if found or due or failed or failures or invalid or errors:
            self._trace.emit(
                "ranks.joined", expected=self._expected, sent=sorted(ids["send"]), received=sorted(ids["recv"]),
                failed=sorted(failed), invalid=sorted(invalid), all_sent=_ids(due, "send"), all_received=_ids(due, "recv"),
                errors=sorted(errors), failures=sorted(failures),
                early=_names(found - due), late=_names(due - found),
            )  # fmt: skip
        return result

    def _due(self, reports: list[Any]) -> tuple[set[tuple[str, str]], set[str], set[int]]:
        """What must come of these reports: transfers that are finished now, failed loads among them, blocks with errors."""
        due: set[tuple[str, str]] = set()
        errors: set[int] = set()
        for report in filter(None, reports):
            self._expected = getattr(report, "expected_finished_count", 0) or self._expected
            for way, name in _FIELDS.items():
                for req in getattr(report, name) or ():
                    left = self._left.pop((way, req), self._expected) - 1
                    if left:
                        self._left[way, req] = left
                    else:
                        due.add((way, req))
            errors |= set(report.invalid_block_ids or ())
            self._failing |= set(getattr(report, "failed_recving", None) or ())
        failures = {req for req in self._failing if ("recv", req) in due}
        self._failing -= failures
        return due, failures, errors


_FIELDS = {"send": "finished_sending", "recv": "finished_recving"}


def _ids(transfers: set[tuple[str, str]], way: str) -> list[str]:
    return sorted(req for each, req in transfers if each == way)


def _names(transfers: set[tuple[str, str]]) -> list[str]:
    return [f"{way} {req}" for way, req in sorted(transfers)]
