# SPDX-License-Identifier: Apache-2.0
"""What the engine passes between the two halves of a connector: reports and metadata.

Observes engines with one worker half. The reports of several ranks are joined on the way
(kvconform.observe.ledger.RankReports).
"""

from __future__ import annotations

from typing import Any

from kvconform.contract.trace import Trace
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe

TRANSFERS = ("finished_sending", "finished_recving", "failed_recving")
OTHERS = ("invalid_block_ids", "kv_connector_worker_meta")
"""What else a worker half returns that an update passes on."""


class Relay:
    """Emits relay.broken if what one half gave does not reach the other.

    `pickled`: objects that the worker half returns reach the other half as copies.
    """

    def __init__(self, trace: Trace, probe: Probe, *, pickled: bool = False) -> None:
        self.trace = trace
        self._pickled = pickled
        self._built: Any = None  # the metadata that was built last
        self._given: dict[int, dict[str, Any]] = {}  # step -> field of KVConnectorOutput -> value
        self._passed: dict[str, Any] = {}  # the reports of the update under way, by field
        probe.on("build_connector_meta", after=self._was_built)
        for hook in ("handle_preemptions", "bind_connector_metadata"):
            probe.on(hook, before=self._arrives)
        probe.on("get_transfer_results", after=self._transfers)
        probe.on("get_block_ids_with_load_errors", after=self._errors)
        probe.on("build_connector_worker_meta", after=self._worker_meta)
        probe.on("update_connector_output", before=self._update)

    def _was_built(self, call: Call) -> None:
        self._built = call.result

    def _arrives(self, call: Call) -> None:
        metadata = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
        if metadata is None and self._built is not None:
            self.trace.emit("relay.broken", way="metadata", what=[call.hook])

    def _note(self, **reports: Any) -> None:
        found = {name: value for name, value in reports.items() if value}
        self._given.setdefault(self.trace.step, {}).update(found)

    def _transfers(self, call: Call) -> None:
        if call.legal:
            self._note(**{name: getattr(call.result, name, None) for name in TRANSFERS})

    def _errors(self, call: Call) -> None:
        if call.legal:
            self._note(invalid_block_ids=call.result)

    def _worker_meta(self, call: Call) -> None:
        if call.legal:
            self._note(kv_connector_worker_meta=call.result)

    def _update(self, call: Call) -> None:
        # The scheduler half may put other sets in their place.
        output = call.arg(0, "connector_output")
        self._passed = {name: getattr(output, name, None) for name in (*TRANSFERS, *OTHERS)}

    def landed(self, step: int) -> None:
        """Compare what the worker half reported in a step with what its update passed on."""
        passed, self._passed = self._passed, {}
        given = self._given.pop(step, {})
        lost = [name for name, value in given.items() if not self._has(passed, name, value)]
        if lost:
            self.trace.emit("relay.broken", way="reports", what=sorted(lost))

    def _has(self, passed: dict[str, Any], name: str, value: Any) -> bool:
        """Return whether `value`, or all of its ids, are what the scheduler half got.

        The connector may have changed the set since; then the same object counts (report.stays).
        """
        arrived = passed.get(name)
        if arrived is value or getattr(arrived, "reported", None) is value:
            return True
        if name == "kv_connector_worker_meta" and self._pickled:
            return type(arrived) is type(value)
        return isinstance(value, set) and isinstance(arrived, set) and value <= arrived
