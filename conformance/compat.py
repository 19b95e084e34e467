# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the installed vLLM. No other module may branch on its version.

Importing this module imports vLLM (6-10 s), so the controller process never does.
"""

from __future__ import annotations

import atexit
import inspect
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
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import output
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvconform import older
from kvconform.requirement import version_key

try:
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
except ImportError:  # until 0.15
    from vllm.attention.utils.kv_transfer_utils import maybe_transfer_kv_layer  # type: ignore[no-redef]
try:
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
except ImportError:  # until 0.15 model runner V2 knew no connectors
    ActiveKVConnector = None  # type: ignore[assignment,misc]

__all__ = [
    "ActiveKVConnector",
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
    "SupportsHMA",
    "kv_transfer_state",
    "maybe_transfer_kv_layer",
    "torch",
]

VLLM_VERSION: str = vllm.__version__
torch.set_num_threads(1)  # tensors are tiny; threads only cost
STOP_TOKEN = 1
ENCODER_BUDGET = 4096
init_none_hash(sha256)


LATER_REQUEST_FIELDS: dict[str, Any] = {  # what the reference scheduler keeps on a request, absent from Request until 0.15, 0.25 and 0.28
    "is_prefill_chunk": False,
    "resumable": False,
    "last_sched_seq": 0,
    "num_in_flight_tokens": 0,
    "num_stale_output_tokens": 0,
    "drop_stale_output": False,
}


PREEMPTIONS_BY_METADATA = "kv_connector_metadata" in inspect.signature(getattr(KVConnectorBase_V1, "handle_preemptions", len)).parameters
"""Whether handle_preemptions gets the step's metadata, in every step. Until 0.19 it got ids, if there were any; until 0.13 it was not."""
COUNTS_IN_FLIGHT = "num_in_flight_tokens" in Request.__init__.__code__.co_names
"""Whether vLLM's own scheduler counts what is in flight; until 0.24 it did not."""
CAN_DEFER = "defer_finalize" in inspect.signature(KVConnectorModelRunnerMixin.maybe_get_kv_connector_output).parameters
_RELEASE = version_key(vllm.__version__)
KV_LAYOUT = "kv-first" if _RELEASE < (0, 23) else "kv-second" if _RELEASE < (0, 26) else "packed"
"""Layout of a layer's KV tensor (kvconform.kvcache.LAYOUTS), as FlashAttention registers it."""
FINISHED_ERROR = getattr(RequestStatus, "FINISHED_ERROR", RequestStatus.FINISHED_ABORTED)
"""How a request ends that cannot be recovered; until 0.12 there was no such end."""
UNRECORDED = older.complete(KVConnectorBase_V1)
"""Hooks that the installed release lacks."""
RESULTS_IN_SETS = KVConnectorBase_V1.get_transfer_results is older.HOOKS["get_transfer_results"]
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
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # V2 demands Triton at configuration time; its protocol is switched on below
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
        arguments["speculative_config"] = {"method": "draft_model", "model": model_path(), "num_speculative_tokens": spec_tokens}
    config = EngineArgs(**arguments).create_engine_config()
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = scheduling == "async"
    config.scheduler_config.max_num_batched_tokens = budget
    config.scheduler_config.max_num_scheduled_tokens = None
    return config


@lru_cache(maxsize=1)
def init_parallel_state() -> None:
    """The one-rank tensor and pipeline parallel groups that every vLLM worker process has; connectors ask them for their rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment

    directory = tempfile.mkdtemp(prefix="kvconform-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    store = Path(directory) / "rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def build_cache_config(num_blocks: int, block_size: int, heads: int, head_dim: int, layers: list[str]) -> KVCacheConfig:
    """One full-attention group over `layers`."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_dim, dtype=torch.float32)
    page = spec.page_size_bytes
    if "layers" in KVCacheTensor.__dataclass_fields__:  # one allocation, layer after layer (0.32)
        places = {"layers": list(layers), "layer_stride": page * num_blocks, "block_stride": page}
        tensors = [KVCacheTensor(size=page * num_blocks * len(layers), **places)]
    else:
        tensors = [KVCacheTensor(size=page * num_blocks, shared_by=[name]) for name in layers]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=[KVCacheGroupSpec(layers, spec)])


