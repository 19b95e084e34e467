# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes, and one function per operation on them, for every supported release.

Importing this module imports vLLM (6-10 s), so the controller process never imports it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import kvconform.compat.environment  # noqa: F401

# vLLM 0.17 looks this name up there, but newer releases of PyTorch have moved it.
if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = torch.cpu._is_avx512_supported  # type: ignore[attr-defined]

import vllm
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvconform.compat import backports
from kvconform.contract.requirement import version_key
from kvconform.process import alive

__all__ = [
    "AsyncScheduler",
    "DraftTokenIds",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVTransferConfig",
    "ModelRunnerOutput",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "SupportsHMA",
    "VllmConfig",
    "init_none_hash",
    "kv_transfer_state",
    "sha256",
    "torch",
]

VLLM_VERSION: str = vllm.__version__
torch.set_num_threads(1)  # tensors are tiny; threads would only cost time
alive.adopt_native_threads()
ENCODER_BUDGET = 4096
init_none_hash(sha256)


def _kv_layout(release: tuple[int, ...]) -> str:
    if release < (0, 23):
        return "kv-first"
    return "kv-second" if release < (0, 26) else "LBHNC"


COUNTS_IN_FLIGHT = "num_in_flight_tokens" in Request.__init__.__code__.co_names
"""Whether vLLM's own scheduler counts tokens in flight (since 0.25)."""
_RELEASE = version_key(vllm.__version__)
KV_LAYOUT = _kv_layout(_RELEASE)
"""Layout of a layer's KV tensor (see kvconform.kv.cache), as FlashAttention registers it."""
FINISHED_ERROR = getattr(RequestStatus, "FINISHED_ERROR", RequestStatus.FINISHED_ABORTED)
"""Final status of a request that cannot be recovered; until 0.12 there was no status for it."""
AWAITING_INPUT = getattr(RequestStatus, "WAITING_FOR_STREAMING_REQ", None)
"""The state of a session between its turns. None in releases without sessions."""
PREEMPTIONS_BY_METADATA = (
    "kv_connector_metadata"
    in inspect.signature(getattr(KVConnectorBase_V1, "handle_preemptions", len)).parameters
)
"""Whether handle_preemptions gets the step's metadata, in every step.

Until 0.19 it got ids, if there were any; until 0.13 there was no such hook.
"""
backports.complete_outputs(KVConnectorOutput, SchedulerOutput)
if _RELEASE[:2] == (0, 17) and torch._C._cpu._is_avx512_supported is torch.cpu._is_avx512_supported:  # type: ignore[attr-defined]
    backports.inspect_models_here()
UNRECORDED = backports.complete(KVConnectorBase_V1)
"""Hooks that the installed release lacks and that are not recorded."""
RESULTS_IN_SETS = KVConnectorBase_V1.get_transfer_results is backports.HOOKS["get_transfer_results"]
"""Whether the worker calls `get_finished` itself (until 0.30)."""


def hook_classes() -> tuple[type, ...]:
    """Return the classes whose public methods are the connector interface."""
    return (KVConnectorBase_V1, SupportsHMA)


def later(config: Any, name: str, default: Any) -> Any:
    """Return a setting of vLLM's configuration, or `default` if the release does not have it.

    `default` is how releases without the setting behave.
    """
    return getattr(config, name, default)


def model_path() -> str:
    """Return the directory of the tiny model configuration for a VllmConfig.

    It needs no weights and no network.
    """
    import kvconform.fixtures

    return str(Path(next(iter(kvconform.fixtures.__path__))) / "tiny-model")


