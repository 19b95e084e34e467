# SPDX-License-Identifier: Apache-2.0
"""What a client or an operator does to an engine between its steps."""

from __future__ import annotations

from typing import Any

from kvconform import compat
from kvconform.compat import RequestStatus
from kvconform.engines.ledger import Ledger
from kvconform.probe import Probe
from kvconform.trace import Trace


class EngineControl:
    """Requests come, go and are preempted, caches are reset. Every method changes the engine and the trace."""

    trace: Trace
    probe: Probe
    scheduler: Any
    ledger: Ledger

    def add(self, request: Any) -> None:
        """Hand a request to the scheduler."""
        Probe.active = self.probe
        self.ledger.added(request)
        self.scheduler.add_request(request)

    def abort(self, req_id: str) -> None:
        """Abort a request, as a client that goes away."""
        Probe.active = self.probe
        self.ledger.before_update()
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self.ledger.state_changes("abort")

    def preempt(self, req_id: str) -> bool:
        """Preempt a running request between two steps; False if it is not running or the engine would not do it now (R160)."""
        request = self.scheduler.requests.get(req_id)
        if request is None or request.status != RequestStatus.RUNNING:
            return False
        Probe.active = self.probe
        self.ledger.before_update()
        done = compat.force_preemption(self.scheduler, request)
        self.ledger.state_changes("preempt")
        return done

    def reset(self, *, running: bool, connector: bool) -> bool:
        """reset_prefix_cache; returns what the scheduler returned."""
        Probe.active = self.probe
        self.ledger.before_update()
        done = False
        self.trace.emit("cache.reset", phase="asked", returned=None, running=running, connector=connector)
        try:
            done = compat.reset_caches(self.scheduler, running=running, connector=connector)
            self.trace.emit("cache.reset", phase="done", returned=done, running=running, connector=connector)
        except RuntimeError as error:
            if self.probe.last_error is not None and self.probe.last_error[1] is error:
                raise
            # The engine refuses while blocks are held for a transfer (R172); whoever asked for the reset is told, and it goes on.
        self.ledger.state_changes("reset")
        return done

    def pause(self, paused: bool) -> None:
        """Stop or resume the admission of new requests."""
        compat.set_paused(self.scheduler, paused)
