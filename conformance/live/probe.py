# SPDX-License-Identifier: Apache-2.0
"""The probe of a vLLM process: records its engine, scheduler, worker and connector as a trace.

It patches the places in vLLM where these are made and run.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_THREADS = torch.get_num_threads()
from kvconform.compat import vllm_api  # noqa: E402
from kvconform.contract.capabilities import EXACT, Tolerances  # noqa: E402
from kvconform.contract.events import crash, lifecycle, run_start  # noqa: E402

# compat restricts torch to one thread; here vLLM's own model computes.
torch.set_num_threads(_THREADS)

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

from kvconform.engine.halves import noted  # noqa: E402
from kvconform.live.book import Book  # noqa: E402
from kvconform.live.job import BOOK, SHARED, TOLERANCES  # noqa: E402
from kvconform.live.scheduler_probe import SchedulerProbe  # noqa: E402
from kvconform.live.trace import StreamTrace  # noqa: E402
from kvconform.live.worker_probe import Wishes, WorkerProbe  # noqa: E402
from kvconform.observe.probe import Patch, Probe, wrap_instance_hooks  # noqa: E402

POISON = "KVCONFORM_LIVE_POISON"
"""Environment variable: "0" leaves newly allocated blocks without poison."""
PATIENCE = 2.0
"""Seconds that the connector's threads have to end after the shutdown."""
_recorder: Recorder | None = None


def install(directory: str) -> None:
    """Watch vLLM in this process from now on; write the trace into `directory`. Idempotent."""
    global _recorder
    if _recorder is None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        _recorder = Recorder(Path(directory) / f"{os.getpid()}.jsonl")
        _recorder.patch()


def recorder() -> Recorder | None:
    """Return the recorder of this process; None if it is not watched."""
    return _recorder


