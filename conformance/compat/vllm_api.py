# SPDX-License-Identifier: Apache-2.0
"""What depends on the installed vLLM. Nobody but this module, compat_request and compat_worker branches on its version.

Importing this module imports vLLM (6-10 s), so the controller process never does.
"""

from __future__ import annotations

import atexit
import inspect
import math
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
    # A CUDA build of vLLM on a machine without a GPU finds no platform and refuses to build a configuration.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import torch

if not hasattr(
    torch._C._cpu, "_is_avx512_supported"
):  # 0.17 asks for it there, but newer releases of PyTorch have it elsewhere
    torch._C._cpu._is_avx512_supported = torch.cpu._is_avx512_supported  # type: ignore[attr-defined]

import vllm
from vllm.config import KVTransferConfig, VllmConfig
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
    "kv_transfer_state",
    "torch",
]

VLLM_VERSION: str = vllm.__version__
torch.set_num_threads(1)  # tensors are tiny; threads only cost
ENCODER_BUDGET = 4096
init_none_hash(sha256)


COUNTS_IN_FLIGHT = "num_in_flight_tokens" in Request.__init__.__code__.co_names
"""Whether vLLM's own scheduler counts what is in flight; until 0.24 it did not."""
_RELEASE = version_key(vllm.__version__)
KV_LAYOUT = "kv-first" if _RELEASE < (0, 23) else "kv-second" if _RELEASE < (0, 26) else "LBHNC"
"""Layout of a layer's KV tensor (kvconform.kv.cache.LAYOUTS), as FlashAttention registers it."""
FINISHED_ERROR = getattr(RequestStatus, "FINISHED_ERROR", RequestStatus.FINISHED_ABORTED)
"""How a request ends that cannot be recovered; until 0.12 there was no such end."""
PREEMPTIONS_BY_METADATA = (
    "kv_connector_metadata"
    in inspect.signature(getattr(KVConnectorBase_V1, "handle_preemptions", len)).parameters
)
"""Whether handle_preemptions gets the step's metadata, in every step. Until 0.19 it got ids, if there were any; until 0.13 it was not."""
ABSENT_FIELDS = backports.complete_outputs(KVConnectorOutput, SchedulerOutput)
"""Fields of outputs that the installed release lacks."""
if _RELEASE[:2] == (0, 17) and torch._C._cpu._is_avx512_supported is torch.cpu._is_avx512_supported:  # type: ignore[attr-defined]
    backports.inspect_models_here()
UNRECORDED = backports.complete(KVConnectorBase_V1)
"""Hooks that the installed release lacks."""
RESULTS_IN_SETS = KVConnectorBase_V1.get_transfer_results is backports.HOOKS["get_transfer_results"]
"""Until 0.30 the worker asked `get_finished` itself."""


def hook_classes() -> tuple[type, ...]:
    """The classes whose public methods are the connector interface."""
    return (KVConnectorBase_V1, SupportsHMA)


def later(config: Any, name: str, default: Any) -> Any:
    """A setting of vLLM's configuration; `default`, which is what releases without it did, where the installed one has no such setting."""
    return getattr(config, name, default)


def model_path() -> str:
    """Directory of the tiny model configuration that a VllmConfig is built from (no weights, no network)."""
    import kvconform.fixtures

    return str(Path(next(iter(kvconform.fixtures.__path__))) / "tiny-model")


def build_config(
    *,
    block_size: int,
    num_blocks: int,
    budget: int,
    max_seqs: int,
    max_model_len: int,
    prefix_caching: bool,
    spec_tokens: int,
    scheduling: str,
    runner: str,
    policy: str,
    transfer: KVTransferConfig | None,
) -> VllmConfig:
    """A VllmConfig for one engine; `num_blocks` includes the null block. A fresh object each call (connectors may keep it)."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = (
        "0"  # V2 demands Triton at configuration time; its protocol is switched on below
    )
    arguments: dict[str, Any] = dict(
        model=model_path(),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_model_len,
        block_size=16,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=max(budget, max_seqs),
        max_num_seqs=max_seqs,
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=True,
        kv_transfer_config=transfer,
        async_scheduling=False,
        scheduling_policy=policy,
    )
    if spec_tokens:
        arguments["speculative_config"] = _drafter(spec_tokens)
    config = EngineArgs(**arguments).create_engine_config()
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = scheduling == "async"
    config.scheduler_config.max_num_batched_tokens = budget
    config.scheduler_config.max_num_scheduled_tokens = None
    return config


def _drafter(tokens: int) -> dict[str, Any]:
    """The speculative configuration: of a draft model, or, until 0.14 refused to have one, of n-grams, which have no lookahead blocks."""
    if _RELEASE < (0, 15):
        return {"method": "ngram", "prompt_lookup_max": 2, "num_speculative_tokens": tokens}
    return {"method": "draft_model", "model": model_path(), "num_speculative_tokens": tokens}


@lru_cache(maxsize=1)
def init_parallel_state() -> None:
    """The one-rank tensor and pipeline parallel groups that every vLLM worker process has; connectors ask them for their rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        GroupCoordinator,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    directory = tempfile.mkdtemp(prefix="kvconform-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    GroupCoordinator.barrier = lambda group: (
        None
    )  # one rank waits for nobody; in a forked process, without gloo's threads, it would