def build_config(
    *,
    block_size: int,
    num_blocks: int,
    budget: int = 64,
    max_seqs: int = 4,
    max_model_len: int = 256,
    prefix_caching: bool = True,
    kv_events: bool = False,
    spec_tokens: int = 0,
    scheduling: str = "sync",
    policy: str = "fcfs",
    transfer: KVTransferConfig | None = None,
) -> VllmConfig:
    """Return a new VllmConfig for one engine; `num_blocks` includes the null block.

    Each call makes a new object, because connectors may keep it. Sets VLLM_USE_V2_MODEL_RUNNER.
    """
    # V2 demands Triton at configuration time; `build_scheduler` switches its protocol on.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    arguments: dict[str, Any] = dict(
        model=model_path(),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_model_len,
        block_size=16,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_seqs,
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=True,
        kv_transfer_config=transfer,
        async_scheduling=False,
        scheduling_policy=policy,
    )
    if kv_events:
        # There is no subscriber; the engine takes the events of every step nevertheless.
        arguments["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="null"
        )
    if spec_tokens:
        arguments["speculative_config"] = _drafter(spec_tokens)
    config = EngineArgs(**arguments).create_engine_config()
    config.scheduler_config.max_num_batched_tokens = budget
    config.scheduler_config.max_num_scheduled_tokens = None
    resize(config, block_size=block_size, num_blocks=num_blocks, scheduling=scheduling)
    return config


def resize(config: VllmConfig, *, block_size: int, num_blocks: int, scheduling: str) -> None:
    """Set the sizes of a configuration of `build_config`. Nothing else is derived from them."""
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.num_gpu_blocks_override = num_blocks
    config.scheduler_config.async_scheduling = scheduling == "async"


def _drafter(tokens: int) -> dict[str, Any]:
    """Return the speculative configuration: a draft model.

    Releases until 0.14 refuse draft models, so there it is n-grams, which have no lookahead blocks.
    """
    if _RELEASE < (0, 15):
        return {"method": "ngram", "prompt_lookup_max": 2, "num_speculative_tokens": tokens}
    return {"method": "draft_model", "model": model_path(), "num_speculative_tokens": tokens}


@lru_cache(maxsize=1)
def init_parallel_state() -> None:
    """Create the tensor and pipeline parallel groups of a vLLM worker process, with one rank.

    Connectors read their rank from them.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        GroupCoordinator,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with (
        tempfile.TemporaryDirectory(prefix="kvconform-") as directory,
        alive.of_harness(),
        set_current_vllm_config(VllmConfig()),
    ):
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    # One rank has no other to wait for. A forked process, without gloo's threads, would hang here.
    GroupCoordinator.barrier = lambda group: None


def build_cache_config(
    num_blocks: int,
    block_size: int,
    heads: int,
    head_dim: int,
    layers: list[str],
    dtype: torch.dtype = torch.float32,
) -> KVCacheConfig:
    """Return the KVCacheConfig of one full-attention group over `layers`."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_dim, dtype=dtype
    )
    page = spec.page_size_bytes
    # One allocation, layer after layer (0.32).
    if "layers" in KVCacheTensor.__dataclass_fields__:
        places = {"layers": list(layers), "layer_stride": page * num_blocks, "block_stride": page}
        tensors = [KVCacheTensor(size=page * num_blocks * len(layers), **places)]
    else:
        tensors = [KVCacheTensor(size=page * num_blocks, shared_by=[name]) for name in layers]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )


def build_scheduler(
    config: VllmConfig,
    cache: KVCacheConfig,
    *,
    block_size: int,
    scheduling: str,
    runner: str,
    stats: bool = False,
) -> Scheduler:
    """Return vLLM's own scheduler, which constructs the scheduler half of the connector."""
    cls = AsyncScheduler if scheduling == "async" else Scheduler
    size = block_size
    options: dict[str, int] = {}
    if len(cache.kv_cache_groups) > 1:
        size = math.lcm(*(group.kv_cache_spec.block_size for group in cache.kv_cache_groups))
        options["hash_block_size"] = getattr(cache, "hash_block_size", None) or block_size
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        log_stats=stats,
        **options,
    )
    scheduler.use_v2_model_runner = runner == "v2"
    if "is_prefill_chunk" not in Request.__init__.__code__.co_names:
        backports.mark_chunks(scheduler)
    if backports.wants_arrays(ModelRunnerOutput):
        backports.give_arrays(scheduler)
    # The tiny model has no vision tower, but requests with multi-modal items need encoder budget.
    scheduler.max_num_encoder_input_tokens = ENCODER_BUDGET
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=ENCODER_BUDGET)
    return scheduler


