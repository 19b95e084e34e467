# SPDX-License-Identifier: Apache-2.0
"""The closed list of events: what an engine run is made of, and all that a requirement may look at.

An event is a plain dict `{"k": kind, "seq": int, "step": int, ...}`. `seq` numbers the events of one run from 0; `step` counts the
`schedule()` calls of the run from 1 (0 before the first). Events carry no wall-clock time: the same case and seed give the same trace.
Events and fields are added here (channel `live`: events_live.py). Field notation: `name:type` with
types s(tring) i(nteger) b(oolean) f(loat) l(ist) d(ict) a(ny), and `?` where None is allowed too.


What a kind of event is: its channel, its fields and their types.

The kinds of events that only a run of all of vLLM has (engine `live`): a part of the closed list, in its notation (kvconform.contract.events).
"""

from __future__ import annotations

from dataclasses import dataclass

COMMON_FIELDS = ("k", "seq", "step")
ENGINE_FIELD = "on"
"""Which of two engines an event is about; events of one-engine runs do not have it."""

_TYPES: dict[str, tuple[type, ...]] = {
    "s": (str,),
    "i": (int,),
    "b": (bool,),
    "f": (int, float),
    "l": (list, tuple),
    "d": (dict,),
    "a": (object,),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event: its channel, its fields (name -> type code, see events.py) and one line about it."""

    name: str
    channel: str
    doc: str
    fields: dict[str, str]

    def accepts(self, field: str) -> bool:
        """Whether a check on this kind may read `field`."""
        return field in self.fields or field in COMMON_FIELDS

    def problems(self, event: dict[str, object]) -> list[str]:
        """Sentences about what is wrong with the shape of an event of this kind; empty if nothing is."""
        found = [
            f"{self.name}: field {f} missing"
            for f in (*COMMON_FIELDS, *self.fields)
            if f not in event
        ]
        for field, value in event.items():
            if field in COMMON_FIELDS or field == ENGINE_FIELD:
                continue
            code = self.fields.get(field)
            if code is None:
                found.append(f"{self.name}: unknown field {field}")
            elif value is None:
                if not code.endswith("?") and code[0] != "a":
                    found.append(f"{self.name}: {field} is None")
            elif not isinstance(value, _TYPES[code[0]]) or (
                isinstance(value, bool) and code[0] in "if"
            ):
                found.append(
                    f"{self.name}: {field} is {value!r}, not {_TYPES[code[0]][0].__name__}"
                )
        return found


LIVE: dict[str, Kind] = {}


def _live_kind(name: str, fields: str, doc: str) -> None:
    LIVE[name] = Kind(name, "live", doc, dict(part.split(":", 1) for part in fields.split()))


_live_kind(
    "live.kv",
    "rank:i watched:b compared:b poisoned:b blocks:i size:i layers:i bytes:i",
    "A worker's KV cache: is memory outside of loads watched, are loaded blocks compared with recorded KV, are fresh blocks poisoned;"
    " blocks, tokens per block.",
)
_live_kind(
    "live.load",
    "req:s generation:i transfer:s? is_async:b granted:i blocks:i exact:l close:l wrong:l missing:l unknown:l error:f"
    " reported_failed:b rank:i",
    "The engine relies on a load. Of the `blocks` whole blocks that it was to fill: exact = bytes that the model computed for these"
    " tokens, close = within rounding, wrong, missing = nobody wrote them, unknown = the model has not computed these tokens; error ="
    " largest difference, as a part of the largest value.",
)
_live_kind(
    "live.phase",
    "phase:s answers:i reset:b? due:b asked:i loaded:i local:i preempted:i drafted:i accepted:i",
    "A phase of a scenario is over: answers, whether the local prefix cache could be emptied before it (None: nobody asked), whether loads"
    " were due in it; and over the phase, by vLLM's own metrics, tokens asked of the connector, loaded from it and found in the local"
    " prefix cache, preemptions, drafts and those that were accepted.",
)
_live_kind(
    "live.tokens",
    "phase:s req:s prompt:i count:i plain:i same:b ambiguous:b aborted:b at:i? token:i? instead:i? gap:f? drift:f drift_at:i?",
    "A request's greedy tokens against those that it got without a connector: `count` and `plain` of them; the first that differs, which it"
    " is, instead of which, and by how much (natural logarithm) that was more likely than the second choice; ambiguous = the two were"
    " nearly equally likely. drift = the largest difference of log probabilities before that.",
)
_live_kind(
    "live.fault",
    "phase:s number:i do:s still:f before:s? running:i loading:i",
    "A server of the connector fails now, in a scenario that wants it: kill, restart, pause or clear, after `still` seconds in which it"
    " answers nothing; right before the worker half loads or saves, or between two steps. Requests that run, and loads that the engine"
    " has granted and does not rely on yet.",
)
_live_kind(
    "live.happened",
    "what:s count:i due:b",
    "How often something happened in the whole run, and whether it was due.",
)
_live_kind(
    "live.end",
    "how:s phase:s? error:s? processes:l ports:l files:l",
    "How vLLM's process ended (ended, crash, killed, timeout) and in which phase; what it left behind: processes, ports that these listened"
    " on, files in shared memory.",
)


CHANNELS = ("hooks", "sched", "kv", "plan", "device", "live", "harness")
"""Where events come from. `harness` events exist in every run; a requirement never has to ask for that channel."""

PROVENANCE = (
    "never_computed",
    "poison",
    "other_request",
    "other_identity",
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
"""What a wrong byte turned out to be (`kv.wrong.found`): a closed, disjoint list."""

EVENTS: dict[str, Kind] = dict(LIVE)


def _kind(name: str, channel: str, fields: str, doc: str) -> None:
    EVENTS[name] = Kind(name, channel, doc, dict(part.split(":", 1) for part in fields.split()))


# --- the run -----------------------------------------------------------------------------------------------------------------------
_kind(
    "run.start",
    "harness",
    "seed:i engine:s case:s scheduling:s runner:s depth:i vllm:s block_size:i num_blocks:i"
    " policies:l connector:s? spec_tokens:i role:s failure_policy:s groups:i ranks:i stages:i context_ranks:i"
    " device:s slow:s?",
    "The run begins; its fields are the constants `cfg`.",
)
_kind(
    "run.end",
    "harness",
    "quiesced:b unfinished:l free_blocks:i free_blocks_at_start:i engine_requests:l request_objects_alive:l threads:i crashed:b",
    "The run is over: what is still held. `crashed`: or cut short by a shutdown; `threads` counts threads that were not there before.",
)
_kind(
    "engine.lifecycle",
    "harness",
    "op:s pid:i error:s?",
    "The engine starts, shuts down (also twice) or restarts.",
)
_kind(
    "engine.crash",
    "harness",
    "where:s error:s hook:s? cause_seq:i?",
    "The engine died: of a hook, of itself or of the harness.",
)
_kind(
    "engine.stall", "harness", "steps:i waiting_on:l seconds:i", "No progress for the stall limit."
)
_kind(
    "cache.reset",
    "harness",
    "phase:s returned:b? running:b connector:b",
    "The local (and, if asked, the connector's) cache is reset.",
)
_kind(
    "profile.expectation",
    "harness",
    "what:s req:s of:s? promised:i reloadable:i",
    "A request repeats earlier content: how much the declared capabilities promise, how much could be had.",
)
_kind(
    "case.expectation",
    "harness",
    "what:s holds:b detail:s?",
    "An expectation that the case itself states.",
)
_kind(
    "engine.api",
    "harness",
    "item:s ok:b detail:s?",
    "One static check of the installed vLLM: what it refuses, what it has and has not.",
)
_kind(
    "api",
    "harness",
    "item:s ok:b detail:s?",
    "One static check of the connector's class: signature, abstract or class-level method.",
)

# --- two engines in one run ----------------------------------------------------------------------------------------------------------
_kind("run.engines", "harness", "engines:d", "The run has several engines: name -> kv_role.")
_kind(
    "pair.engine",
    "harness",
    "on:s role:s delivery:b?",
    "One engine of several; delivery = its connector's requires_kv_delivery.",
)
_kind(
    "pair.params",
    "sched",
    "on:s req:s generation:i of:s asked:b finished:b none:b json:s? first_token:i? sampled:i?",
    "The parameters that request `of` ended with are handed to request `req` of another engine; json = what JSON makes of them, if wrong.",
)
_kind(
    "pair.lookup",
    "sched",
    "on:s role:s req:s generation:i of:s? stale:s? local:i tokens:i? by_savers:i consumed:b delivered:b?",
    "A lookup, seen across engines; by_savers = prefix computed by engines that may save; consumed = it has loaded before.",
)
_kind(
    "pair.request",
    "sched",
    "on:s req:s generation:i of:s stale:s aborted:b offered:i local:i promised:i loaded:i wrong:b failed:b held:b released:i gone:b",
    "At the end, for a request that was handed parameters: what became of the KV they refer to; gone = released before it was loaded.",
)

# --- hooks: what the probe sees ------------------------------------------------------------------------------------------------------
_kind(
    "hook.called",
    "hooks",
    "hook:s half:s rank:i depth:i bound:b? cls:s thread:s",
    "A hook is called; depth 0 = by the engine.",
)
_kind(
    "hook.returned",
    "hooks",
    "hook:s half:s rank:i depth:i error:s? error_text:s? value:s? value_ok:b mutated_args:b params_msgpack_ok:b params_aliased:b"
    " called_seq:i layer:s? timed_out:b",
    "A hook returned or raised; value_ok and params_* are true where they do not apply.",
)
_kind(
    "meta.built",
    "hooks",
    "ok:b pickles:b pickle_error:s? digest:s? output_mutated:b none:b block_state_kept:b of_step:i",
    "build_connector_meta returned.",
)
_kind(
    "meta.bound",
    "hooks",
    "digest:s? same_as_built:b",
    "The worker half was given the metadata of its step.",
)
_kind("meta.cleared", "hooks", "digest:s? same_as_built:b", "The metadata was taken away again.")
_kind("layer.wait", "hooks", "layer:s bound:b order:i", "wait_for_layer_load of one layer.")
_kind(
    "layer.save",
    "hooks",
    "layer:s bound:b order:i whole:b",
    "save_kv_layer of one layer; whole = with the layer's registered tensor.",
)
_kind(
    "device.note",
    "device",
    "what:s text:s stream:s? hook:s? half:s? layer:s? forward:b",
    "What the device noticed in a call of a hook. what: sync (the host waited for a stream), read_early (work on another stream read what"
    " the compute stream wrote afterwards), freed_pinned, freed_device (memory was given back while work that uses it was still to run).",
)
_kind(
    "device.used",
    "device",
    "streams:i by_address:i allocated:i",
    "At the shutdown: streams that the connector made, copies by address that it queued, tensors that it had on the device.",
)
_kind(
    "kv.event",
    "hooks",
    "op:s keys:l medium:s? tokens:i problem:s repeated:b",
    "The connector published a KV event (stored, removed, cleared); `problem` says what is wrong with its fields.",
)
_kind(
    "stats.taken",
    "hooks",
    "half:s empty:b kept:b merge:s? encode:s? rebuilt:b rebuild:s? observe:s?",
    "Statistics were taken; the texts say what went wrong when they were merged, encoded, rebuilt and observed as metrics.",
)
_kind(
    "report.landed",
    "hooks",
    "changed:l",
    "A step's reports reach the scheduler; changed = what was changed after it was returned.",
)
_kind("handshake", "hooks", "none:b pickles:b detail:s?", "get_handshake_metadata returned.")

# --- sched: the scheduler and its block pool -----------------------------------------------------------------------------------------
_kind(
    "lookup",
    "sched",
    "req:s generation:i attempt:i local:i tokens:i? is_async:b type_ok:b N:i status:s repeat:b prev_tokens:i? store_may_have_shrunk:b"
    " same_claim_failed:i ever_computed:i ever_plain:i computed_before_reset:i after_reset:b prompt_len:i block_aligned:b C:i"
    " starved:b",
    "get_num_new_matched_tokens answered. starved = it answered with a load that fits, but for the blocks that the engine keeps free for an"
    " earlier load of this request, which failed.",
)
_kind(
    "alloc",
    "sched",
    "req:s generation:i attempt:i transfer:s? local:i claimed:i? external:i is_async:b blocks:l shared_blocks:l second_call:b C:i"
    " tables:l unfilled:l?",
    "update_state_after_alloc was called: the grant. tables = per KV cache group: tokens per block, window (0: none), block ids."
    " unfilled = shared blocks whose load failed and that nothing has computed since.",
)
_kind(
    "step.scheduled",
    "sched",
    "total:i new:l cached:l resumed:l preempted:l finished:l has_sync_loads:b empty:b drafts:d new_ids:i?",
    "schedule() returned: one step's output.",
)
_kind(
    "req.scheduled",
    "sched",
    "req:s generation:i kind:s so_C:i C:i S:i P:i N:i inflight:i drafts:i new_blocks:l? table:l num_output_tokens:i v_before:i v_after:i?"
    " prefill:b all_ids:i? prefill_ids:i? prev_so_C:i? told:i",
    "One request's share of a step. C is the count before it advances; v_before/v_after are the tokens whose KV is final; told = blocks at"
    " the table's start that earlier outputs told of.",
)
_kind(
    "req.state",
    "sched",
    "req:s generation:i from:s? to:s reason:s by:s C:i P:i N:i inflight:i",
    "A request changed its state.",
)
_kind(
    "req.updated",
    "sched",
    "req:s generation:i of_step:i C:i P:i N:i inflight:i hashes:i cached_blocks:i real:i status:s",
    "A step's output was processed for a request; real = C - P.",
)
_kind(
    "req.finished",
    "sched",
    "req:s generation:i status:s C:i P:i N:i inflight:i blocks:l delayed:b v_final:i tables:l hook:s",
    "A request finished; delayed = its blocks stay until finished_sending.",
)
_kind(
    "block",
    "sched",
    "op:s id:i group:i owner:s? hashed:b ref:i in_flight:b",
    "The block pool did something to one block; in_flight = a step that has not landed writes to it.",
)
_kind(
    "hold",
    "sched",
    "req:s generation:i direction:s transfer:s? cause:s",
    "The engine starts to wait for a transfer.",
)
_kind(
    "release",
    "sched",
    "req:s generation:i direction:s transfer:s? cause:s",
    "The engine stops waiting for it.",
)
_kind(
    "transfer.reported",
    "sched",
    "req:s generation:i transfer:s? rank:i direction:s known:b held:b second:b",
    "The worker half reported a finished transfer; held = the engine waited for it; second = for load and send, the other was reported.",
)
_kind(
    "transfer.failed",
    "sched",
    "req:s? transfer:s? rank:i blocks:l outside_grant:l groups:a is_async:b",
    "The worker half reported blocks with load errors.",
)
_kind(
    "ranks.joined",
    "sched",
    "expected:i sent:l received:l failed:l invalid:l all_sent:l all_received:l errors:l failures:l early:l late:l",
    "What vLLM made of several ranks' reports, and what it had to: all_sent, all_received, errors, failures; early, late: the difference.",
)
_kind(
    "engine.id",
    "hooks",
    "rank:i half:s kept:b",
    "The engine id that a half's configuration has once the halves have started, against the one given.",
)
_kind("request.new", "sched", "req:s generation:i", "on_new_request was called.")
_kind(
    "hashes",
    "sched",
    "req:s generation:i count:i full:i same:b distinct:b",
    "The block hashes of a request at a lookup; same/distinct: equal content had this hash before, other content had another.",
)
_kind(
    "events.lookup",
    "sched",
    "req:s announced:i got:i local:i tokens:i missing:l untold:l chain:l",
    "A lookup against the KV events so far: tokens announced and had, blocks missing in between, blocks from the first unannounced on, all"
    " announced blocks from the first one on.",
)
_kind(
    "queries",
    "sched",
    "requests:i tokens:i hits:i due_requests:i due_tokens:i due_hits:i skipping:l",
    "A step's statistics of the external cache, and (due_) what was admitted in it; skipping = requests that read no cache.",
)
_kind(
    "sample",
    "sched",
    "req:s generation:i index:i token:i clean:b prompt:i?",
    "A token; clean = from right KV; prompt = its length.",
)

# --- kv: the worker and its memory ---------------------------------------------------------------------------------------------------
_kind(
    "worker.step_begin",
    "kv",
    "forward:b tokens:i attn_metadata_none:b failed_forward:b",
    "The worker begins a step.",
)
_kind(
    "worker.step_end",
    "kv",
    "forward:b tokens:i attn_metadata_none:b failed_forward:b ranks:l",
    "The worker is done with a step; ranks = of several, those on which the connector was bound to it.",
)
_kind(
    "kv.computed",
    "kv",
    "req:s generation:i start:i end:i accepted:i rejected:i",
    "The model wrote KV of [start, end).",
)
_kind(
    "state.offered",
    "sched",
    "req:s group:i block:i tokens:i in_table:b again:b",
    "build_connector_meta is offered the state after a request's first `tokens` tokens, in a block; again = as it was before.",
)
_kind(
    "kv.registered",
    "harness",
    "required:s? possible:l? layout:s told:s? shape:l strides:l own_shape:l? own_strides:l?",
    "KV tensors: the layout that the class requires, what is possible (None: all), what the KVCacheConfig says; own = by vLLM's own code.",
)
_kind(
    "kv.changed",
    "kv",
    "after_hook:s layer:i req:l transfer:l tail:l shared:l over_computed:l null_block:l unallocated:l other_request:l not_transferred:l"
    " group:i?",
    "KV memory changed during a hook; the lists hold slots. not_transferred = of a group that is no part of the transferred KV."
    " group: the layer's, if there are several.",
)
_kind(
    "load.due",
    "kv",
    "req:s generation:i transfer:s? granted:i missing:l wrong:l reported_failed:b is_async:b local:i by_group:l early_reads:l",
    "The engine is about to rely on a grant. by_group = of several groups, those that lack something: number, tokens per block, positions,"
    " block table. early_reads = where work on other streams was queued that read too early, so far.",
)
_kind(
    "kv.wrong",
    "kv",
    "req:s generation:i layer:i kv:s pos:i count:i slot:i block:i via:s transfer:s? transfer_sync:b? found:s origin:s group:i?",
    "A slot that is read does not hold what it must; `found` says what it holds.",
)

# --- plan: from a connector's optional Inspector -------------------------------------------------------------------------------------
_kind(
    "plan",
    "plan",
    "op:s req:s start:i end:i timing:s key:s? C:i S:i N:i P:i",
    "What the connector's metadata plans to do.",
)


def channels_of(kinds: set[str]) -> set[str]:
    """The channels that a check over these event kinds needs (`harness` left out: it is always there)."""
    return {EVENTS[kind].channel for kind in kinds} - {"harness"}


def check_event(event: dict[str, object]) -> list[str]:
    """Sentences about what is wrong with an event's shape; empty if it is as listed. For tests and for debugging, not for the hot path."""
    name = event.get("k")
    kind = EVENTS.get(name) if isinstance(name, str) else None
    return [f"unknown event {name!r}"] if kind is None else kind.problems(event)
