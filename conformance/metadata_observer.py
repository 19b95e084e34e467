# SPDX-License-Identifier: Apache-2.0
"""Follows the metadata of each step from build_connector_meta to the worker: is it what was built, and is it left alone afterwards?"""

from __future__ import annotations

from typing import Any

from kvconform.compat import KVConnectorMetadata
from kvconform.digest import digest, pickle_round_trip, scheduler_output_digest
from kvconform.probe import Call
from kvconform.trace import Trace

MULTI = "MultiKVConnectorMetadata"


class MetadataObserver:
    """Emits meta.built, meta.bound and meta.cleared. Changes nothing in the engine."""

    trace: Trace
    built: dict[int, str]
    """Digest of each step's metadata, by the id of the object, until the step is executed."""
    current_digest: str | None = None
    arrived: str | None = None
    arrived_in = -1  # step
    latest: Any = None
    handed: tuple[Any, str | None] | None = None
    """The metadata of the last step and its digest when the worker was done with it."""
    refilled = False
    offered: dict[tuple[str, int, int], int]
    """Block of each boundary state that was offered, by request, group and tokens."""
    private: tuple[str, ...] = ()
    """Where the run keeps its files, and what was made of that: metadata may hold it, and the trace must not depend on it."""

    def _digest(self, meta: Any) -> str:
        return digest(meta, self.private)

    def _building(self, call: Call) -> None:
        output = call.arg(0, "scheduler_output")
        call.scratch["digest"] = scheduler_output_digest(output)
        state: Any = getattr(output, "kv_connector_block_state", None)
        offers = {} if state is None else getattr(state, "boundary_state_offloads", {})
        for req, states in offers.items():
            for group, block, tokens in states:
                table = (state.get_block_ids(req) or [()] * (group + 1))[group]
                key = (req, group, tokens)
                self.trace.emit(
                    "state.offered", req=req, group=group, block=block, tokens=tokens, in_table=block in table,
                    again=self.offered.get(key) == block,
                )  # fmt: skip
                self.offered[key] = block

    def _built(self, call: Call) -> None:
        if call.error is not None:
            return
        output = call.arg(0, "scheduler_output")
        meta = call.result
        reason = None if meta is None else pickle_round_trip(meta)[1]
        state = getattr(output, "kv_connector_block_state", None)
        kept = (
            state is not None and any(v is state for v in vars(meta).values()) if meta is not None and hasattr(meta, "__dict__") else False
        )
        if self.handed is not None and self._digest(self.handed[0]) != self.handed[1]:
            self.refilled = True  # the step before has not been given this object back: under a deep queue it may still read it
        self.handed, self.latest = None, meta
        mark = self._digest(meta)
        self.built[id(meta)] = mark
        mutated = scheduler_output_digest(output) != call.scratch["digest"]
        if call.result_event is not None:
            call.result_event["mutated_args"] = mutated
        self.trace.emit(
            "meta.built", ok=isinstance(meta, KVConnectorMetadata), pickles=meta is not None and reason is None, pickle_error=reason,
            digest=mark,
            output_mutated=mutated, none=meta is None, block_state_kept=kept, of_step=self.trace.step,
        )  # fmt: skip

    def take_digest(self, meta: Any) -> str | None:
        """The digest of a step's metadata when it was built; of the connector's own part where it is the child of a MultiConnector."""
        parts = meta.metadata if type(meta).__name__ == MULTI else (meta,)
        return next((self.built.pop(id(part)) for part in parts if id(part) in self.built), None)

    def _arrived(self, call: Call) -> None:
        # First sight of the worker: a connector may consume its own copy from then on. Until 0.22 the hooks came in another order.
        metadata = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
        if not isinstance(metadata, set) and self.arrived_in != self.trace.step:
            whole = type(metadata).__name__ == MULTI  # shown to a stand-in for the worker half, which is not the child of anything
            self.arrived, self.arrived_in = None if whole else self._digest(metadata), self.trace.step

    def _bound(self, call: Call) -> None:
        built, mark = self.current_digest, self.arrived
        same = built is None or mark is None or built == mark
        self.trace.emit("meta.bound", digest=mark, same_as_built=same and not self.refilled)
        self.refilled = False

    def _cleared(self, call: Call) -> None:
        self.handed = self.latest, self._digest(self.latest)
        self.trace.emit("meta.cleared", digest=None, same_as_built=True)