def build_scheduler(config: VllmConfig, cache: KVCacheConfig, *, block_size: int, scheduling: str, runner: str) -> Scheduler:
    """vLLM's own scheduler (it constructs the scheduler half of the connector itself)."""
    cls = AsyncScheduler if scheduling == "async" else Scheduler
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )
    scheduler.use_v2_model_runner = runner == "v2"
    # The tiny model has no vision tower; requests with multi-modal items need an encoder budget all the same.
    scheduler.max_num_encoder_input_tokens = ENCODER_BUDGET
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=ENCODER_BUDGET)
    return scheduler


def make_scheduler_output(**values: Any) -> SchedulerOutput:
    """SchedulerOutput. What the installed version wants besides is the empty value of its time; what it does not know yet is set too."""
    if "num_common_prefix_blocks" in SchedulerOutput.__dataclass_fields__:  # until 0.31, and unused since long before
        values.setdefault("num_common_prefix_blocks", [])
    known = SchedulerOutput.__dataclass_fields__
    made = SchedulerOutput(**{name: value for name, value in values.items() if name in known})
    for name in values.keys() - known:
        setattr(made, name, values[name])
    return made


def has_sync_loads(scheduler_output: SchedulerOutput) -> bool:
    """Whether loads must be there before this step's forward pass. Until 0.28 every load was started before it."""
    return "has_sync_kv_loads" not in SchedulerOutput.__dataclass_fields__ or scheduler_output.has_sync_kv_loads


def block_state(req_ids: set[str], get_block_ids: Any) -> Any:
    """What build_connector_meta may ask about blocks; None until 0.26, which had no such thing."""
    cls = getattr(output, "KVConnectorBlockState", None)
    if cls is None:
        return None
    fields = inspect.signature(cls).parameters
    if "block_ids" in fields:  # until 0.30: made whether somebody asks or not
        return cls({req_id: get_block_ids(req_id) for req_id in req_ids}, {})
    return cls(req_ids, get_block_ids, boundary_state_offloads={})


@lru_cache(maxsize=64)
def _hasher(block_size: int) -> Any:
    return get_request_block_hasher(block_size, sha256)


def build_request(
    req_id: str,
    tokens: list[int],
    *,
    max_tokens: int,
    block_size: int,
    stop: bool,
    salt: str | None,
    lora: str | None,
    items: list[dict[str, Any]],
    priority: int,
    params: dict[str, Any] | None,
    skip_reading_prefix_cache: bool,
    arrival: float,
) -> Request:
    """vLLM's own Request, as the engine core would make it."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0,
        stop_token_ids=[STOP_TOKEN] if stop else None,
        extra_args={"kv_transfer_params": params} if params is not None else None,
    )
    sampling.update_from_generation_config({}, 2)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=str(item["id"]),
            mm_position=PlaceholderRange(offset=int(item["at"]), length=int(item["length"])),
        )
        for item in items
    ]
    request = Request(
        request_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=arrival,
        mm_features=features or None,
        lora_request=LoRARequest(lora, 1 + sum(lora.encode()) % 1000, f"/adapters/{lora}") if lora else None,
        cache_salt=salt,
        priority=priority,
        block_hasher=_hasher(block_size),
        **({"eos_token_id": None} if "eos_token_id" in inspect.signature(Request.__init__).parameters else {}),  # until 0.17
    )
    if skip_reading_prefix_cache:
        request.skip_reading_prefix_cache = True
    for name, value in LATER_REQUEST_FIELDS.items():
        if not hasattr(request, name):
            setattr(request, name, value)
    return request


def transfer_config(connector: str, role: str, extra: dict[str, Any], module: str | None, policy: str, engine_id: str) -> KVTransferConfig:
    """KVTransferConfig for `connector` (class name or registered name; `module` for classes outside the registry)."""
    return KVTransferConfig(
        kv_connector=connector,
        kv_role=role,
        kv_connector_extra_config=extra,
        kv_connector_module_path=module,
        kv_load_failure_policy=policy,
        engine_id=engine_id,
    )


def force_preemption(scheduler: Any, request: Request) -> bool:
    """Preempt a running request between two steps, as the scheduler itself does when memory runs out; False if it would not now."""
    if hasattr(scheduler, "preempt"):
        return bool(scheduler.preempt(request.request_id))
    can_be_freed = getattr(scheduler, "_request_blocks_can_be_freed", None)  # since 0.31
    if can_be_freed is not None and not can_be_freed(request):
        return False
    scheduler.running.remove(request)
    if "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters:  # since 0.29
        scheduler._preempt_request(request, 0.0, drop_stale_output=scheduler.requires_kv_delivery)
    else:
        scheduler._preempt_request(request, 0.0)
    if not hasattr(scheduler, "reset_preempted_req_ids") and not hasattr(scheduler, "preempted_req_ids"):
        # Until 0.25 a victim could not come back in the next step, unless a reset had preempted it, which did this:
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return True


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
    scheduler.set_pause_state(int(paused) if own else PauseState.PAUSED_NEW if paused else PauseState.UNPAUSED)


def forward_context(metadata: Any, config: VllmConfig, **arguments: Any) -> Any:
    """set_forward_context with those arguments that it takes (`slot_mapping`: since 0.16)."""
    known = inspect.signature(set_forward_context).parameters
    return set_forward_context(metadata, config, **{name: value for name, value in arguments.items() if name in known})


def layer_cache(tensor: torch.Tensor) -> Any:
    """A layer's `kv_cache`: until 0.18 a list with one tensor per virtual engine."""
    return [tensor] if "virtual_engine" in ForwardContext.__dataclass_fields__ else tensor


