# SPDX-License-Identifier: Apache-2.0
"""Tests that vLLM does what spec/situations.yaml says that it does.

For every situation with `vllm: true`, a function of SHOWN brings it about with vLLM's own code,
and looks at the result in vLLM's objects: most on an engine core without a model, the policies on
engine `vllm` without policies. Where the entry has `read`, the test looks for the quoted line in
the installed vLLM instead; nothing is executed then.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.utils import select_common_block_size

from core_rig import REFERENCE, check_ok, run_case, select
from engine_core_rig import BLOCK, SAMPLED, NoModel, made_request, make_config, start
from kvconform.compat import installed
from kvconform.contract.case import OPTIONS, Layout
from kvconform.contract.loader import load_spec
from kvconform.contract.situation import situations

SPEC = load_spec()
DOCUMENT = Path(__file__).parents[2] / "docs" / "decisions" / "0022-three-kinds-of-failure.md"
Trace = list[dict[str, Any]]
Steps = list[dict[str, Any]]


@dataclass
class Bench:
    """Where a situation is brought about."""

    tmp: Path
    patch: pytest.MonkeyPatch


SHOWN: dict[str, Callable[[Bench], None]] = {}
"""What brings a situation about, and checks that it came about."""


def brings_about(name: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    def register(shows: Callable[[Bench], None]) -> Callable[[Bench], None]:
        assert name not in SHOWN
        SHOWN[name] = shows
        return shows

    return register


@pytest.fixture(scope="module", autouse=True)
def _groups_stay() -> Iterator[None]:
    """A shut down engine core ends the process's parallel groups, which other tests use.

    The patch outlives all engine cores: `monkeypatch` keeps some until it is undone.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        yield
        gc.collect()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    return Bench(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", [name for name, each in situations().items() if each.vllm])
def test_vllm_does_it(name: str, bench: Bench) -> None:
    source, read = situations()[name].source, situations()[name].read
    if read is None:
        assert name in SHOWN, "no test brings it about, and the entry quotes no line (`read`)"
        SHOWN[name](bench)
        return
    assert name not in SHOWN, "a test brings it about: the entry needs no `read`"
    text = installed.text(source.file, source.symbol) or ""
    assert read.line in [line.strip() for line in text.splitlines()]


def test_only_what_vllm_does_is_brought_about() -> None:
    assert SHOWN.keys() <= {name for name, each in situations().items() if each.vllm}


def test_the_decision_names_the_situations_that_no_test_brings_about() -> None:
    read = [each.id for each in situations().values() if each.vllm and each.read is not None]
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "Some (" + ", ".join(f"`{name}`" for name in read) + ") need" in text


def test_a_field_that_needs_no_situation_is_an_option_of_vllm() -> None:
    assert set(OPTIONS.values()) <= {field.name for field in fields(EngineArgs)}


# -- policies


def add(req: str, prompt: Any, **more: Any) -> dict[str, Any]:
    return {"add": {"req": req, "prompt": prompt, **more}}


RUN: dict[str, Any] = {"run": {}}


def trace_of(bench: Bench, steps: Steps, **config: Any) -> Trace:
    """Run steps on engine `vllm` without policies."""
    run = run_case(REFERENCE, steps, bench.tmp, engine="vllm", config=config)
    check_ok(run)
    assert run.trace[0]["policies"] == []
    return run.trace


@brings_about("permute-blocks")
def blocks_that_are_allocated_together_are_not_in_ascending_order(bench: Bench) -> None:
    steps = [add("a", 13), add("b", 9), RUN, {"drop-local": {}}, add("c", 26), RUN]
    trace = trace_of(bench, steps, num_blocks=9)
    tables = [e["table"] for e in select(trace, "req.scheduled")]
    assert any(b < a for table in tables for a, b in pairwise(table))


@brings_about("deny-first-alloc")
def a_request_is_looked_up_twice_before_its_first_allocation(bench: Bench) -> None:
    steps = [add("a", 13, max_tokens=8), {"step": 1}, add("b", 17), RUN]
    trace = trace_of(bench, steps, num_blocks=8)
    kinds = [e["kind"] for e in trace if e["kind"] in ("lookup", "alloc") and e["req"] == "b"]
    assert kinds[:2] == ["lookup", "lookup"] and "alloc" in kinds


@brings_about("ignore-hits")
def a_hit_is_answered_and_nothing_is_granted(bench: Bench) -> None:
    again = add("b", {"same": "a"}, skip_reading_prefix_cache=True)
    trace = trace_of(bench, [add("a", 13), RUN, {"drop-local": {}}, again, RUN])
    (answer,) = [e["tokens"] for e in select(trace, "lookup", req="b")]
    assert answer and {e["external"] for e in select(trace, "alloc", req="b")} == {0}


@brings_about("split-prefill")
def a_chunk_ends_within_a_block(bench: Bench) -> None:
    trace = trace_of(bench, [add("a", 13), RUN], budget=3)
    ends = [e["computed"] + e["scheduled"] for e in select(trace, "req.scheduled", req="a")]
    assert any(end % BLOCK for end in ends if end < 13)


@brings_about("late-workers")
def steps_wait_for_worker_processes_and_the_engine_core_does_not(bench: Bench) -> None:
    executor = object.__new__(MultiprocExecutor)  # its queues without its processes
    steps: SimpleQueue[Any] = SimpleQueue()
    answers: SimpleQueue[Any] = SimpleQueue()
    executor.is_failed = False
    executor.futures_queue = deque()
    bench.patch.setattr(
        executor, "rpc_broadcast_mq", SimpleNamespace(enqueue=steps.put), raising=False
    )
    dequeue = SimpleNamespace(dequeue=lambda timeout: answers.get(timeout=5))
    bench.patch.setattr(executor, "response_mqs", [dequeue], raising=False)
    first, second = (
        executor.collective_rpc("execute_model", args=(n,), non_block=True, unique_reply_rank=0)
        for n in (1, 2)
    )
    assert steps.qsize() == 2 and not first.done() and not second.done()
    for _ in range(2):  # the worker takes them up now, in their order
        _, (number,), _, _ = steps.get()
        answers.put((WorkerProc.ResponseStatus.SUCCESS, f"output {number}"))
    assert (first.result(), second.result()) == ("output 1", "output 2")


@brings_about("late-threads")
def ranks_report_a_load_in_different_steps(bench: Bench) -> None:
    joined = KVOutputAggregator(expected_finished_count=2)
    done = []
    for loaded in ([], []), (["a"], []), ([], []), ([], ["a"]):
        reports = [KVConnectorOutput(finished_recving=set(ids)) for ids in loaded]
        outputs = [ModelRunnerOutput([], {}, kv_connector_output=each) for each in reports]
        done.append(joined.aggregate(outputs).kv_connector_output.finished_recving)
    assert done == [None, None, None, {"a"}]


# -- steps


@brings_about("schedule")
def a_step_is_scheduled_before_the_last_one_has_an_output(bench: Bench) -> None:
    core = start(make_config(asynchronous=True))
    core.add("a", 9)
    core.step()
    request = core.request("a")
    assert len(core.outputs) == 1
    assert (request.num_output_tokens, request.num_output_placeholders) == (0, 1)
    core.step()
    assert core.most_in_flight == 2
    assert list(request.output_token_ids) == [SAMPLED]


@brings_about("land")
def a_paused_engine_core_processes_what_is_in_flight(bench: Bench) -> None:
    core = start(make_config(asynchronous=True))
    core.add("a", 9)
    core.step()
    core.engine.pause_scheduler("keep", clear_cache=False)
    core.step()
    assert len(core.outputs) == 1 and not core.engine.batch_queue
    assert list(core.request("a").output_token_ids) == [SAMPLED]


@brings_about("abort")
def a_request_with_a_step_or_a_load_in_flight_is_aborted(bench: Bench) -> None:
    core = start(make_config(asynchronous=True))
    core.half.offers["b"] = (8, True)
    core.worker.frozen = True
    core.add("a", 9)
    core.add("b", range(500, 513))
    core.step()
    assert core.request("a").num_output_placeholders == 1
    assert core.request("b").status == RequestStatus.WAITING_FOR_REMOTE_KVS
    core.engine.abort_requests(["a", "b"])
    assert core.engine.batch_queue and core.worker.loading == ["b"]
    assert core.half.called("finished") == ["FINISHED_ABORTED"] * 2
    core.worker.frozen = False
    core.run()
    assert not core.scheduler.requests


@brings_about("grammar")
def a_request_is_not_admitted_before_its_grammar(bench: Bench) -> None:
    core = start(make_config())
    asked = made_request("a", 9, structured_outputs=StructuredOutputsParams(regex="a+"))
    request = Request.from_engine_core_request(asked, core.engine.request_block_hasher)
    assert request.structured_output_request is not None
    compiled: Future[Any] = Future()  # the manager of the engine core hands one out, too
    request.structured_output_request.grammar = compiled
    core.engine.add_request(request)
    core.step(2)
    assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert not core.half.called("lookup")
    compiled.set_result(object())
    core.scheduler.schedule()
    assert core.running == ["a"] and core.half.called("lookup")


@brings_about("continue")
def a_session_gets_more_input(bench: Bench) -> None:
    core = start(make_config())
    core.add("a", 9, max_tokens=3, resumable=True)
    core.run()
    request = core.request("a")
    assert request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert list(request.output_token_ids) == [SAMPLED] * 3
    core.add("a", range(300, 305), resumable=True)
    core.step()
    assert request.prompt_token_ids == [*range(100, 109), SAMPLED, SAMPLED, *range(300, 305)]


@brings_about("preempt")
def a_request_is_preempted_and_none_is_admitted_in_that_step(bench: Bench) -> None:
    core = start(make_config(num_blocks=6, max_seqs=2, policy="priority"))
    core.add("a", range(100, 108), priority=0)
    core.add("b", range(200, 208), priority=2)
    core.step()
    core.add("c", range(300, 303), priority=1)
    while not core.outputs or not core.outputs[-1].preempted_req_ids:
        core.step()
    assert core.outputs[-1].preempted_req_ids == {"b"}
    assert core.request("b").num_preemptions == 1
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert core.running == ["a"] and core.request("c").status == RequestStatus.WAITING
    core.step()
    assert core.running == ["a", "c"]


@brings_about("drop-local")
def the_local_cache_is_emptied_by_a_reset_and_by_other_requests(bench: Bench) -> None:
    for others_need_room in (False, True):
        core = start(make_config(num_blocks=8))
        core.add("a", 13)
        core.run()
        core.add("b", 13)
        core.run()
        if others_need_room:
            core.add("other", range(500, 527), max_tokens=1)
            core.run()
        else:
            assert core.engine.reset_prefix_cache()
        core.add("c", 13)
        core.run()
        assert [call["local"] for call in core.half.called("lookup", "b")] == [12]
        assert [call["local"] for call in core.half.called("lookup", "c")] == [0]
        assert not core.half.called("reset")


@brings_about("reset")
def the_cache_is_reset_with_running_requests_and_the_connectors(bench: Bench) -> None:
    core = start(make_config())
    core.add("a", 13)
    core.step()
    assert core.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert core.request("a").status == RequestStatus.PREEMPTED
    assert len(core.half.called("reset")) == 1
    core.run()
    assert [call["local"] for call in core.half.called("lookup", "a")] == [0, 0]


@brings_about("idle")
def steps_without_a_request_are_executed(bench: Bench) -> None:
    core = start(make_config())
    core.half.offers["a"] = (8, True)
    core.half.keeps_blocks = core.worker.keeps_blocks = core.worker.frozen = True
    core.add("a", 13, max_tokens=1)
    core.step(3)
    assert core.request("a").status == RequestStatus.WAITING_FOR_REMOTE_KVS
    core.worker.frozen = False
    core.step(2)
    core.worker.frozen = True
    core.step(3)
    assert core.scheduler.has_finished_requests()
    scheduled = [output.total_num_scheduled_tokens for output in core.outputs]
    assert scheduled == [0, 0, 0, 0, 5, 0, 0, 0]
    assert core.request("a").status == RequestStatus.FINISHED_LENGTH_CAPPED
    core.worker.frozen = False
    core.run()
    assert not core.scheduler.requests


@brings_about("soak")
def the_same_request_comes_again_under_new_ids(bench: Bench) -> None:
    core = start(make_config())
    pool = core.scheduler.kv_cache_manager.block_pool
    free = []
    for _ in range(6):
        request = made_request("client", 13)
        InputProcessor.assign_request_id(request)
        core.take(request)
        core.run()
        free.append(pool.get_num_free_blocks())
    lookups = [(who, value["local"]) for hook, who, value in core.half.calls if hook == "lookup"]
    assert len({who for who, _ in lookups}) == 6
    assert [local for _, local in lookups] == [0, 12, 12, 12, 12, 12]
    assert len(set(free)) == 1


@brings_about("restart")
def a_new_engine_finds_what_another_one_has_stored(bench: Bench) -> None:
    config = make_config(store=bench.tmp / "store")
    first = start(config)
    first.add("a", 13)
    first.run()
    first.engine.shutdown()
    assert first.half.is_down
    second = start(make_config(store=bench.tmp / "store"))
    assert second.half is not first.half and second.worker is not first.worker
    second.add("b", 13)
    second.run()
    assert second.half.called("alloc", "b") == [12]


@brings_about("shutdown")
def an_engine_is_shut_down_with_requests_and_loads(bench: Bench) -> None:
    client = InprocClient(make_config(), NoModel, log_stats=False)
    envs.disable_envs_cache()
    scheduler: Any = client.engine_core.scheduler
    half, worker = scheduler.connector, client.engine_core.model_executor.worker
    half.offers["b"] = (8, True)
    worker.frozen = True
    client.add_request(made_request("a", 9))
    client.add_request(made_request("b", range(500, 513)))
    client.get_output()
    client.shutdown()
    assert half.is_down and worker.loading == ["b"]
    assert scheduler.requests.keys() == {"a", "b"} and not half.called("finished")


@brings_about("fail-load")
def blocks_that_were_not_loaded_are_computed_or_end_the_request(bench: Bench) -> None:
    for policy in ("recompute", "fail"):
        core = start(make_config(on_failure=policy))
        core.half.offers["a"] = (12, False)
        core.worker.broken = True
        core.add("a", 13)
        core.step()
        (reported,) = core.half.called("update")
        assert reported.invalid_block_ids
        if policy == "fail":
            assert core.half.called("finished", "a") == ["FINISHED_ERROR"]
            continue
        assert core.request("a").num_computed_tokens == 0
        core.step()
        first, second = core.outputs
        assert first.num_scheduled_tokens == {"a": 1}
        assert second.num_scheduled_tokens == {"a": 13}


@brings_about("lookup-only")
def a_request_is_looked_up_and_gets_no_blocks(bench: Bench) -> None:
    core = start(make_config(num_blocks=6))
    core.add("a", 13)
    core.add("b", range(500, 509))
    core.step()
    assert core.half.called("lookup", "b") and not core.half.called("alloc", "b")
    assert core.running == ["a"]


@brings_about("reorder")
def running_requests_change_their_order(bench: Bench) -> None:
    core = start(make_config(num_blocks=8, policy="priority"))
    for req, priority, count in (("a", 2, 12), ("b", 0, 12), ("c", 1, 3)):
        core.add(req, range(100 * ord(req), 100 * ord(req) + 8), count, priority=priority)
        if req == "a":
            core.step()
    orders = []
    while len(core.half.called("finished")) < 2:
        core.step()
        orders.append(core.running)
    assert ["a", "b", "c"] in orders
    assert ["b", "a"] in orders


@brings_about("pause")
def a_paused_scheduler_admits_no_request(bench: Bench) -> None:
    core = start(make_config())
    core.add("a", 9, max_tokens=9)
    core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    core.add("b", 9)
    core.step(2)
    assert [output.num_scheduled_tokens for output in core.outputs[1:]] == [{"a": 1}] * 2
    assert core.request("b").status == RequestStatus.WAITING
    assert not core.half.called("lookup", "b")


@brings_about("resume")
def a_resumed_engine_core_admits_requests(bench: Bench) -> None:
    core = start(make_config())
    core.engine.pause_scheduler("keep", clear_cache=False)
    core.add("a", 9)
    core.step(2)
    assert not core.half.called("lookup")
    core.engine.resume_scheduler()
    core.step()
    assert core.running == ["a"] and core.half.called("lookup")


# -- axes


@brings_about("scheduling")
def scheduling_is_synchronous_or_asynchronous(bench: Bench) -> None:
    for asynchronous, scheduler, count in ((False, Scheduler, 1), (True, AsyncScheduler, 2)):
        core = start(make_config(asynchronous=asynchronous))
        core.add("a", 9)
        core.run()
        assert type(core.scheduler) is scheduler
        assert core.most_in_flight == count


@brings_about("runner")
def a_new_request_has_what_the_model_runner_reads(bench: Bench) -> None:
    for runner in (False, True):
        config = make_config()
        bench.patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner)))
        core = start(config)
        core.add("a", 9)
        core.step()
        (new,) = core.outputs[0].scheduled_new_reqs
        assert (new.prefill_token_ids is not None) == runner


