# SPDX-License-Identifier: Apache-2.0
"""The closed list of events: what a trace consists of, and what a requirement may read.

An event is a plain dict `{"kind": str, "seq": int, "step": int, ...}`. `seq` numbers the events of
one run from 0. `step` counts the `schedule()` calls of the run from 1 (0 before the first). Events
carry no wall-clock time: the same case and seed give the same trace.

Fields are written as `name:type`, with the types str, int, bool, float, list, dict and any. `?`
allows None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvconform.contract.trace import own_settings
from kvconform.errors import one_line, place_of

COMMON_FIELDS = ("kind", "seq", "step")
NO_OWNER = "nobody"
"""Owner of a block that was handed out, and that no request has when the step is scheduled."""
ENGINE_FIELD = "on"
"""The engine that an event is about, in runs of several engines; others do not have it."""

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "list": (list, tuple),
    "dict": (dict,),
    "any": (object,),
}


@dataclass(frozen=True, slots=True)
class Field:
    """The type of one field of an event."""

    type: str
    optional: bool

    @classmethod
    def parse(cls, text: str) -> Field:
        """Parse `int` or `int?`. KeyError for an unknown type."""
        name = text.removesuffix("?")
        _ = _TYPES[name]
        return cls(name, text.endswith("?") or name == "any")

    def accepts(self, value: object) -> bool:
        """Return whether an event may have this value here."""
        if value is None:
            return self.optional
        if isinstance(value, bool) and self.type in ("int", "float"):
            return False
        return isinstance(value, _TYPES[self.type])


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event: its channel, its fields, and one line about it."""

    name: str
    channel: str
    doc: str
    fields: dict[str, Field]

    def accepts(self, field: str) -> bool:
        """Return whether a check on this kind may read `field`."""
        return field in self.fields or field in COMMON_FIELDS

    def problems(self, event: dict[str, object]) -> list[str]:
        """Return one sentence per mistake in the shape of an event of this kind."""
        found = [
            f"{self.name}: field {name} missing"
            for name in (*COMMON_FIELDS, *self.fields)
            if name not in event
        ]
        for name, value in event.items():
            if name in COMMON_FIELDS or name == ENGINE_FIELD:
                continue
            field = self.fields.get(name)
            if field is None:
                found.append(f"{self.name}: unknown field {name}")
            elif value is None and not field.optional:
                found.append(f"{self.name}: {name} is None")
            elif not field.accepts(value):
                found.append(f"{self.name}: {name} is {value!r}, not {field.type}")
        return found


CHANNELS = ("hooks", "sched", "kv", "plan", "cache", "device", "live", "harness")
"""Sources of events. Every run has `harness` events; a requirement need not ask for them."""

PROVENANCE = (
    "never_computed",
    "on_failed_load",
    "poison",
    "other_request",
    "other_tokens",
    "other_identity",
    "other_prefix",
    "old_position",
    "other_position",
    "rejected_draft",
    "past_end",
    "not_yet_loaded",
    "stale_generation",
    "torn",
    "other_layer",
    "other_group",
    "kv_swapped",
    "head_swapped",
    "unknown",
)
"""What a wrong byte was found to be (`kv.wrong.found`): a closed, disjoint list.

`other_request` is KV of a request that got a block from one that has what is wanted.
`other_tokens` is KV of another request, which got no such block.
"""
OF_ANOTHER_RANK = "another rank's bytes"
"""Part of `kv.wrong.origin` where bytes of a head are those of another rank."""

EVENTS: dict[str, Kind] = {}


def _kind(name: str, channel: str, fields: str, doc: str) -> None:
    parsed = {
        part.partition(":")[0]: Field.parse(part.partition(":")[2]) for part in fields.split()
    }
    EVENTS[name] = Kind(name, channel, doc, parsed)


SIZED = ("run.start", "run.changed")
"""Kinds of events that say how many tokens a block has from then on."""

