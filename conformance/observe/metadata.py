# SPDX-License-Identifier: Apache-2.0
"""Follows each step's connector metadata from build_connector_meta to the worker.

Checks that the worker gets the metadata that was built, and that it is not changed afterwards.
"""

from __future__ import annotations

from typing import Any

from kvconform.compat.step import blocks_to_zero, has_sync_loads
from kvconform.compat.vllm_api import KVConnectorMetadata
from kvconform.contract.trace import Trace
from kvconform.observe.call import Call
from kvconform.observe.digest import digest, pickle_round_trip, scheduler_output_picture
from kvconform.observe.probe import Probe

MULTI = "MultiKVConnectorMetadata"


class MetadataObserver:
    """Emits meta.built, meta.bound, meta.cleared and state.offered. Changes nothing in the engine.

    `private` are strings that name where the run keeps its files. Metadata may hold them, and the
    trace must not depend on them.
    """

    def __init__(self, trace: Trace, private: tuple[str, ...] = ()) -> None:
        self.trace = trace
        self.private = private
        self.current_digest: str | None = None
        """Digest that the metadata of the step that is executed had when it was built."""
        self._built: dict[int, str] = {}  # id(metadata) -> digest, until the step is executed
        self._offered: dict[tuple[str, int, int], int] = {}  # (request, group, tokens) -> block
        self._arrived: str | None = None
        self._arrived_in_step = -1
        self._latest: Any = None
        self._handed: tuple[Any, str] | None = None  # the last step's, when the worker was done
        self._refilled = False

    def watch_scheduler(self, probe: Probe) -> None:
        """Listen to the hooks of the scheduler half."""
        probe.on("build_connector_meta", before=self._building, after=self._was_built)

    def watch_worker(self, probe: Probe) -> None:
        """Listen to the hooks of the worker half."""
        for hook in ("handle_preemptions", "bind_connector_metadata"):
            probe.on(hook, before=self._arrives)
        probe.on("bind_connector_metadata", after=self._bound)
        probe.on("clear_connector_metadata", after=self._cleared)

    def begin_step(self, metadata: Any, *, copied: bool = False) -> str | None:
        """Note that the step with this metadata is handed to the workers.

        Returns the digest that the metadata had when it was built. In a MultiConnector, that is the
        digest of the part that belongs to the connector under test. `copied`: the workers get a
        copy, which no later step can change.
        """
        if copied:
            self._latest = None
        parts = metadata.metadata if type(metadata).__name__ == MULTI else (metadata,)
        known = (self._built.pop(id(part)) for part in parts if id(part) in self._built)
        self.current_digest = next(known, None)
        return self.current_digest

    def forget_offers(self, req_id: str) -> None:
        """Forget the boundary states that were offered for a request: it is admitted again."""
        self._offered = {at: block for at, block in self._offered.items() if at[0] != req_id}

    def _digest(self, metadata: Any) -> str:
        return digest(metadata, self.private)

    def _building(self, call: Call) -> None:
        output = call.arg(0, "scheduler_output")
        call.scratch["picture"] = scheduler_output_picture(output)
        call.scratch["zeroed"] = blocks_to_zero(output)
        call.scratch["loads"] = has_sync_loads(output)
        state: Any = getattr(output, "kv_connector_block_state", None)
        offers = {} if state is None else getattr(state, "boundary_state_offloads", {})
        copied = {target for _, target in getattr(output, "kv_cache_block_copies", None) or ()}
        for req, states in offers.items():
            for group, block, tokens in states:
                table = (state.get_block_ids(req) or [()] * (group + 1))[group]
                key = (req, group, tokens)
                self.trace.emit(
                    "state.offered",
                    req=req,
                    group=group,
                    block=block,
                    tokens=tokens,
                    in_table=block in table,
                    copied=block in copied,
                    again=self._offered.get(key) == block,
                )
                self._offered[key] = block

    def _was_built(self, call: Call) -> None:
        if call.error is not None:
            return
        output = call.arg(0, "scheduler_output")
        metadata = call.result
        if self._handed is not None and self._digest(self._handed[0]) != self._handed[1]:
            # The previous step has not given this object back: in a deep queue it may read it.
            self._refilled = True
        self._handed = None
        self._latest = metadata
        built = self._digest(metadata)
        self._built[id(metadata)] = built
        mutated = scheduler_output_picture(output) != call.scratch["picture"]
        loads = call.scratch["loads"]
        mutated = mutated or _zeroes_otherwise(output, call.scratch["zeroed"], loads)
        mutated = mutated or (loads and not has_sync_loads(output))
        if call.result_event is not None:
            self.trace.amend(call.result_event, mutated_args=mutated)
        reason = None if metadata is None else pickle_round_trip(metadata)[1]
        self.trace.emit(
            "meta.built",
            ok=isinstance(metadata, KVConnectorMetadata),
            pickles=metadata is not None and reason is None,
            pickle_error=reason,
            output_mutated=mutated,
            none=metadata is None,
            block_state_kept=_keeps_block_state(metadata, output),
            of_step=self.trace.step,
        )

    def _arrives(self, call: Call) -> None:
        """Note the metadata when the worker first sees it: from then on it may consume its copy.

        Until vLLM 0.22 the hooks came in another order.
        """
        metadata = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
        if isinstance(metadata, set) or self._arrived_in_step == self.trace.step:
            return
        # A stand-in for the worker half is no child of a MultiConnector: it sees the whole.
        whole = type(metadata).__name__ == MULTI
        self._arrived = None if whole else self._digest(metadata)
        self._arrived_in_step = self.trace.step

    def _bound(self, call: Call) -> None:
        built = self.current_digest
        arrived = self._arrived
        same = built is None or arrived is None or built == arrived
        self.trace.emit("meta.bound", same_as_built=same and not self._refilled)
        self._refilled = False

    def _cleared(self, call: Call) -> None:
        self._handed = self._latest, self._digest(self._latest)
        self.trace.emit("meta.cleared")


def _zeroes_otherwise(output: Any, before: list[int], loads: bool) -> bool:
    """Return whether other blocks are to be zeroed than the engine decided, against the rule.

    Only who loads synchronously may take out blocks that it overwrites. `loads`: whether the engine
    granted such a load.
    """
    after = blocks_to_zero(output)
    return after != before and not (loads and set(after) <= set(before))


def _keeps_block_state(metadata: Any, output: Any) -> bool:
    """Return whether the metadata holds the SchedulerOutput's block state.

    That state belongs to the scheduler.
    """
    state = getattr(output, "kv_connector_block_state", None)
    if state is None or metadata is None or not hasattr(metadata, "__dict__"):
        return False
    return any(value is state for value in vars(metadata).values())
