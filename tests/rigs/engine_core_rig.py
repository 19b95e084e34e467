# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine core and scheduler, unpatched, over an executor without a model.

The executor is a plug-in class of vLLM's. It calls vLLM's worker-side mixin with the worker half
of `Noting`, and samples the same token always.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvconform.compat import vllm_api
from kvconform.compat.vllm_api import torch

SAMPLED = 7
"""The token that every request samples."""
BLOCK = 4


@dataclass
class Loads(KVConnectorMetadata):
    """Loads that a step starts: request -> (blocks, whether asynchronous)."""

    started: dict[str, tuple[list[int], bool]] = field(default_factory=dict)


class Noting(KVConnectorBase_V1, SupportsHMA):
    """A connector that notes its calls; the test says what it answers."""

    made = 0

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        type(self).made += 1
        self.calls: list[tuple[str, str, Any]] = []
        """(hook, request, value) of the scheduler half."""
        self.offers: dict[str, tuple[int, bool]] = {}
        """Answers of lookups by request: tokens from position 0, and whether asynchronous."""
        self.keeps_blocks = False
        """Whether a finished request's blocks are kept for a consumer."""
        self.is_down = False
        self.granted = Loads()
        self.broken = False
        """Worker half: loads fail from now on."""
        self.frozen = False
        """Worker half: no transfer ends."""
        self.loading: list[str] = []
        self.sending: list[str] = []
        self.failed: set[int] = set()
        store = self._kv_transfer_config.kv_connector_extra_config.get("store")
        self.store = Path(store) if store else None

    def called(self, hook: str, req: str | None = None) -> list[Any]:
        """Return the values of the calls of a hook, for one request or all."""
        return [value for name, who, value in self.calls if name == hook and req in (None, who)]

    # -- scheduler half
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Any:
        params = dict(request.kv_transfer_params or {})
        req = request.request_id
        self.calls.append(("lookup", req, {"local": num_computed_tokens, "params": params}))
        tokens, is_async = self.offers.get(req, (self._stored(request), False))
        found = max(0, tokens - num_computed_tokens)
        return found, is_async and found > 0

    def _stored(self, request: Request) -> int:
        if self.store is None or not self.store.exists():
            return 0
        known = json.loads(self.store.read_text())
        same = request.prompt_token_ids == known
        return (len(known) - 1) // BLOCK * BLOCK if same else 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        req = request.request_id
        self.calls.append(("alloc", req, num_external_tokens))
        if num_external_tokens:
            _, is_async = self.offers.get(req, (0, False))
            self.granted.started[req] = (blocks.get_block_ids()[0], is_async)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.calls.append(("meta", "", scheduler_output))
        metadata, self.granted = self.granted, Loads()
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.calls.append(("update", "", connector_output))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("finished", request.request_id, request.status.name))
        if self.store is not None:
            self.store.write_text(json.dumps(request.prompt_token_ids))
        config = self._kv_transfer_config
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": config.engine_id,
            "remote_request_id": request.request_id,
        }
        return self.keeps_blocks, params if self.keeps_blocks else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("tables", request.request_id, block_ids))
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        self.calls.append(("reset", "", None))
        return True

    def shutdown(self) -> None:
        self.is_down = True

    # -- worker half
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for req, (blocks, is_async) in metadata.started.items():
            if self.broken:
                self.failed.update(blocks)
            if is_async:
                self.loading.append(req)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.sending.extend(finished_req_ids)
        if self.frozen:
            return None, None
        sent, self.sending = set(self.sending), []
        received, self.loading = set(self.loading), []
        return (sent if self.keeps_blocks else None), received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...
    def wait_for_save(self) -> None: ...


class NoModel(Executor):
    """An executor without workers: `outputs` are the steps that it executed."""

    layout = "LBHNC"
    """The only layout that the model's attention supports."""
    window = 0
    """Tokens that the model's second layer attends to; 0: it has one layer."""
    wide = 0
    """KV heads of the model's second layer, if the first one has others; 0: it has one layer."""

    def _init_executor(self) -> None:
        self.outputs: list[Any] = []
        self.known: dict[str, int] = {}
        """Tokens of each request, as a model runner counts them."""
        self.pending: ModelRunnerOutput | None = None

    def check_health(self) -> None: ...

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        if method == "get_kv_cache_spec":
            sizes = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
            sizes["block_size"] = self.cache_config.block_size
            specs = {"layer.0": FullAttentionSpec(**sizes)}
            if self.wide:
                specs["layer.1"] = FullAttentionSpec(**{**sizes, "num_kv_heads": self.wide})
            if self.window:
                specs["layer.1"] = SlidingWindowSpec(sliding_window=self.window, **sizes)
            return [specs]
        if method == "get_supported_kv_cache_layouts":
            return [[self.layout]]
        return [2**30] if method == "determine_available_memory" else []

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        made = KVConnectorFactory.create_connector(
            self.vllm_config, KVConnectorRole.WORKER, kv_cache_configs[0]
        )
        self.worker: Any = made

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker  # in vLLM, a process has one engine
        self.outputs.append(scheduler_output)
        done: Future[Any] = Future()
        mixin = KVConnectorModelRunnerMixin
        if not scheduler_output.total_num_scheduled_tokens:
            done.set_result(mixin.kv_connector_no_forward(scheduler_output, self.vllm_config))
            return done
        with (
            set_forward_context(None, self.vllm_config),
            mixin.maybe_get_kv_connector_output(scheduler_output) as reports,
        ):
            pass
        ids = list(scheduler_output.num_scheduled_tokens)
        self.pending = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req: index for index, req in enumerate(ids)},
            sampled_token_ids=self._sample(scheduler_output),
            kv_connector_output=reports,
        )
        done.set_result(None)
        return done

    def _sample(self, output: Any) -> list[list[int]]:
        computed = {}
        for new in output.scheduled_new_reqs:
            self.known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for req in cached.resumed_req_ids & cached.all_token_ids.keys():
            self.known[req] = len(cached.all_token_ids[req])
        sampled = []
        for req, count in output.num_scheduled_tokens.items():
            ends = computed[req] + count >= self.known[req]
            self.known[req] += ends
            sampled.append([SAMPLED] * ends)
        return sampled

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        result, self.pending = self.pending, None
        if not non_block:
            return result
        done: Future[Any] = Future()
        done.set_result(result)
        return done