# -- the run
_kind(
    "run.start",
    "harness",
    "seed:int engine:str case:str scheduling:str runner:str depth:int vllm:str block_size:int "
    "hash_size:int num_blocks:int policies:list connector:str? spec_tokens:int role:str "
    "failure_policy:str groups:int ranks:int stages:int context_ranks:int drafter:bool "
    "pooling:bool device:str slow:str?",
    "The run begins; its fields are the constants `cfg`. block_size = tokens per block of the "
    "first group; hash_size = tokens per block hash.",
)
_kind(
    "run.changed",
    "harness",
    "block_size:int hash_size:int num_blocks:int ranks:int",
    "From here on, constants `cfg` of the run have these values: a restart has changed them.",
)
_kind(
    "run.end",
    "harness",
    "quiesced:bool unfinished:list free_blocks:int free_blocks_at_start:int "
    "engine_requests:list request_objects_alive:list threads:int crashed:bool",
    "The run is over: what is still held. crashed = crashed, or cut short by a shutdown; "
    "threads = threads that did not exist before the run.",
)
_kind(
    "engine.lifecycle",
    "harness",
    "op:str pid:int error:str? error_type:str? error_at:list?",
    "The engine starts, shuts down (also twice) or restarts. error_at = the connector's line: "
    "file, line, function, text.",
)
_kind(
    "start.refused",
    "harness",
    "asked:str sentence:str?",
    "The connector's construction ended with an error, in a case with settings that it may refuse: "
    "these settings, and the sentence that says so; None: no error raised on purpose and in words.",
)
_kind(
    "engine.crash",
    "harness",
    "where:str error:str error_type:str? error_at:list? hook:str?",
    "The engine died: in a hook, in its own code or in the harness.",
)
_kind(
    "engine.stall",
    "harness",
    "steps:int limit:float threads:int advanced:float waiting_on:list",
    "No progress for these steps and for the stall limit (stall_seconds); threads = how many the "
    "connector had; advanced = seconds by which the clock was set forward meanwhile.",
)
_kind(
    "thread.died",
    "harness",
    "thread:str in_step:int error:str error_type:str? error_at:list?",
    "An exception has ended a thread of the connector: its name, the step in which it did, and the "
    "connector's line: file, line, function, text. Found at the end of the run.",
)
_kind(
    "store.damaged",
    "harness",
    "what:str count:int",
    "The harness damaged what the connector has stored: what happened, and to how many files and "
    "values, or servers.",
)
_kind(
    "control.done",
    "harness",
    "do:str of:str to:str? before:int after:int there:int? error:str?",
    "The connector's controller did something with the content of a request, as the case asks: the "
    "tokens that it finds from the start before and after; there = those at the level that they "
    "were moved to.",
)
_kind(
    "control.result",
    "harness",
    "do:str of:str req:str said:int usable:int local:int tokens:int",
    "The first lookup after a controller did something, of a request that repeats that content: "
    "said = the tokens that the controller found afterwards; usable = those, as far as the request "
    "has them, in whole blocks, without the last token.",
)
_kind(
    "clock.advanced",
    "harness",
    "seconds:float why:str",
    "The clock of the process was set forward: by the case (idle), or because nothing was "
    "left but held blocks (stall), or nothing went on while requests waited (waiting).",
)
_kind(
    "cache.reset",
    "harness",
    "phase:str returned:bool? running:bool connector:bool",
    "The local cache is reset, and the connector's if asked for.",
)
_kind(
    "profile.expectation",
    "harness",
    "what:str req:str of:str? resumed:bool restarted:bool declared:bool promised:int "
    "reloadable:int across:bool",
    "A request, new or resumed, repeats earlier content: how much of it the capabilities promise "
    "(declared), or the connector brings back of a plain prompt of that length, and how much can "
    "be loaded; whether the engine was restarted in between; across = another engine computed it.",
)
_kind(
    "profile.repaired",
    "harness",
    "req:str of:str promised:int reloadable:int",
    "A request repeats content that another one computed again when its load had failed: how much "
    "of it the declared capabilities promise, and how much can be loaded.",
)
_kind(
    "soak.grown",
    "harness",
    "holder:str place:str numbers:list",
    "What the connector holds there has grown by at least one per identical round: holder = half "
    "or process; numbers = lengths, bytes or objects after each third of the rounds.",
)
_kind(
    "soak.shrunk",
    "harness",
    "holder:str place:str numbers:list",
    "What the connector holds there has shrunk by at least one per identical round: holder = half; "
    "numbers = lengths or bytes after each third of the rounds.",
)
_kind(
    "soak.served",
    "harness",
    "rounds:int first:int last:int emptied:bool",
    "Rounds with prompts of their own have ended; first, last = tokens of a new prompt that could "
    "be loaded when it was repeated, before and after the rounds; emptied = the rounds reset the "
    "cache of the connector, and it was reset once more before the last prompt.",
)
_kind(
    "soak.ended",
    "harness",
    "rounds:int holders:list",
    "Identical rounds have ended, and what the holders hold was compared.",
)
_kind(
    "restart.grown",
    "harness",
    "what:str numbers:list",
    "Each engine that was shut down leaves more of this in the process; numbers = after each "
    "shutdown: descriptors since the run began, tensors of all ended engines.",
)
_kind(
    "restart.compared",
    "harness",
    "restarts:int checked:list",
    "Several engines were shut down one after the other, and what they left was compared; "
    "checked = what could be counted on this system.",
)
_kind(
    "case.expectation",
    "harness",
    "what:str holds:bool detail:str?",
    "An expectation that the case itself states.",
)
_kind(
    "engine.api",
    "harness",
    "item:str ok:bool detail:str?",
    "One static check of the installed vLLM: what it refuses, has or lacks.",
)
_kind(
    "api",
    "harness",
    "item:str ok:bool detail:str?",
    "One static check of the connector's class: signature, abstract or class-level method.",
)

