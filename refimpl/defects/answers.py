# SPDX-License-Identifier: Apache-2.0
"""Planted defects: answers of a wrong type or shape, and classes that vLLM cannot use."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.plan import Load, ReferenceMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SentTwice(ReferenceConnector):
    """Reports a request as sent when the copy is done, and again in the next step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        again: set[str] = self.__dict__.get("_again", set())
        self._again = sent or set()
        return (self._again | again) or None, received


class ReportsLists(ReferenceConnector):
    """Returns lists of finished requests."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        return replace(
            results,
            finished_sending=sorted(results.finished_sending),
            finished_recving=sorted(results.finished_recving),
        )


class HoldsByCount(ReferenceConnector):
    """Returns from request_finished the number of blocks that it keeps, instead of a bool."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Any:
        holds, params = super().request_finished(request, block_ids)
        return len(block_ids) if holds else 0, params


class TensorParams(ReferenceConnector):
    """Puts a tensor into the parameters that are returned to the client."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        holds, _ = super().request_finished(request, block_ids)
        return holds, {"block_ids": torch.tensor(block_ids)}


class ResetCount(ReferenceConnector):
    """Returns from reset_cache the number of chunks that it removed."""

    def reset_cache(self) -> Any:
        count = len(list(self._store.keys()))
        super().reset_cache()
        return count


class ErrorsInAList(ReferenceConnector):
    """Reports failed blocks in a list."""

    def get_block_ids_with_load_errors(self) -> Any:
        return sorted(super().get_block_ids_with_load_errors())


class PlainWorkerMeta(ReferenceConnector):
    """Returns the worker's metadata as a dictionary, which cannot be aggregated."""

    def build_connector_worker_meta(self) -> Any:
        return {"layers": len(self._layers)}


class PendingCount(ReferenceConnector):
    """Returns a number from has_pending_push_work."""

    def has_pending_push_work(self) -> Any:
        return len(self._final)


class PushesForever(ReferenceConnector):
    """Always reports pending push work, so that the engine steps forever (B053)."""

    def has_pending_push_work(self) -> bool:
        return True


class KeepsOwnMetadata(ReferenceConnector):
    """Overrides bind_connector_metadata without a call of the base class."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._own = connector_metadata

    def _metadata(self) -> Any:
        return self._own


class ExitsProcess(ReferenceConnector):
    """Exits the process when a load finds its server gone."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._invalid:
            sys.exit("the cache server is gone")
        return super().get_block_ids_with_load_errors()


class KillsProcess(ReferenceConnector):
    """Exits the process with os._exit when a load finds its server gone.

    Nothing is cleaned up, and no caller can catch it.
    """

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._invalid:
            os._exit(1)
        return super().get_block_ids_with_load_errors()


@dataclass(frozen=True)
class _Numbered(ReferenceMetadata):
    number: int = 0


class HalvesShareMemory(ReferenceConnector):
    """Passes the step's loads to the worker half in a class attribute.

    The worker half finds them only while both halves are in one process.
    """

    _loads: ClassVar[list[tuple[Load, ...]]] = []

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = super().build_connector_meta(scheduler_output)
        assert isinstance(plan, ReferenceMetadata)
        self._loads.append(plan.loads)
        return _Numbered(plan.epoch, (), plan.saves, plan.dropped, plan.repaired, len(self._loads))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._metadata()
        if isinstance(plan, _Numbered) and plan.number <= len(self._loads):
            for load in self._loads[plan.number - 1]:
                self._load(load, self._layers)
        super().start_load_kv(forward_context, **kwargs)


class TwoArguments(ReferenceConnector):
    """Has the constructor of older releases, without kv_cache_config (B126)."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role, None)  # type: ignore[arg-type]


class AsksTheInstance(ReferenceConnector):
    """Has an instance method where vLLM calls a class method: requires_piecewise_for_cudagraph."""

    def requires_piecewise_for_cudagraph(self, extra_config: dict[str, Any]) -> bool:  # type: ignore[override]
        return self.options.layerwise


class OldPreemptions(ReferenceConnector):
    """Expects the ids of preempted requests in handle_preemptions, before the metadata (B123)."""

    def handle_preemptions(self, preempted_req_ids: Any, kv_connector_metadata: Any) -> None:  # type: ignore[override]
        super().handle_preemptions(kv_connector_metadata)


class EmptiesAtStart(ReferenceConnector):
    """Declares that its store outlives the process, and empties it whenever it starts."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store.reset()

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "persistent": True}


class NoRestart(ReferenceConnector):
    """Refuses to start with a store that an earlier process has filled.

    In B129, what such a start needs is not registered yet.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if any(self._store.keys()):
            raise RuntimeError("the store belongs to another instance")