def handle_preemptions(connector: Any, output: SchedulerOutput) -> None:
    """Call the hook as model runner V1 of the installed release does."""
    if PREEMPTIONS_BY_METADATA:
        connector.handle_preemptions(output.kv_connector_metadata)
    elif output.preempted_req_ids and "handle_preemptions" not in UNRECORDED:
        connector.handle_preemptions(output.preempted_req_ids)


def collecting(output: SchedulerOutput, *, defer: bool) -> Any:
    """The context in which model runner V1 computes; `defer`: the save is finished by finish_deferred (since 0.18)."""
    mixin = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
    return mixin(output, defer_finalize=defer) if CAN_DEFER else mixin(output)


def finish_deferred() -> None:
    """What `collecting(defer=True)` left to do after the drafter."""
    if CAN_DEFER:
        KVConnectorModelRunnerMixin.finalize_kv_connector()


def output_without_forward(collected: KVConnectorOutput) -> ModelRunnerOutput:
    """The result of a step without a forward pass; what is empty is left out (R201)."""
    if hasattr(ModelRunnerOutput, "with_kv_conn_output_only"):  # since 0.22
        return ModelRunnerOutput.with_kv_conn_output_only(collected)
    kept = None if collected.is_empty() else collected
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=kept)


def reuse_freed_first(queue: Any) -> None:
    """Make a FreeKVCacheBlockQueue hand out first what was freed last. Changes the instance."""
    append = queue.append_n

    def prepend(blocks: Any) -> None:
        if hasattr(queue, "prepend_n"):  # since 0.22
            queue.prepend_n(list(blocks))
        else:
            append([*blocks, *queue.popleft_n(queue.num_free_blocks)])

    queue.append_n = prepend


def finish_forward(active: Any) -> None:
    """ActiveKVConnector.finish_forward, which releases until 0.30 do not have."""
    if hasattr(active, "finish_forward"):
        active.finish_forward()


def post_forward(active: Any, output: SchedulerOutput) -> KVConnectorOutput | None:
    """ActiveKVConnector.post_forward: until 0.22 of the output, then of its finished request ids."""
    whole = "scheduler_output" in inspect.signature(active.post_forward).parameters
    return active.post_forward(output if whole else output.finished_req_ids)  # type: ignore[no-any-return]


def pre_forward(active: Any, output: SchedulerOutput, batch: Any, metadata: Any, load_arguments: dict[str, Any]) -> None:
    """ActiveKVConnector.pre_forward: until 0.30 of the output, in 0.31 with start_load_kv's arguments, then with what those are made of."""
    parameters = inspect.signature(active.pre_forward).parameters
    if "input_batch" in parameters:
        active.pre_forward(output, batch, metadata)
    elif len(parameters) > 1:
        active.pre_forward(**{**load_arguments, "scheduler_output": output})
    else:
        active.pre_forward(output)