# -- several engines in one run
_kind(
    "run.engines",
    "harness",
    "engines:dict own:dict",
    "The run has several engines: name -> kv_role; own = the fields of run.start of those that "
    "differ from the case's configuration, by their names.",
)
_kind(
    "pair.engine",
    "harness",
    "on:str role:str delivery:bool?",
    "One engine of several; delivery = its connector's requires_kv_delivery.",
)
_kind(
    "pair.params",
    "sched",
    "on:str req:str generation:int of:str unlike:bool asked:bool finished:bool none:bool "
    "tokens:int json:str? first_token:int? sampled:int?",
    "The parameters that request `of` ended with are handed to request `req` of another "
    "engine; unlike = that engine has other block sizes, ranks or data types; finished = it ended "
    "so that it can be handed over; tokens = those with KV at its end; json = what JSON turns the "
    "parameters into, if that differs.",
)
_kind(
    "pair.lookup",
    "sched",
    "on:str role:str req:str generation:int of:str? stale:str? local:int tokens:int? "
    "by_savers:int by_all:int consumed:bool delivered:bool? failed:bool?",
    "A lookup, seen across engines; by_savers, by_all = prefix computed by engines that may save, "
    "or by any; consumed = it has loaded before. Then: delivered = what it promised arrived, or "
    "nothing was granted; failed = its load was reported as failed.",
)
_kind(
    "pair.request",
    "sched",
    "on:str req:str generation:int of:str stale:str unlike:bool aborted:bool offered:int local:int "
    "promised:int refused:bool loaded:int wrong:bool failed:bool held:bool released:int gone:bool "
    "early:bool at_once:bool",
    "At the end, for a request that was handed parameters: the fate of the KV they refer "
    "to; unlike = the two engines differ in block sizes, ranks or data types; refused = the engine "
    "granted nothing of what the connector had promised; early = released "
    "before the request was granted a load, or, without one, before it came; gone = early, or a "
    "load failed and the release came before it was due, after a time in which a lease may end; "
    "at_once = early, and sooner than any lease could end: within a few steps, without a consumer "
    "that came.",
)

# -- hooks: what the probe sees
_kind(
    "hook.called",
    "hooks",
    "hook:str half:str rank:int depth:int bound:bool? thread:str",
    "A hook is called; depth 0 = by the engine.",
)
_kind(
    "hook.returned",
    "hooks",
    "hook:str depth:int error:str? error_text:str? error_at:list? value:str? "
    "value_ok:bool "
    "mutated_args:bool params_msgpack_ok:bool params_aliased:bool called_seq:int layer:str? "
    "timed_out:bool",
    "A hook returned or raised. value = what it returned, as short text: 'None', 'False', "
    "'(0, False)'. value_ok and params_* are true where they do not apply.",
)
ARGUMENTS = {
    "get_transfer_results": "finished_req_ids",
    "update_connector_output": "connector_output",
    "request_finished": "block_ids",
    "request_finished_all_groups": "block_ids",
    "build_connector_meta": "scheduler_output",
}
"""The argument that `mutated_args` of hook.returned is about, by hook; False for other hooks."""
_kind(
    "meta.built",
    "hooks",
    "ok:bool pickles:bool pickle_error:str? output_mutated:bool none:bool "
    "block_state_kept:bool of_step:int",
    "build_connector_meta returned.",
)
_kind(
    "meta.bound",
    "hooks",
    "same_as_built:bool",
    "The worker half received the metadata of its step.",
)
_kind(
    "meta.cleared",
    "hooks",
    "",
    "The metadata was removed again.",
)
_kind(
    "layer.wait",
    "hooks",
    "layer:str bound:bool",
    "wait_for_layer_load of one layer.",
)
_kind(
    "layer.save",
    "hooks",
    "layer:str bound:bool whole:bool joined:bool",
    "save_kv_layer of one layer; whole = with the layer's registered tensor; joined = the compute "
    "stream waited for all work that the hook gave to other streams (only if transfers are slow).",
)
_kind(
    "load.ahead",
    "device",
    "layer:str later:list ahead:list",
    "The compute stream reached a layer while transfers are slow: later = layers after it for "
    "which this step loads KV, ahead = those of them whose KV it had to wait for already; none as "
    "long as one of the step's loads has brought nothing for later layers.",
)
_kind(
    "device.note",
    "device",
    "what:str text:str hook:str? half:str? layer:str? forward:bool",
    "What the device noticed in a call of a hook. what: sync (the host waited for a stream), "
    "read_early (work on another stream read what the compute stream wrote afterwards), "
    "freed_pinned, freed_device (memory was freed while work that uses it was still queued).",
)
_kind(
    "device.used",
    "device",
    "streams:int by_address:int allocated:int",
    "At the shutdown: streams that the connector created, copies by address that it queued, "
    "tensors that it had on the device.",
)
_kind(
    "kv.event",
    "hooks",
    "op:str keys:list tokens:int problem:str repeated:bool",
    "The connector published a KV event (stored, removed, cleared); problem = what is wrong "
    "with its fields.",
)
_kind(
    "stats.taken",
    "hooks",
    "half:str empty:bool kept:bool merge:str? lost:str? cleared:bool?",
    "Statistics were returned; merge = what went wrong when they were merged with a copy, lost = "
    "what is less afterwards; cleared = empty after reset.",
)
_kind(
    "stats.sent",
    "hooks",
    "empty:bool encode:str? rebuilt:bool rebuild:str? observe:str?",
    "A step's statistics of both halves went to the front end; encode, rebuild, observe = what "
    "went wrong when they were encoded, rebuilt and added to the log's interval, and observed as "
    "metrics.",
)
_kind(
    "stats.total",
    "hooks",
    "returned:int filled:int metrics:bool moved:int loaded:int",
    "At the shutdown: statistics that were returned, those that were not empty; whether there are "
    "metrics, and how often they were given a value; loads that wrote what was granted.",
)
_kind(
    "stats.compared",
    "hooks",
    "what:str name:str place:str value:float seen:float most:float",
    "At the end of a run in which every load became due: a counter that the connector declares "
    "(capability metrics). what = its meaning; place = log, metrics or own (empty: the name was in "
    "none); value = its total; seen and most = the least and the most that it may be.",
)
_kind(
    "report.landed",
    "hooks",
    "changed:list",
    "A step's reports reach the scheduler; changed = what was changed after it was returned.",
)
_kind(
    "relay.broken",
    "hooks",
    "way:str what:list",
    "The engine did not pass on what one half of the connector gave for the other: reports of the "
    "worker half that never reached update_connector_output, or the metadata of a step.",
)
_kind(
    "handshake",
    "hooks",
    "none:bool pickles:bool detail:str?",
    "get_handshake_metadata returned.",
)

