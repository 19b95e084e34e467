# SPDX-License-Identifier: Apache-2.0
"""What is done to an engine between its steps: questions, resets, pauses, forced preemption, shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvconform.refimpl.integrity import check_integrity

if TYPE_CHECKING:
    from kvconform.refimpl.scheduler import ReferenceScheduler


class EngineControl:
    """The part of ReferenceScheduler that an engine's owner calls between steps."""

    def get_num_unfinished_requests(self) -> int:
        """Requests that can still be scheduled, the pause considered."""
        engine = cast("ReferenceScheduler", self)
        waiting = len(engine.kv_holding_waiting) + (len(engine.waiting) if engine.pause_level == 0 else 0)
        return waiting + len(engine.running) if engine.pause_level < 2 else 0

    def has_unfinished_requests(self) -> bool:
        """Whether any request can still be scheduled."""
        return self.get_num_unfinished_requests() > 0

    def has_finished_requests(self) -> bool:
        """Whether a finish is still to be announced, or a finished request's blocks are still held for a transfer."""
        engine = cast("ReferenceScheduler", self)
        alive = len(engine.running) + len(engine.waiting) + len(engine.kv_holding_waiting)
        return bool(engine.finished_req_ids) or (engine.connector is not None and len(engine.requests) > alive)

    def has_requests(self) -> bool:
        """Whether the engine has to go on stepping (R151, R224)."""
        engine = cast("ReferenceScheduler", self)
        return (
            self.has_unfinished_requests()
            or self.has_finished_requests()
            or (engine.connector is not None and engine.connector.has_pending_push_work())
        )

    def set_pause_state(self, level: int) -> None:
        """0: run; 1: nothing new starts, what holds blocks goes on; 2: nothing runs."""
        cast("ReferenceScheduler", self).pause_level = int(level)

    def preempt(self, request_id: str) -> bool:
        """Preempt a running request as if memory had run out: its blocks go, and nobody is admitted in the next step.

        False, and nothing changed, if it is not running or its blocks could not be freed at once (R160): land a step and ask again.
        """
        engine = cast("ReferenceScheduler", self)
        request = engine.requests.get(request_id)
        if request is None or request not in engine.running or not engine.frees_at_once(request):
            return False
        engine.running.remove(request)
        engine.preempt_now(request, drop_stale=engine.requires_kv_delivery)
        engine.preempted_between_steps = True
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the local prefix cache and, if asked, the connector's. False if blocks are in use or the connector failed.

        With `reset_running_requests` everything that runs is preempted first and may resume in the next step (R153); RuntimeError if blocks
        are held even so (R172): by a load, a transfer after a finish, or a step in flight.
        """
        engine = cast("ReferenceScheduler", self)
        if reset_running_requests:
            while engine.running:
                engine.preempt_now(engine.running.pop(), drop_stale=True)
            engine.scheduled_before = set()
        done = engine.kv_cache_manager.reset_prefix_cache()
        if reset_running_requests and not done:
            raise RuntimeError("The KV cache was not reset: blocks are still held though everything that runs was preempted (R172).")
        if reset_connector and engine.connector is not None:
            done = engine.connector.reset_cache() is not False and done
        return done

    def shutdown(self) -> None:
        """Shut the connector's scheduler half down."""
        engine = cast("ReferenceScheduler", self)
        if engine.connector is not None:
            engine.connector.shutdown()

    def check_integrity(self) -> None:
        """Raise IntegrityError, naming the block or the request, if the engine's books do not add up. Call it between steps."""
        check_integrity(cast("ReferenceScheduler", self))