class Recorder:
    """The trace, probe, scheduler and worker of one process.

    `patch` changes classes of vLLM for good.
    """

    def __init__(self, path: Path) -> None:
        self.trace = StreamTrace(path)
        self.probe = Probe(self.trace)
        Probe.active = self.probe
        declared = os.environ.get(TOLERANCES)
        tolerances = EXACT if declared is None else Tolerances.decode(declared)
        self.book = Book(tolerances.lossy, tolerances.reused)
        self.wishes = Wishes(poison=os.environ.get(POISON) != "0")
        self.scheduler: SchedulerProbe | None = None
        self.worker: WorkerProbe | None = None
        self.threads: list[threading.Thread] = []
        self._patched: set[type] = set()
        self._worker_of: Any = None
        self._constructing = 0
        self._joining = False
        self._dead = False

    def patch(self) -> None:
        """Wrap what vLLM calls once per engine, and what it calls once per step."""
        factory: Any = vllm_api.KVConnectorFactory
        factory.create_connector = self._create(factory.create_connector)
        _wrap(Scheduler, "__init__", self._scheduler)
        _wrap(EngineCore, "shutdown", self._shutdown)
        for name in ("step", "step_with_batch_queue"):
            _wrap(EngineCore, name, self._engine_step)
        _wrap(Worker, "execute_model", self._execute)
        _wrap(Worker, "sample_tokens", self._sample)
        _wrap(KVOutputAggregator, "aggregate", self._aggregate)
        _wrap(threading.Thread, "start", self._thread)
        atexit.register(self._exit)

    # -- what is made
    def _create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap KVConnectorFactory.create_connector.

        A connector class is patched before its first instance is made.
        """

        @functools.wraps(original)
        def create(config: Any, role: Any, kv_cache_config: Any) -> Any:
            if self._constructing:
                return original(config=config, role=role, kv_cache_config=kv_cache_config)
            cls: Any = vllm_api.KVConnectorFactory.get_connector_class(config.kv_transfer_config)
            if cls not in self._patched:
                self._patched.add(cls)
                Patch(cls).__enter__()
            self._constructing += 1
            try:
                with noted(self.trace, "start", cls):
                    connector = original(config=config, role=role, kv_cache_config=kv_cache_config)
            finally:
                self._constructing -= 1
            wrap_instance_hooks(connector)
            return connector

        return create

    def _scheduler(
        self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Wrap the constructor of vLLM's Scheduler."""
        config: Any = kwargs.get("vllm_config", args[0] if args else None)
        self._start(config, kwargs.get("kv_cache_config", args[1] if len(args) > 1 else None))
        original(scheduler, *args, **kwargs)
        together = config.parallel_config.distributed_executor_backend in (None, "uni")
        self.scheduler = SchedulerProbe(self.trace, self.probe, scheduler, together=together)
        if scheduler.connector is not None and (path := Path(os.environ.get(BOOK, ""))).is_file():
            self.book.load(path)
            if os.environ.get(SHARED) == "1":
                self.scheduler.memory.computed(*map(list, self.book.computed))

    def _start(self, config: Any, cache: Any) -> None:
        """Emit run.start with what this process knows; for a second engine, emit a restart."""
        if self.scheduler is not None:
            self.trace.emit("engine.lifecycle", **lifecycle("restart"))
            return
        transfer = config.kv_transfer_config
        parallel = config.parallel_config
        scheduling = config.scheduler_config
        groups = cache.kv_cache_groups
        fields = run_start(
            seed=config.model_config.seed or 0,
            engine="live",
            case="live",
            scheduling="async" if scheduling.async_scheduling else "sync",
            runner="v2" if getattr(config, "use_v2_model_runner", False) is True else "v1",
            depth=config.max_concurrent_batches,
            vllm=vllm_api.VLLM_VERSION,
            block_size=groups[0].kv_cache_spec.block_size if groups else 0,
            hash_size=getattr(cache, "hash_block_size", None),
            num_blocks=cache.num_blocks,
            connector=None if transfer is None else transfer.kv_connector,
            spec_tokens=config.num_speculative_tokens if config.speculative_config else 0,
            role="kv_both" if transfer is None else transfer.kv_role,
            failure_policy="recompute" if transfer is None else transfer.kv_load_failure_policy,
            groups=len(groups),
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            stages=parallel.pipeline_parallel_size,
            context_ranks=parallel.decode_context_parallel_size,
            pooling=config.model_config.runner_type == "pooling",
            device=str(config.device_config.device_type),
        )
        self.trace.emit("run.start", **fields)

    def _thread(
        self, original: Callable[..., Any], thread: threading.Thread, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap Thread.start; keep the threads of the connector.

        These are started while a hook or the constructor of the connector runs.
        """
        if self._constructing or self.probe.depth:
            self.threads.append(thread)
        return original(thread, *args, **kwargs)

    # -- what is run
    def _engine_step(
        self, original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap a step of EngineCore; emit engine.crash if it raises."""
        try:
            return original(core, *args, **kwargs)
        except BaseException as error:
            self._crashed(error)
            raise

    def _execute(
        self, original: Callable[..., Any], worker: Any, output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap Worker.execute_model. The step ends here, or in sample_tokens if that follows."""
        if self.worker is None or self._worker_of is not worker:
            self._worker_of = worker
            self.worker = WorkerProbe(
                self.trace, self.probe, worker, self.book, self.wishes, alone=self.scheduler is None
            )
        self.worker.begin(output)
        try:
            result = original(worker, output, *args, **kwargs)
        except BaseException:
            self.worker.end(failed=True)
            raise
        if result is not None or not output.total_num_scheduled_tokens:
            self.worker.end()
        return result

    def _aggregate(
        self,
        original: Callable[..., Any],
        aggregator: Any,
        outputs: list[Any],
        output_rank: int = 0,
    ) -> Any:
        """Wrap KVOutputAggregator.aggregate; have the probe join reports of other processes.

        The original is called if all is in one process, and while the probe itself joins reports.
        """
        probe = self.scheduler
        if probe is None or probe.together or self._joining or not any(outputs):
            return original(aggregator, outputs, output_rank)
        self._joining = True
        try:
            return probe.join(aggregator, outputs, output_rank)
        finally:
            self._joining = False

    def _sample(self, original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap Worker.sample_tokens, which ends a step of the worker."""
        result = original(worker, *args, **kwargs)
        if self.worker is not None:
            self.worker.end()
        return result

    def _crashed(self, error: BaseException) -> None:
        """Emit engine.crash, once per process; name the hook if the error came from one."""
        if self._dead:
            return
        self._dead = True
        from kvconform.engine.fault import blame

        where = blame(error)
        hook = None
        last = self.probe.last_error
        if last is not None and last[1] in (error, error.__cause__, error.__context__):
            where = "hook"
            hook = last[0]
        self.trace.emit("engine.crash", **crash(where, error, hook))

    def _shutdown(self, original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap EngineCore.shutdown; emit run.end before, and the shutdown as an event."""
        if (
            self.scheduler is None
            or getattr(core, "scheduler", None) is not self.scheduler.scheduler
        ):
            return original(core, *args, **kwargs)
        end = self._end()
        if core.scheduler.connector is None:
            return original(core, *args, **kwargs)
        try:
            with noted(self.trace, "shutdown"):
                return original(core, *args, **kwargs)
        finally:
            if end is not None:
                self.trace.amend(end, threads=self._threads_left())

    def _threads_left(self) -> int:
        """Return how many threads of the connector do not end within PATIENCE seconds."""
        limit = time.monotonic() + PATIENCE
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))
        return sum(thread.is_alive() for thread in self.threads)

    def _end(self) -> dict[str, Any] | None:
        """Emit run.end once per engine, and write the book of a baseline run."""
        if self.scheduler is None or self.scheduler.ended:
            return None
        self.scheduler.ended = True
        threads = sum(thread.is_alive() for thread in self.threads)
        end = self.scheduler.end(threads=threads, crashed=self._dead)
        if self.scheduler.scheduler.connector is None and os.environ.get(BOOK):
            if self.worker is not None and self.worker.oracle is not None:
                self.worker.oracle.enter(self.scheduler.pending)
            self.book.computed = self.scheduler.memory.ever, self.scheduler.memory.plain
            self.book.save(Path(os.environ[BOOK]))
        return end

    def _exit(self) -> None:
        """Emit run.end when the process exits, if its engine was not shut down."""
        self._end()


def _wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of a class by `around(original, self, ...)`.

    This includes subclasses that do not override it.
    """
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(cls, name, wrapped)