# -- sched: the scheduler and its block pool
_kind(
    "lookup",
    "sched",
    "req:str generation:int local:int tokens:int? is_async:bool type_ok:bool known:int "
    "repeat:bool prev_tokens:int? store_may_have_shrunk:bool same_claim_failed:int "
    "same_content_failed:int "
    "ever_computed:int ever_plain:int computed_before_reset:int after_reset:bool computed:int "
    "starved:bool unused:int",
    "get_num_new_matched_tokens returned. starved = it offered a load that would fit if the "
    "engine did not keep blocks free for an earlier, failed load of this request; unused = tokens "
    "of a finished load that the engine has not used yet; same_claim_failed = loads of as many "
    "tokens by this request that failed; same_content_failed = loads of the same KV that failed, "
    "by any request, since it was computed or loaded.",
)
_kind(
    "lookup.namesake",
    "sched",
    "req:str of:str tokens:int differs:list",
    "A lookup claims KV that was computed for other content: request `of` has the longest common "
    "prefix with its request, of `tokens` tokens. differs = how the two differ otherwise: what "
    "differs, its kind, and the values here (of `req`) and there (of `of`), in words.",
)
_kind(
    "hit.sources",
    "sched",
    "req:str generation:int granted:int named:int needed:int",
    "get_external_cache_hit_sources returned, of a class that says where hits come from: the "
    "tokens that it counted under host, p2p or disk, of those granted. needed = tokens that were "
    "to be loaded, in some group: without a window or a state, a block for each.",
)
_kind(
    "lookup.permitted",
    "sched",
    "req:str end:int local:int prompts:int? allowed:int of:str?",
    "A lookup that claims tokens up to `end`, by a connector that has declared not to store "
    "everything: how many of them were in a prompt (None: it has not declared to store prompts "
    "only), and in a request whose options permit to store them. of = the request with most of "
    "these tokens whose options forbid it.",
)
_kind(
    "alloc",
    "sched",
    "req:str generation:int transfer:str? local:int claimed:int? external:int is_async:bool "
    "blocks:list shared_blocks:list second_call:bool computed:int tables:list unfilled:list?",
    "update_state_after_alloc was called: the grant. tables = per KV cache group: tokens per "
    "block, window of the next token (0: none), block ids, how many of them at the end are for "
    "states after drafts. unfilled = shared blocks whose load had failed, as the engine knew, or "
    "that were computed upon one that had, and that have not been computed since.",
)
_kind(
    "step.scheduled",
    "sched",
    "total:int new:list cached:list resumed:list preempted:list finished:list "
    "has_sync_loads:bool empty:bool new_ids:int?",
    "schedule() returned: one step's output.",
)
_kind(
    "req.scheduled",
    "sched",
    "req:str generation:int listed_as:str output_computed:int computed:int scheduled:int "
    "placeholders:int known:int in_flight:int drafts:int new_blocks:list? table:list "
    "final_before:int final_after:int? prefill:bool all_ids:int? "
    "prefill_ids:int? told:int unfilled:list?",
    "One request's share of a step. computed: before it advances; final_before, final_after "
    "= tokens whose KV is final; told = blocks at the table's start that earlier outputs "
    "included; unfilled = blocks before its first position whose load failed, and that have "
    "not been computed since.",
)
_kind(
    "req.interrupted",
    "sched",
    "req:str generation:int hook:str computed:int scheduled:int? placeholders:int known:int "
    "table:list",
    "A hook of the scheduler half raised while the engine scheduled this request: the counters "
    "that the hook saw; scheduled = tokens of the step, if it had been put together.",
)
_kind(
    "req.state",
    "sched",
    "req:str generation:int from:str? to:str reason:str by:str computed:int placeholders:int "
    "known:int in_flight:int",
    "A request changed its state.",
)
_kind(
    "req.updated",
    "sched",
    "req:str generation:int of_step:int computed:int placeholders:int known:int "
    "cached_blocks:int real:int status:str",
    "A step's output was processed for a request; real = computed - placeholders.",
)
_kind(
    "req.displaced",
    "sched",
    "req:str generation:int computed:int published:list",
    "A request was preempted while a step was scheduled, of which it may have had a part before; "
    "published = blocks of it in the prefix cache that are not computed to their end.",
)
_kind(
    "req.finished",
    "sched",
    "req:str generation:int status:str computed:int placeholders:int known:int in_flight:int "
    "blocks:list delayed:bool final:int tables:list hook:str",
    "A request finished; delayed = its blocks stay allocated until finished_sending; tables: see "
    "alloc.",
)
_kind(
    "block",
    "sched",
    "op:str id:int owner:str? ref:int in_flight:bool",
    "An operation of the block pool on one block, or of the engine (poison; copy: another block's "
    "content was copied to it); in_flight = a step that has not landed writes to it.",
)
_kind(
    "block.freed",
    "sched",
    "id:int refs:int held:int",
    "The connector freed a reference to a block of the engine's pool within one of its hooks; refs "
    "= those that are left; held = these without one for each block table that has the block.",
)
_kind(
    "block.published",
    "sched",
    "req:str generation:int status:str tokens:int",
    "The output of a step publishes the blocks of a request, up to token `tokens`, although the "
    "request did not run before.",
)
_kind(
    "hold",
    "sched",
    "req:str generation:int direction:str transfer:str? cause:str",
    "The engine starts to wait for a transfer.",
)
_kind(
    "release",
    "sched",
    "req:str generation:int direction:str transfer:str? cause:str",
    "The engine stops waiting for a transfer.",
)
_kind(
    "transfer.reported",
    "sched",
    "req:str generation:int transfer:str? rank:int direction:str held:bool second:bool",
    "The worker half reported a finished transfer; held = the engine waited for it; second = "
    "for load and send, the other was reported; rank -1 = the scheduler half added it to a "
    "step's reports.",
)
_kind(
    "transfer.withheld",
    "sched",
    "req:str generation:int transfer:str? rank:int direction:str held:bool second:bool",
    "The same, but the scheduler half took it out of the step's reports: the engine never got it.",
)
_kind(
    "transfer.failed",
    "sched",
    "req:str? transfer:str? rank:int blocks:list outside_grant:list groups:any is_async:bool "
    "loading:bool",
    "The worker half reported blocks with load errors, or a request; loading = it has a load in "
    "progress, asynchronous or not.",
)
_kind(
    "ranks.joined",
    "sched",
    "expected:int sent:list received:list failed:list invalid:list all_sent:list "
    "all_received:list errors:list failures:list early:list late:list surplus:list",
    "How vLLM joined several ranks' reports, and the expected result: all_sent, all_received, "
    "errors, failures; early, late = the difference; surplus = reported by further ranks when the "
    "engine had taken the transfer for finished.",
)
_kind(
    "engine.id",
    "hooks",
    "rank:int half:str kept:bool",
    "Whether a half's configuration still has the given engine id once the halves have started.",
)
_kind(
    "request.new",
    "sched",
    "req:str generation:int",
    "on_new_request was called.",
)
_kind(
    "request.identity",
    "harness",
    "req:str generation:int salt:str? adapter:dict? items:list embeds:dict?",
    "A request was added that more than its tokens tells apart from others: its cache salt, LoRA "
    "adapter, multi-modal items and prompt embeddings.",
)
_kind(
    "hashes",
    "sched",
    "req:str generation:int count:int full:int same:bool distinct:bool",
    "The block hashes of a request at a lookup; same/distinct: equal content had this hash "
    "before, other content had another.",
)
_kind(
    "events.lookup",
    "sched",
    "req:str announced:int got:int local:int tokens:int known:int missing:list untold:list "
    "chain:list own:bool",
    "A lookup against the KV events so far: tokens announced (without the block of the last "
    "known token) and matched, blocks missing in between, blocks from the first unannounced one "
    "on, all announced blocks from the first one on. own = only hashes of the connector's own were "
    "announced.",
)
_kind(
    "queries",
    "sched",
    "requests:int tokens:int hits:int due_requests:int due_tokens:int due_hits:int skipping:list",
    "A step's statistics of the external cache, and (due_) what the step admitted; skipping "
    "= requests that read no cache.",
)
_kind(
    "sample",
    "sched",
    "req:str generation:int index:int token:int clean:bool prompt:int?",
    "A token was sampled, or a pooling model made a vector (its number is the token); clean = from "
    "correct KV; prompt = the prompt's length.",
)

