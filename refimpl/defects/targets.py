# SPDX-License-Identifier: Apache-2.0
"""Methods and functions of our engine that planted faults change."""

from __future__ import annotations

from kvconform.refimpl.faulty import Target

# The state of the reference engine, and the lives of its requests.
ENGINE = "kvconform.refimpl.engine:Engine"
ADD_REQUEST = Target(f"{ENGINE}.add_request")
FINISH_REQUESTS = Target(f"{ENGINE}.finish_requests")
END = Target(f"{ENGINE}.end")
FREES_AT_ONCE = Target(f"{ENGINE}.frees_at_once")
PREEMPT_NOW = Target(f"{ENGINE}.preempt_now")
RESET_PREFIX_CACHE = Target(f"{ENGINE}.reset_prefix_cache")

# Its scheduler: a step.
SCHEDULER = "kvconform.refimpl.scheduler"
SCHEDULE = Target(f"{SCHEDULER}:ReferenceScheduler.schedule")
NEXT_TOKENS = Target(f"{SCHEDULER}:ReferenceScheduler._next_tokens")
ADVANCE = Target(f"{SCHEDULER}:ReferenceScheduler._advance")
ADMIT_WAITING = Target(f"{SCHEDULER}:admit_waiting")
BUILD_OUTPUT = Target(f"{SCHEDULER}:build_output")
LAND = Target(f"{SCHEDULER}:land")

# Admission to a step, and what happens when a step lands.
ADMISSION = "kvconform.refimpl.admission"
IS_READY = Target(f"{ADMISSION}:_is_ready")
LOOK_UP = Target(f"{ADMISSION}:_look_up")
ADMIT = Target(f"{ADMISSION}:_admit")
COUNT_QUERY = Target(f"{ADMISSION}:_count_query")
FINISH_LOAD = Target(f"{ADMISSION}:_finish_load")
FAILED_LOADS = Target("kvconform.refimpl.transfers:failed_loads")
FINISHED = Target("kvconform.refimpl.transfers:finished")
APPEND = Target("kvconform.refimpl.output:_append")

# Its blocks.
ALLOCATE_SLOTS = Target("kvconform.refimpl.kv_manager:KVManager.allocate_slots")
GET_NEW_BLOCKS = Target("kvconform.refimpl.pool:BlockPool.get_new_blocks")

# The worker, and the life cycles that drive the connector's worker half: ours, and vLLM's.
WRITE_LAYER = Target("kvconform.engine.worker:Worker.write_layer")
STEP = Target("kvconform.engine.lifecycle:Own.step")
ATTENTION = Target("kvconform.engine.lifecycle:Own.attention")
VLLM_V1_STEP = Target("kvconform.engine.lifecycle:VllmV1.step")