def build_cache_config(
    num_blocks: int, block_size: int, heads: int, head_dim: int, layers: list[str]
) -> KVCacheConfig:
    """One full-attention group over `layers`."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_dim, dtype=torch.float32
    )
    page = spec.page_size_bytes
    if "layers" in KVCacheTensor.__dataclass_fields__:  # one allocation, layer after layer (0.32)
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
    """vLLM's own scheduler (it constructs the scheduler half of the connector itself)."""
    cls = AsyncScheduler if scheduling == "async" else Scheduler
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size
        if len(cache.kv_cache_groups) == 1
        else math.lcm(*(g.kv_cache_spec.block_size for g in cache.kv_cache_groups)),
        log_stats=stats,
        **({"hash_block_size": block_size} if len(cache.kv_cache_groups) > 1 else {}),
    )
    scheduler.use_v2_model_runner = runner == "v2"
    if "is_prefill_chunk" not in Request.__init__.__code__.co_names:
        backports.mark_chunks(scheduler)
    if backports.wants_arrays(ModelRunnerOutput):
        backports.give_arrays(scheduler)
    # The tiny model has no vision tower; requests with multi-modal items need an encoder budget all the same.
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
    """KVTransferConfig for `connector` (class name or registered name; `module` for classes outside the registry)."""
    late = (
        {"kv_load_failure_policy": policy}
        if "kv_load_failure_policy" in KVTransferConfig.__dataclass_fields__
        else {}
    )  # since 0.13
    return KVTransferConfig(
        kv_connector=connector,
        kv_role=role,
        kv_connector_extra_config=extra,
        kv_connector_module_path=module,
        engine_id=engine_id,
        **late,
    )


def force_preemption(scheduler: Any, request: Request) -> bool:
    """Preempt a running request between two steps, as the scheduler itself does when memory runs out; False if it would not now."""
    if hasattr(scheduler, "preempt"):
        return bool(scheduler.preempt(request.request_id))
    can_be_freed = getattr(scheduler, "_request_blocks_can_be_freed", None)  # since 0.31
    if can_be_freed is not None and not can_be_freed(request):
        return False
    marks = (
        "drop_stale_output"
        in inspect.signature(getattr(scheduler, "_preempt_request", len)).parameters
    )  # since 0.27
    if not marks and not backports.drop_output(request, 1 + scheduler.num_spec_tokens):
        return False
    scheduler.running.remove(request)
    if marks:
        scheduler._preempt_request(request, 0.0, drop_stale_output=scheduler.requires_kv_delivery)
    elif hasattr(scheduler, "_preempt_request"):
        scheduler._preempt_request(request, 0.0)
    else:  # until 0.11
        backports.preempt(scheduler, request)
    if not hasattr(scheduler, "reset_preempted_req_ids") and not hasattr(
        scheduler, "preempted_req_ids"
    ):
        # Until 0.25 a victim could not come back in the next step, unless a reset had preempted it, which did this:
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return True


def reset_caches(scheduler: Any, *, running: bool, connector: bool) -> bool:
    """reset_prefix_cache: what it returned. NotImplementedError for what the release cannot reset (such cases have a `since`)."""
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
    """Give a KVCacheBlock its hash, which covers `tokens` tokens from the request's first (0.26 on keeps that number)."""
    if hasattr(block, "set_block_hash"):
        block.set_block_hash(key, tokens)
    else:
        block.block_hash = key


def is_chunk(request: Request) -> bool:
    """Whether the request's prefill is not complete after the steps scheduled so far."""
    return bool(request.is_prefill_chunk)


def finished_recving_pending(scheduler: Any, req_id: str) -> bool:
    """Whether the engine waits for `finished_recving` of this request (an asynchronous load, possibly of an aborted request)."""
    request = scheduler.requests.get(req_id)
    return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS


def set_paused(scheduler: Any, paused: bool) -> None:
    """Stop or resume the admission of new requests."""
    from vllm.v1.core.sched.interface import PauseState

    own = type(scheduler).__module__.startswith("kvconform.")
    scheduler.set_pause_state(
        int(paused) if own else PauseState.PAUSED_NEW if paused else PauseState.UNPAUSED
    )


def reuse_freed_first(queue: Any) -> None:
    """Make a FreeKVCacheBlockQueue hand out first what was freed last. Changes the instance."""
    append = queue.append_n

    def prepend(blocks: Any) -> None:
        if hasattr(queue, "prepend_n"):  # since 0.22
            queue.prepend_n(list(blocks))
        else:
            append([*blocks, *queue.popleft_n(queue.num_free_blocks)])

    queue.append_n = prepend