# -- kv: the worker and its memory
_kind(
    "worker.step_begin",
    "kv",
    "",
    "The worker begins a step.",
)
_kind(
    "worker.reports",
    "hooks",
    "what:list pickles:bool pickle_error:str?",
    "A worker returned optional reports, by the names of KVConnectorOutput.",
)
_kind(
    "worker.late",
    "sched",
    "of_step:int req:list",
    "The workers, which were late, take up a step with these requests now.",
)
_kind(
    "worker.step_end",
    "kv",
    "forward:bool ranks:list",
    "The worker ends a step; ranks = those of several on which the connector was bound to "
    "its metadata.",
)
_kind(
    "kv.computed",
    "kv",
    "req:str generation:int start:int end:int accepted:int rejected:int",
    "The model wrote KV of [start, end).",
)
_kind(
    "state.offered",
    "sched",
    "req:str group:int block:int tokens:int in_table:bool copied:bool again:bool",
    "build_connector_meta is offered the state after a request's first `tokens` tokens, in a "
    "block; copied = the step copies another block to it; again = in the same block as before.",
)
_kind(
    "kv.registered",
    "harness",
    "required:str? possible:list? layout:str told:str? shape:list strides:list "
    "context_ranks:int kernel_blocks:int own_shape:list? own_strides:list?",
    "KV tensors: the layout that the class requires, the possible layouts (None: all), "
    "the layout in the KVCacheConfig (told), the ranks that a block's tokens are split over, "
    "the kernel blocks of each block (1: blocks are not split); "
    "own = by vLLM's own code.",
)
WRITES = (
    "shared",
    "over_computed",
    "null_block",
    "unallocated",
    "other_request",
    "not_transferred",
)
"""Kinds of writes to KV memory outside of loads that may be wrong: lists of slots in `kv.changed`.

Writes behind the granted tokens of a block that a load fills are none of these.
"""
_kind(
    "kv.changed",
    "kv",
    "after_hook:str layer:int req:list shared:list over_computed:list "
    "null_block:list unallocated:list other_request:list not_transferred:list group:int?",
    "KV memory changed during a hook; the lists hold slots. not_transferred = slots of a group "
    "that is not part of the transferred KV. group = the layer's, if there are several.",
)
_kind(
    "load.due",
    "kv",
    "req:str generation:int transfer:str? granted:int missing:list partial:list wrong:list "
    "reported_failed:bool reported:list promised:bool undisturbed:bool is_async:bool needed:bool "
    "local:int by_group:list layers:list early_reads:list bytes:int? most_bytes:int?",
    "The engine is about to rely on a grant. bytes = those that the connector wrote, of all layers "
    "(None: not known); most_bytes = the same in whole blocks, with repetitions. "
    "missing = positions that were not written completely; partial = those of them of which some "
    "slot was written in part. reported_failed = vLLM computes all of them again: with one group, "
    "from the first block on that was reported as failed; needed = it will use what was loaded, "
    "because the request was not aborted. reported = positions in blocks that were "
    "reported, if something is missing. promised = the connector has "
    "declared that it keeps this content, has found it, and nothing in the case makes a load fail. "
    "undisturbed = nothing in the case takes away what is stored. by_group = those of several "
    "groups that lack something: number, tokens per block, positions, block table. layers = those "
    "that lack something, if others do not. "
    "early_reads = where work on other streams was queued that read too early, so far.",
)
_kind(
    "load.foreign",
    "kv",
    "req:str generation:int transfer:str? tokens:int",
    "A load brought the right KV of tokens that no engine of this run had computed: KV of another "
    "run, because the store is not the run's own. tokens = how many.",
)
_kind(
    "load.blended",
    "kv",
    "req:str generation:int transfer:str? reused:int again:int",
    "A load brought KV that was computed behind other tokens: reused = tokens; again = those from "
    "the first of them to the request's end whose KV is computed behind the tokens before them.",
)
_kind(
    "kv.wrong",
    "kv",
    "req:str generation:int layer:int kv:str pos:int count:int block:int via:str "
    "transfer:str? transfer_sync:bool? found:str origin:str origin_req:str? origin_pos:int? "
    "origin_block:int? group:int? damaged:bool",
    "A slot that is read has the wrong content. found = what it holds; origin = where that "
    "came from, in words; origin_req, origin_pos = request and position it was computed for; "
    "for never_computed only the request that was to compute it, and origin_block, where it was "
    "read; damaged = the harness had damaged "
    "what the connector has stored.",
)