@dataclass
class Core:
    """An engine core, with short names for what tests look at."""

    engine: EngineCore
    returned: dict[str, dict[str, Any]] = field(default_factory=dict)
    """kv_transfer_params of the requests' last outputs."""
    most_in_flight: int = 0
    """The most steps so far that were executed and whose output was not processed yet."""

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.engine.scheduler

    @property
    def half(self) -> Any:
        """The connector's scheduler half: Noting, or MultiConnector."""
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        """The connector's worker half."""
        return self._executor.worker

    @property
    def _executor(self) -> NoModel:
        executor = self.engine.model_executor
        assert isinstance(executor, NoModel)
        return executor

    @property
    def outputs(self) -> list[Any]:
        """The SchedulerOutputs of all steps so far."""
        return self._executor.outputs

    @property
    def running(self) -> list[str]:
        """The running requests, in their order."""
        return [request.request_id for request in self.scheduler.running]

    def request(self, req: str) -> Request:
        """Return vLLM's Request, which must not be freed yet."""
        found = self.scheduler.requests[req]
        assert isinstance(found, Request)
        return found

    def add(self, req: str, prompt: int | Iterable[int], max_tokens: int = 4, **more: Any) -> None:
        """Add a request as the front end does; a number is the length of the prompt."""
        self.take(made_request(req, prompt, max_tokens, **more))

    def take(self, request: EngineCoreRequest) -> None:
        """Add a request of the front end."""
        self.engine.add_request(*self.engine.preprocess_add_request(request))

    def step(self, count: int = 1) -> None:
        """Do iterations of the engine core."""
        for _ in range(count):
            flying, before = len(self.engine.batch_queue or ()), len(self.outputs)
            outputs, executed = self.engine.step_fn()
            flying += len(self.outputs) - before
            self.most_in_flight = max(self.most_in_flight, flying)
            for each in (each for part in (outputs or {}).values() for each in part.outputs):
                if each.kv_transfer_params is not None:
                    self.returned[each.request_id] = each.kv_transfer_params
            self.engine.post_step(executed)

    def run(self) -> None:
        """Iterate until nothing is left."""
        for _ in range(200):
            if not (self.scheduler.has_requests() or self.engine.batch_queue):
                return
            self.step()
        raise AssertionError("the engine core does not come to an end")


def made_request(
    req: str,
    prompt: int | Iterable[int],
    max_tokens: int = 4,
    *,
    priority: int = 0,
    resumable: bool = False,
    **sampling: Any,
) -> EngineCoreRequest:
    """Return a request as vLLM's front end sends it to the engine core."""
    tokens = range(100, 100 + prompt) if isinstance(prompt, int) else prompt
    return EngineCoreRequest(
        request_id=req,
        prompt_token_ids=list(tokens),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=priority,
        resumable=resumable,
    )


def make_config(
    *,
    asynchronous: bool = False,
    num_blocks: int = 32,
    block_size: int = BLOCK,
    stages: int = 1,
    on_failure: str = "recompute",
    role: str = "kv_both",
    store: Path | None = None,
    children: int = 0,
    **more: Any,
) -> Any:
    """Return a VllmConfig with the connector `Noting`; `more` goes to vllm_api.build_config.

    With `children`, so many of them are the children of MultiConnector.
    """
    one = {
        "kv_connector": "Noting",
        "kv_connector_module_path": __name__,
        "kv_role": role,
        "kv_connector_extra_config": {"store": str(store)} if store else {},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [dict(one) for _ in range(children)]},
    }
    transfer = vllm_api.KVTransferConfig(
        **(several if children else one), kv_load_failure_policy=on_failure
    )
    more.setdefault("max_model_len", block_size * (num_blocks - 1))
    config = vllm_api.build_config(
        block_size=block_size,
        num_blocks=num_blocks,
        scheduling="async" if asynchronous else "sync",
        transfer=transfer,
        **more,
    )
    config.parallel_config.pipeline_parallel_size = stages
    return config


def start(config: Any, executor: type[NoModel] = NoModel) -> Core:
    """Return a new engine core."""
    core = Core(EngineCore(config, executor, log_stats=False))
    envs.disable_envs_cache()  # other tests change the environment
    return core
