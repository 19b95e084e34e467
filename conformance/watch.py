# SPDX-License-Identifier: Apache-2.0
"""Watches what the engine tells a connector about its requests, and that the connector leaves the arguments of its hooks alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconform.digest import canonical
from kvconform.hashes import HashBook
from kvconform.probe import Call, Probe
from kvconform.trace import Trace

SHARED = {
    "get_transfer_results": (0, "finished_req_ids"),
    "update_connector_output": (0, "connector_output"),
    "request_finished": (1, "block_ids"),
    "request_finished_all_groups": (1, "block_ids"),
}
"""Hook -> the argument that others read after it."""
REPORTS = ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids")


class Watch:
    """Listens to one engine. `generation(req)` is the incarnation of a request id. Changes nothing but the trace."""

    def __init__(self, trace: Trace, probe: Probe, book: HashBook, generation: Callable[[str], int]) -> None:
        self.trace, self.book, self.generation = trace, book, generation
        probe.on("on_new_request", after=self._new)
        probe.on("get_num_new_matched_tokens", after=self._hashes)
        for hook in SHARED:
            probe.on(hook, before=self._before, after=self._after)
        probe.on("update_connector_output", before=self._landed)

    def _new(self, call: Call) -> None:
        request = call.arg(0, "request")
        self.trace.emit("request.new", req=request.request_id, generation=self.generation(request.request_id))

    def _hashes(self, call: Call) -> None:
        request = call.arg(0, "request")
        found = self.book.enter(request)
        self.trace.emit("hashes", req=request.request_id, generation=self.generation(request.request_id), **found)

    def _landed(self, call: Call) -> None:
        """A step's reports reach the scheduler half, perhaps after the worker half has returned those of later steps."""
        output = call.arg(0, "connector_output")
        reports = {name: getattr(output, name, None) for name in REPORTS}
        changed = [name for name, ids in reports.items() if ids is not None and getattr(ids, "reported", ids) != ids]
        self.trace.emit("report.landed", changed=changed)

    def _before(self, call: Call) -> None:
        call.scratch["argument"] = _picture(call)

    def _after(self, call: Call) -> None:
        if call.result_event is not None and call.error is None:
            call.result_event["mutated_args"] = _picture(call) != call.scratch["argument"]


def _picture(call: Call) -> str:
    value: Any = call.arg(*SHARED[call.hook])
    if call.hook == "update_connector_output":
        value = [sorted(getattr(value, name, None) or ()) for name in REPORTS]
    return repr(canonical(value))