# -- plan: from a connector's optional Inspector
_kind(
    "plan",
    "plan",
    "op:str req:str generation:int start:int end:int timing:str key:str? computed:int "
    "scheduled:int known:int placeholders:int renewed:int slots:int? kept:bool loading:bool",
    "What the connector's metadata plans to do. renewed = how often the request was admitted, or "
    "any load failed or the connector's cache was reset before: after each, KV may be stored "
    "again. slots = those of the request's block table (None: it holds no blocks, or has several "
    "tables); kept = it is a save of a request without blocks, and others than the requests "
    "hold blocks: the connector, or the engine for steps in flight. loading = the engine waits for "
    "the end of an asynchronous load of the request.",
)

# -- cache: from an Inspector that shows the cache behind the connector, too
_kind(
    "cache.lookup",
    "cache",
    "req:str local:int tokens:int? usable:int cached:list",
    "What the levels of the cache had at a lookup: cached = tokens from the request's start, of "
    "the first level, the first two, and so on; usable = those of all, in whole blocks, without "
    "the last token.",
)
_kind(
    "cache.state",
    "cache",
    "held:int levels:list",
    "The cache after a step in which it changed: entries that are held, and the levels.",
)
_kind(
    "cache.loaded",
    "cache",
    "req:str local:int end:int cached:list room:bool",
    "After a step in which a load arrived, of the tokens from `local` up to `end`: what the levels "
    "have of the request, from its start (as in cache.lookup); room = the first level could take "
    "more. Where it could, and has not taken what was loaded, the event comes when all requests "
    "have ended.",
)
_kind(
    "cache.reached",
    "cache",
    "level:str lookups:list",
    "When all requests have ended: the lookups for which this level had more than the faster ones "
    "and the engine. Of each: req; known = tokens that those have; usable = tokens with this "
    "level, in whole blocks, without the last token; claimed = what the connector answered, from "
    "the request's start.",
)
_kind(
    "cache.ended",
    "cache",
    "held:int levels:list",
    "The cache when all requests have ended and the engine is at rest.",
)
_kind(
    "cache.size",
    "cache",
    "level:str bytes:int on_disk:int? kv:int fresh:bool block:int quantised:bool",
    "The size of a level at that time: bytes = what it reports; on_disk = that of the files in its "
    "directory (None: it has none, or a process was killed that wrote there); kv = bytes in the "
    "engine of all different KV that the run computed, on all ranks; fresh = the level was empty "
    "when the engine started; block = tokens per block; quantised = the engine has one byte per "
    "value.",
)