@brings_about("depth")
def up_to_four_steps_are_in_flight(bench: Bench) -> None:
    for depth, asynchronous, stages in ((1, False, 1), (2, True, 1), (3, True, 2), (4, True, 3)):
        config = make_config(asynchronous=asynchronous, stages=stages, budget=8)
        bench.patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        core = start(config)
        core.add("a", 60)
        core.run()
        assert core.most_in_flight == depth
    runs = [each for case in SPEC.cases.values() for each in case.variants()]
    assert max(each.depth for each in runs) == depth


@brings_about("block_size")
def a_block_holds_as_many_tokens_as_configured(bench: Bench) -> None:
    runs = [each for case in SPEC.cases.values() for each in case.variants()]
    for size in sorted({each.block_size for each in runs}):
        core = start(make_config(block_size=size))
        core.add("a", 13)
        core.step()
        (table,) = core.scheduler.kv_cache_manager.get_block_ids("a")
        assert len(table) == -(-13 // size)


# -- configurations


@brings_about("engines")
def what_a_producer_returns_is_handed_to_a_consumer(bench: Bench) -> None:
    producer = start(make_config(role="kv_producer"))
    producer.half.keeps_blocks = producer.worker.keeps_blocks = True
    producer.add("p", 13, max_tokens=1)
    producer.run()
    params = producer.returned["p"]
    assert params["remote_request_id"] == "p"
    consumer = start(make_config(role="kv_consumer"))
    consumer.add("d", 13, extra_args={"kv_transfer_params": params})
    consumer.step()
    assert [call["params"] for call in consumer.half.called("lookup")] == [params]


class TwoKinds(NoModel):
    window = 8


@brings_about("groups")
def a_request_has_a_block_table_per_kind_of_layer(bench: Bench) -> None:
    core = start(make_config(num_blocks=256, max_model_len=60), TwoKinds)
    core.add("a", 30)
    core.run()
    (tables,) = core.half.called("tables", "a")
    assert [len(table) for table in tables] == [9, 9]
    full, sliding = tables
    assert 0 in sliding and 0 not in full  # the null block stands for what has left the window


@brings_about("kernel_block_size")
def a_large_block_is_split_into_those_of_the_attention(bench: Bench) -> None:
    assert select_common_block_size(64, [CPUMLABackend]) == 16
    assert select_common_block_size(16, [CPUMLABackend]) == 16


class TwoWidths(NoModel):
    wide = 2

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self.pages = [
            spec.page_size_bytes
            for spec in kv_cache_configs[0].kv_cache_groups[0].kv_cache_spec.kv_cache_specs.values()
        ]
        super().initialize_from_config(kv_cache_configs)


@brings_about("narrow_layer")
def layers_with_unlike_heads_are_in_one_group(bench: Bench) -> None:
    core = start(make_config(), TwoWidths)
    [group] = core.scheduler.kv_cache_config.kv_cache_groups
    assert group.layer_names == ["layer.0", "layer.1"]
    assert group.kv_cache_spec.num_kv_heads == 1  # the scheduler's is that of the first layer
    narrow, wide = core.engine.model_executor.pages
    assert wide == 2 * narrow


@brings_about("used_blocks")
def blocks_that_were_in_use_are_handed_out_last(bench: Bench) -> None:
    core = start(make_config(num_blocks=64))
    highest = []
    for number, name in enumerate("abcd"):
        core.add(name, range(100 * number, 100 * number + 3 * BLOCK))
        core.run()
        (table,) = core.half.called("tables", name)[0]
        highest.append(max(table))
    assert highest == sorted(set(highest))


@brings_about("layout")
def the_engine_core_takes_the_layout_that_the_attention_supports(bench: Bench) -> None:
    for name in get_args(Layout):
        core = start(make_config(), type("Other", (NoModel,), {"layout": name}))
        assert core.scheduler.kv_cache_config.kv_cache_layout == name


@brings_about("multi")
def children_of_multi_connector_are_asked_and_one_loads(bench: Bench) -> None:
    core = start(make_config(children=2))
    children = core.half._connectors
    for child in children:
        child.offers["a"] = (8, False)
    core.add("a", 13)
    core.step()
    assert [len(child.called("lookup", "a")) for child in children] == [1, 1]
    assert [child.called("alloc", "a") for child in children] == [[8], [0]]


# -- other properties of cases


class Sent:
    """The engine core's client of a front end: keeps what is sent."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    def add_request(self, request: Any) -> None:
        (message,) = MsgpackEncoder().encode(request)
        self.requests.append(message)


@brings_about("replayed-params")
def samples_of_one_request_have_the_same_params_one_after_the_other(bench: Bench) -> None:
    params = {"do_remote_prefill": True, "remote_request_id": "p"}
    asked = made_request("d", 13, n=2, extra_args={"kv_transfer_params": params})
    config = make_config(role="kv_consumer", max_seqs=1)
    front = LLMEngine(config, NoModel, log_stats=False, multiprocess_mode=False)
    envs.disable_envs_cache()
    sent = Sent()
    bench.patch.setattr(front, "engine_core", sent)
    assert isinstance(asked.sampling_params, SamplingParams)
    front.add_request("d", asked, asked.sampling_params)
    core = start(config)
    for message in sent.requests:
        core.take(MsgpackDecoder(type(asked)).decode(message))
    core.run()
    order = [(hook, value) for hook, _, value in core.half.calls if hook in ("lookup", "finished")]
    assert [hook for hook, _ in order] == ["lookup", "finished"] * 2
    assert [value["params"] for hook, value in order if hook == "lookup"] == [params] * 2


class Client:
    """The engine client of vLLM's API server: keeps the requests that are submitted."""

    errored = False
    renderer = SimpleNamespace(tokenizer=None)
    input_processor = None

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.requests: list[Any] = []

    def check_admission(self, count: int) -> None: ...

    def generate(self, prompt: Any, params: SamplingParams, name: str, **_: Any) -> Any:
        asked = made_request(name, prompt["prompt_token_ids"], extra_args=params.extra_args)
        self.requests.append(asked)
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[Any]:
        return
        yield


class Tokens:
    """Renders prompts that are lists of tokens."""

    async def render_completion(self, request: CompletionRequest) -> list[dict[str, Any]]:
        return [{"type": "token", "prompt_token_ids": each} for each in request.prompt or []]


@brings_about("shared-params")
def the_prompts_of_one_http_request_have_the_same_params(bench: Bench) -> None:
    params = {"do_remote_decode": True, "transfer_id": "mine"}
    prompts = [list(range(100, 113)), list(range(500, 518))]
    config = make_config(role="kv_producer")
    client: Any = Client(config)
    models: Any = SimpleNamespace(lora_requests={}, model_name=lambda _: "m")
    renderer: Any = Tokens()
    server = OpenAIServingCompletion(client, models, online_renderer=renderer, request_logger=None)
    body = CompletionRequest(prompt=prompts, stream=True, kv_transfer_params=params)
    asyncio.run(server.create_completion(body))
    core = start(config)
    for request in client.requests:
        core.take(request)
    core.step()
    assert [new.prompt_token_ids for new in core.outputs[0].scheduled_new_reqs] == prompts
    assert [call["params"] for call in core.half.called("lookup")] == [params] * 2


@brings_about("unknown-peer")
def params_outlive_the_producer_that_returned_them(bench: Bench) -> None:
    kept = []
    for _ in range(2):
        producer = start(make_config(role="kv_producer"))
        producer.half.keeps_blocks = producer.worker.keeps_blocks = True
        request = made_request("p", 13, max_tokens=1)
        InputProcessor.assign_request_id(request)
        producer.take(request)
        producer.run()
        kept.append(producer.returned[request.request_id])
        producer.engine.shutdown()
    before, after = kept
    assert before["remote_engine_id"] != after["remote_engine_id"]
    assert before["remote_request_id"] != after["remote_request_id"]
    consumer = start(make_config(role="kv_consumer"))
    consumer.add("d", 13, extra_args={"kv_transfer_params": before})
    consumer.step()
    assert [call["params"] for call in consumer.half.called("lookup")] == [before]


# -- what the suite runs


@pytest.mark.parametrize(
    "name", sorted(name for name, each in situations().items() if each.of == "step" and each.vllm)
)
def test_a_case_without_policies_does_the_step_on_engine_vllm(name: str) -> None:
    """Whether its point is reached, the gate says; tests/dev/test_defects.py runs all of them."""
    found = [
        case.id
        for case in SPEC.cases.values()
        if name in case.situations and not case.policies and "vllm" in case.engines
    ]
    assert found


@pytest.mark.parametrize("axis", ["scheduling", "runner", "depth", "block_size"])
def test_every_point_of_an_axis_is_run_on_engine_vllm(axis: str) -> None:
    variants = [each for case in SPEC.cases.values() for each in case.variants()]
    points = {getattr(each, axis) for each in variants}
    assert points == {getattr(each, axis) for each in variants if each.engine == "vllm"}


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_preempted_request_does_not_resume_in_the_next_step(
    engine: str, scheduling: str, tmp_path: Path
) -> None:
    """As in vLLM: a step with a preemption admits no waiting request."""
    steps = [add("a", 9, max_tokens=6), {"step": 3}, {"preempt": "a"}, add("b", 5), RUN]
    run = run_case(REFERENCE, steps, tmp_path, engine=engine, scheduling=scheduling)
    check_ok(run)
    (preempted,) = [e["step"] for e in select(run.trace, "step.scheduled") if e["preempted"]]
    scheduled = [e["step"] for e in select(run.trace, "req.scheduled")]
    assert preempted not in scheduled
    assert preempted + 1 in scheduled