def transfer_config(
    connector: str,
    role: str,
    extra: dict[str, Any],
    module: str | None,
    policy: str,
    engine_id: str,
) -> KVTransferConfig:
    """Return the KVTransferConfig for a connector.

    `connector`: class name or registered name. `module`: for classes outside the registry.
    """
    late = {}
    if "kv_load_failure_policy" in KVTransferConfig.__dataclass_fields__:  # since 0.13
        late["kv_load_failure_policy"] = policy
    return KVTransferConfig(
        kv_connector=connector,
        kv_role=role,
        kv_connector_extra_config=extra,
        kv_connector_module_path=module,
        engine_id=engine_id,
        **late,
    )


def force_preemption(scheduler: Any, request: Request) -> bool:
    """Preempt a running request between two steps, as the scheduler does when memory runs out.

    The next step must run under `no_admission`: after a preemption, a scheduler admits no waiting
    request in the same step. Returns False if the scheduler would not preempt it now.
    """
    if hasattr(scheduler, "preempt"):
        return bool(scheduler.preempt(request.request_id))
    can_be_freed = getattr(scheduler, "_request_blocks_can_be_freed", None)  # since 0.31
    if can_be_freed is not None and not can_be_freed(request):
        return False
    own_method = getattr(scheduler, "_preempt_request", len)
    marks = "drop_stale_output" in inspect.signature(own_method).parameters  # since 0.27
    if not marks and not backports.drop_output(request, 1 + scheduler.num_spec_tokens):
        return False
    scheduler.running.remove(request)
    if marks:
        scheduler._preempt_request(request, 0.0, drop_stale_output=scheduler.requires_kv_delivery)
    elif hasattr(scheduler, "_preempt_request"):
        scheduler._preempt_request(request, 0.0)
    else:  # until 0.11
        backports.preempt(scheduler, request)
    return True


@contextlib.contextmanager
def no_admission(scheduler: Any) -> Iterator[None]:
    """Admit no waiting request within: as in a step in which the scheduler itself preempts."""
    if hasattr(scheduler, "preempt"):  # the reference scheduler sees to it itself
        yield
        return
    # Newer releases have two limits, and only the first is about admission.
    new = hasattr(scheduler, "max_num_active_reqs")
    limit = "max_num_active_reqs" if new else "max_num_running_reqs"
    before = getattr(scheduler, limit)
    setattr(scheduler, limit, len(scheduler.running))
    try:
        yield
    finally:
        setattr(scheduler, limit, before)


def reset_caches(scheduler: Any, *, running: bool, connector: bool) -> bool:
    """Call reset_prefix_cache and return its result.

    NotImplementedError if the release cannot reset that; such cases have a `since`.
    """
    known = inspect.signature(scheduler.reset_prefix_cache).parameters
    asked = {"reset_running_requests": running, "reset_connector": connector}  # since 0.12 and 0.13
    for name, wanted in asked.items():
        if wanted and name not in known:
            raise NotImplementedError(f"vLLM {VLLM_VERSION} knows no {name}")
    return bool(
        scheduler.reset_prefix_cache(
            **{name: wanted for name, wanted in asked.items() if name in known}
        )
    )


def set_block_hash(block: Any, key: Any, tokens: int) -> None:
    """Set a KVCacheBlock's hash, which covers the request's first `tokens` tokens.

    Releases from 0.26 on store that number.
    """
    if hasattr(block, "set_block_hash"):
        block.set_block_hash(key, tokens)
    else:
        block.block_hash = key


def is_chunk(request: Request) -> bool:
    """Return whether the request's prefill is incomplete after the steps scheduled so far."""
    return bool(request.is_prefill_chunk)


def set_paused(scheduler: Any, paused: bool) -> None:
    """Stop or resume the admission of new requests."""
    from vllm.v1.core.sched.interface import PauseState

    if type(scheduler).__module__.startswith("kvconform."):
        scheduler.set_pause_state(int(paused))
    else:
        scheduler.set_pause_state(PauseState.PAUSED_NEW if paused else PauseState.UNPAUSED)


def reuse_freed_first(queue: Any) -> None:
    """Let a FreeKVCacheBlockQueue hand out the blocks first that were freed last.

    Changes the instance.
    """
    append = queue.append_n

    def prepend(blocks: Any) -> None:
        if hasattr(queue, "prepend_n"):  # since 0.22
            queue.prepend_n(list(blocks))
        else:
            append([*blocks, *queue.popleft_n(queue.num_free_blocks)])

    queue.append_n = prepend