# -- engine `live`: only a run of the complete vLLM has these
_kind(
    "live.kv",
    "live",
    "rank:int watched:bool compared:bool poisoned:bool blocks:int size:int layers:int bytes:int",
    "A worker's KV cache. watched = memory outside of loads is watched; compared = loaded "
    "blocks are compared with recorded KV; poisoned = fresh blocks are poisoned; size = tokens "
    "per block.",
)
_kind(
    "live.load",
    "live",
    "req:str generation:int transfer:str? is_async:bool granted:int blocks:int exact:list "
    "close:list reused:list wrong:list missing:list unknown:list error:float reported_failed:bool "
    "rank:int",
    "The engine relies on a load. Of the `blocks` whole blocks that it was to fill: exact = "
    "bytes that the model computed for these tokens, close = within rounding, reused = computed "
    "behind other tokens, wrong, missing = never written, unknown = the model has not computed "
    "these tokens; error = largest difference, as a fraction of the largest value; of reused "
    "blocks, the root mean square of that of a layer, as a fraction of that of its values.",
)
_kind(
    "live.phase",
    "live",
    "phase:str answers:int reset:bool? due:bool restarted:bool asked:int loaded:int local:int "
    "preempted:int drafted:int accepted:int",
    "A phase of a scenario is over: answers, whether the local prefix cache could be reset "
    "before it (None: not asked for), whether loads were due in it, and whether vLLM was "
    "started again before it. Over the phase, by vLLM's own metrics: tokens asked of the "
    "connector, loaded from it and found in the local prefix cache, preemptions, drafts and "
    "accepted drafts.",
)
_kind(
    "live.tokens",
    "live",
    "phase:str req:str prompt:int count:int plain:int same:bool ambiguous:bool aborted:bool "
    "at:int? token:int? instead:int? gap:float? drift:float drift_at:int? rounding:float",
    "A request's greedy tokens (`count`) against those of the baseline run (`plain`). at = the "
    "first that differs, token = which it is, instead = the baseline's, gap = by how much "
    "(natural logarithm) the baseline's was more likely than the second choice; ambiguous = the "
    "two were nearly equally likely; drift = the largest difference of log probabilities before "
    "that; rounding = what rounding may make of it, in the model's number format.",
)
_kind(
    "live.embedding",
    "live",
    "phase:str req:str prompt:int count:int off:float at:int rounding:float",
    "A prompt's embedding, a vector of length 1 with `count` values, against that of the baseline "
    "run. off = the largest difference of a value, at = which value; rounding = what rounding may "
    "make of it, in the model's number format.",
)
_kind(
    "live.entered",
    "live",
    "req:str sent:str entrypoint:str salt:str? sent_salt:str? adapter:str? sent_adapter:str? "
    "weights:str? sent_weights:str? image:str? sent_image:str? prompt:str sent_prompt:str",
    "A request that was sent to the API server has reached the scheduler. sent = the client's "
    "name of it; of cache salt, adapter, the adapter's weights, image and prompt: what the engine "
    "has, and (sent_) what the client asked for. An image goes by the first one with its "
    "identifier that has reached the scheduler.",
)


def loses_entries(event: Mapping[str, Any]) -> bool:
    """Return whether stored KV may be gone after the event, although nothing evicted it."""
    if event["kind"] == "cache.reset":
        return bool(event["connector"])
    if event["kind"] == "store.damaged":
        return bool(event["count"])
    return bool(event["kind"] == "transfer.failed")


def altered_in_entry(event: Mapping[str, Any]) -> list[str]:
    """Return the fields of a live.entered event in which the engine has not what was sent."""
    names = ("salt", "adapter", "weights", "image", "prompt")
    return [name for name in names if event[name] != event[f"sent_{name}"]]


_kind(
    "live.fault",
    "live",
    "phase:str number:int do:str still:float before:str? running:int loading:int",
    "A planned fault of a server of the connector: kill, restart, pause or clear, after `still` "
    "seconds without replies; or damage to its files. Right before the worker half loads or "
    "saves, or between two steps. running = requests that run; loading = granted loads that the "
    "engine does not rely on yet.",
)
_kind(
    "live.happened",
    "live",
    "what:str count:int due:bool",
    "How often something happened in the whole run, and whether it was due.",
)
_kind(
    "live.end",
    "live",
    "how:str phase:str? error:str? processes:list ports:list files:list",
    "How vLLM's process ended (ended, crash, killed, timeout) and in which phase; what it "
    "left behind: processes, ports on which these listened, files in shared memory.",
)


def run_start(
    *,
    seed: int,
    engine: str,
    case: str,
    scheduling: str,
    runner: str,
    depth: int,
    vllm: str,
    block_size: int,
    num_blocks: int,
    connector: str | None,
    hash_size: int | None = None,
    policies: Sequence[str] = (),
    spec_tokens: int = 0,
    role: str = "kv_both",
    failure_policy: str = "recompute",
    groups: int = 1,
    ranks: int = 1,
    stages: int = 1,
    context_ranks: int = 1,
    drafter: bool = False,
    pooling: bool = False,
    device: str = "cpu",
    slow: str | None = None,
) -> dict[str, Any]:
    """Return the fields of `run.start`. Every run of every engine begins with these. Pure.

    `hash_size` is the block size by default.
    """
    given = dict(locals())
    return {**given, "policies": list(policies), "hash_size": hash_size or block_size}


def run_end(
    *,
    quiesced: bool,
    unfinished: Sequence[str],
    free_blocks: int,
    free_blocks_at_start: int,
    request_objects_alive: Sequence[str],
    threads: int,
    crashed: bool,
) -> dict[str, Any]:
    """Return the fields of `run.end`. Pure.

    `unfinished` are the requests that the engine still knows.
    """
    return {
        "quiesced": quiesced,
        "unfinished": list(unfinished),
        "free_blocks": free_blocks,
        "free_blocks_at_start": free_blocks_at_start,
        "engine_requests": list(unfinished),
        "request_objects_alive": list(request_objects_alive),
        "threads": threads,
        "crashed": crashed,
    }


def run_cut_short() -> dict[str, Any]:
    """Return the fields of `run.end` for a run that crashed, hung, or lost its process. Pure."""
    return run_end(
        quiesced=False,
        unfinished=(),
        free_blocks=0,
        free_blocks_at_start=0,
        request_objects_alive=(),
        threads=0,
        crashed=True,
    )


def raised(error: BaseException | None, connector: type | None = None) -> dict[str, Any]:
    """Return the fields that say what an error was: `error`, `error_type`, `error_at`. Pure."""
    if error is None:
        return {"error": None, "error_type": None, "error_at": None}
    place = place_of(error, connector)
    return {
        "error": one_line(error),
        "error_type": type(error).__name__,
        "error_at": None if place is None else list(place),
    }


def lifecycle(
    op: str, *, pid: int = 0, error: BaseException | None = None, connector: type | None = None
) -> dict[str, Any]:
    """Return the fields of `engine.lifecycle`. `connector` is the class whose lines count. Pure."""
    return {"op": op, "pid": pid, **raised(error, connector)}


def thread_died(
    thread: str, in_step: int, error: BaseException, connector: type | None = None
) -> dict[str, Any]:
    """Return the fields of `thread.died`. `connector` is the class whose lines count. Pure."""
    return {"thread": thread, "in_step": in_step, **raised(error, connector)}


def constants_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of the run that an event `run.changed` sets. Pure."""
    return {name: event[name] for name in EVENTS["run.changed"].fields}


def block_size_at(trace: Sequence[Mapping[str, Any]], event: Mapping[str, Any]) -> int:
    """Return the block size of an event's engine at the event. Pure.

    A restart may have changed that of `run.start`, and one of several engines have its own.
    """
    own = own_settings(trace)
    if event.get("on") in own:
        return int(own[event["on"]]["block_size"])
    sizes = (e["block_size"] for e in trace if e["kind"] in SIZED and e["seq"] <= event["seq"])
    return int(list(sizes)[-1])


def is_restart(event: Mapping[str, Any]) -> bool:
    """Return whether an event is a restart of the engine. Pure."""
    return event["kind"] == "engine.lifecycle" and event["op"] == "restart"


def is_kill(event: Mapping[str, Any]) -> bool:
    """Return whether an event is a kill of the engine's process in the midst of a save. Pure."""
    return event["kind"] == "engine.lifecycle" and event["op"] == "killed"


def crash(where: str, error: BaseException | str, hook: str | None) -> dict[str, Any]:
    """Return the fields of `engine.crash`; `error` may be a sentence instead of an error. Pure."""
    said = {**raised(None), "error": error} if isinstance(error, str) else raised(error)
    return {"where": where, **said, "hook": hook}


def never_returned(called: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the fields of `hook.returned` for a hook that hung: `called` is its event. Pure."""
    return {
        **{name: called[name] for name in ("hook", "depth")},
        "error": "HookTimeout",
        "error_text": text,
        "error_at": None,
        "value": None,
        "value_ok": True,
        "mutated_args": False,
        "params_msgpack_ok": True,
        "params_aliased": False,
        "called_seq": called["seq"],
        "layer": None,
        "timed_out": True,
    }


def channels_of(kinds: set[str]) -> set[str]:
    """Return the channels that a check over these event kinds needs, apart from `harness`."""
    return {EVENTS[kind].channel for kind in kinds} - {"harness"}


def check_event(event: dict[str, object]) -> list[str]:
    """Return sentences about what is wrong with an event's shape. For tests and debugging only."""
    name = event.get("kind")
    kind = EVENTS.get(name) if isinstance(name, str) else None
    return [f"unknown event {name!r}"] if kind is None else kind.problems(event)
