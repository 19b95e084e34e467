# SPDX-License-Identifier: Apache-2.0
"""Calibration: a connector's capabilities and promises, learned from its class and plain runs."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from kvconform.config.target import Target
from kvconform.contract.capabilities import CAPABILITIES, complete
from kvconform.contract.case import Case, Variant
from kvconform.files import replace as write
from kvconform.judge.aggregate import contradicted
from kvconform.process import clock
from kvconform.run.isolation import ElsewhereError
from kvconform.run.promises import MEASURED, ROOM, Crowd, Plain, Promises, plain_case
from kvconform.run.runner import run_variant


@dataclass
class Profile:
    """Capabilities of a target, and what it promises.

    `sources` says where each capability came from: declared, inferred or default. `doubts` maps
    capabilities to the evidence against them.
    """

    caps: dict[str, Any]
    sources: dict[str, str]
    doubts: dict[str, str]
    promises: Promises


@dataclass(frozen=True)
class _Measured:
    """Outcome of a plain round trip.

    `claim` is what its second lookup answered: tokens, and whether asynchronously. `broke` is the
    error with which the run broke off, or None. `failed`: whether a load was reported as failed.
    """

    claim: tuple[int, bool]
    broke: str | None
    failed: bool


class Calibration:
    """Runs of the plain round trip, cached by workload and block size.

    They use the reference engine if it can run the workload. `broke` is the error of the first run
    that broke off, or None. `announced` is what a lookup in such a run answered: the number of
    tokens, and whether they are loaded asynchronously. `failed`: whether a load of a plain run was
    reported as failed.
    """

    def __init__(self, target: Target, tmp: Path) -> None:
        self.target = target
        self.tmp = tmp
        shared = os.environ.get(MEASURED)
        self._shared = Path(shared) if shared else None
        self._known: dict[tuple[Plain, int], _Measured] = {}
        self.broke: str | None = None
        self.announced: tuple[int, bool] | None = None
        self.failed = False

    def came_back(self, plain: Plain, block_size: int) -> tuple[int, bool]:
        """Return what the second lookup of the plain workload found.

        That is the number of tokens, and whether they are loaded asynchronously.
        """
        key = (plain, block_size)
        if key not in self._known:
            found = self._known[key] = self._found(plain, block_size)
            self.failed = self.failed or found.failed
            self.broke = self.broke or found.broke
            if found.broke is not None and found.claim[0] > 0:
                self.announced = self.announced or found.claim
        found = self._known[key]
        return found.claim if found.broke is None else (0, False)

    def error_of(self, plain: Plain, block_size: int) -> str | None:
        """Return the error with which the run of a plain workload broke off, if it did."""
        self.came_back(plain, block_size)
        return self._known[plain, block_size].broke

    def _found(self, plain: Plain, block_size: int) -> _Measured:
        """Return what another worker has measured, or measure it for all of them.

        A worker waits for another one that is measuring the same, but not longer than `PATIENCE`. A
        run that broke off is not shared: perhaps the machine was busy.
        """
        key = repr((_identity(self.target), plain, block_size))
        digest = hashlib.sha256(key.encode()).hexdigest()
        # A seed of its own: a store that outlives its run must not know the tokens of another.
        seed = int(digest[:7], 16)
        if self._shared is None:
            return self._measure(plain, block_size, seed)
        path = self._shared / f"{digest}.json"
        known = _read(path)
        if known is not None:
            return known
        with _locked(path.with_suffix(".lock")):
            known = _read(path)
            if known is not None:
                return known
            found = self._measure(plain, block_size, seed)
            if found.broke is None:
                write(path, json.dumps([found.claim, found.failed]))
        return found

    def _measure(self, plain: Plain, block_size: int, seed: int) -> _Measured:
        case = plain_case(plain, block_size)
        variant = Variant(case, case.engines[0], "sync", "v1", 1, block_size)
        folder = self.tmp / f"calibration-{len(self._known)}"
        # What it finds is promised, so it must not be less than runs with pauses find.
        run = run_variant(variant, self.target, seed=seed, tmp=folder, rests=True)
        claim = (0, False)
        answers = [
            event
            for event in run.trace
            if event["kind"] == "lookup" and event["req"] == "b" and event["tokens"] is not None
        ]
        failed = any(e["kind"] == "load.due" and e["reported_failed"] for e in run.trace)
        if answers:
            last = answers[-1]
            claim = (max(0, last["local"] + int(last["tokens"])), last["is_async"])
        crashes = (e for e in run.trace if e["kind"] in ("engine.crash", "engine.stall"))
        crash = next(crashes, None)
        broke = None if crash is None else str(crash.get("error") or "nothing went on")
        return _Measured(claim, broke, failed)


PATIENCE = 60.0
"""Seconds that a worker waits for another one that measures the same.

Then it measures, too: a process that a connector forked keeps the lock of a worker that was killed.
"""


def _read(path: Path) -> _Measured | None:
    """Return what a worker has measured and shared, if it has."""
    if not path.exists():
        return None
    claim, failed = json.loads(path.read_text(encoding="utf-8"))
    return _Measured((claim[0], claim[1]), None, failed)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, or after `PATIENCE` seconds go on without it.

    The file and its folder are made if they do not exist.
    """
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        until = clock.monotonic() + PATIENCE
        while not _lock(file) and clock.monotonic() < until:
            time.sleep(0.05)
        try:
            yield
        finally:
            # A process that the connector has forked meanwhile has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: IO[str]) -> bool:
    """Lock a file, unless another process has locked it. Return whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def profile_of(target: Target, tmp: Path) -> Profile:
    """Return the profile of a target, after a few plain round trips on the reference engine.

    UsageError for impossible declarations.
    """
    cls = target.resolve()
    declared = target.declared(cls)
    complete(declared)
    caps = dict(declared)
    sources = dict.fromkeys(declared, "declared")
    doubts: dict[str, str] = {}
    calibration = Calibration(target, tmp)

    def learn(name: str, value: Any) -> None:
        if name not in caps:
            caps[name], sources[name] = value, "inferred"
        elif sources[name] == "declared" and not _alike(caps[name], value):
            doubts[name] = contradicted(caps[name], value)

    from kvconform.compat.vllm_api import SupportsHMA

    composite = cls.__name__ == "MultiConnector"
    learn("composite", composite)
    hybrid = issubclass(cls, SupportsHMA) and (not composite or _children_keep_hybrid(target, tmp))
    learn("hma", hybrid)
    if not {"transfer", "notes"} <= set(caps):
        roles = set(caps.get("roles", PAIR))
        may_transfer = roles >= PAIR and not composite and caps.get("transfer", True)
        found = hand_over(target, tmp) if may_transfer else NOTHING
        if "transfer" not in caps:
            learn("transfer", found.hands_over)
            if found.hands_over:
                learn("roles", ["kv_both", *sorted(PAIR)])
        if "notes" not in caps:
            learn("notes", found.notes)
        if found.partial and "best_effort" not in caps:
            learn("best_effort", True)
    fail_load = getattr(cls, "kvconform_fail_load", None)
    learn("fault_injection", fail_load is not None)
    learn("fault_injection_by_rank", fail_load is not None and _takes(fail_load, "rank"))
    if not takes_every_stage(cls):
        learn("pipeline_parallel", False)
    if not {"store", "saves", "async_load"} <= set(caps):
        block, length, prompt, is_async = _first_hit(calibration)
        # Tokens that were announced and did not come are for the cases to judge.
        stores = prompt > 0 or calibration.announced is not None
        if prompt == 0 and calibration.announced is not None:
            is_async = calibration.announced[1]
        more = 0
        if prompt > 0:
            with_outputs = Plain(length, 24, length + 23, length + 25)
            more, _ = calibration.came_back(with_outputs, block)
        if stores or "async_load" not in caps:
            learn("async_load", is_async)
        learn("store", stores)
        if "store" in doubts and not stores:
            doubts["store"] += (
                " (no KV came back in plain runs; if a server has it, is that there?)"
            )
        if prompt == 0 and calibration.broke:
            doubts["store"] = f"from a plain run that broke off: {calibration.broke}"
            if sources["store"] != "inferred":
                doubts["store"] = f"but a plain run broke off: {calibration.broke}"
        if calibration.failed:
            doubts["store"] = "but a load of a plain prompt was reported as failed"
        if not stores:
            learn("saves", "none")
            if "store" in doubts:
                doubts.pop("saves", None)  # it says the same
        else:
            learn("saves", "all" if more > length else "prompt")
        if prompt > block and "best_effort" not in caps:
            busy = Plain(length, 1, length, length, _busy(length, prompt, block))
            roomy = Plain(length, 1, length, length, room=ROOM)
            less = next(
                (run for run in (busy, roomy) if calibration.came_back(run, block)[0] < prompt),
                None,
            )
            learn("best_effort", less is not None)
            if less is not None and (error := calibration.error_of(less, block)):
                doubts["best_effort"] = (
                    f"from a plain run that broke off ({error}), so it is held to less;"
                    " if it keeps all that it stores, declare best_effort = false"
                )
    if "persistent" not in caps and caps.get("store"):
        persistent, doubt = _outlives_process(calibration, target)
        learn("persistent", persistent)
        if doubt:
            doubts["persistent"] = doubt
    if sources.get("saves") == "declared" and "chunk_tokens" not in caps:
        chunk = _large_chunk(calibration)
        if chunk and calibration.came_back(_shorter(chunk), LONG[0])[0] > 0:
            learn("chunk_tokens", chunk)
        elif chunk and "best_effort" not in caps:
            learn("best_effort", True)  # short prompts are not worth storing to it
    for name in CAPABILITIES:
        sources.setdefault(name, "default")
    if sources["chunk_tokens"] == "declared":
        evidence = _finer(calibration, int(caps["chunk_tokens"]))
        if evidence:
            doubts["chunk_tokens"] = f"but {evidence}"
    return _profile(complete(caps), sources, doubts, calibration)


def _alike(declared: Any, seen: Any) -> bool:
    """Return whether two values of a capability mean the same: the order of names does not."""
    if isinstance(declared, (list, tuple)) and isinstance(seen, (list, tuple)):
        return sorted(declared) == sorted(seen)
    return bool(declared == seen)


def _profile(
    caps: dict[str, Any], sources: dict[str, str], doubts: dict[str, str], calibration: Calibration
) -> Profile:
    has_declared = sources["saves"] == "declared" and not caps["best_effort"]
    return Profile(caps, sources, doubts, _promises(calibration, caps, has_declared))


PAIR = {"kv_producer", "kv_consumer"}
"""Roles of two engines of which one hands KV to the other."""


class HandOver(NamedTuple):
    """Result of a request that a producer was asked to hand over to a consumer.

    `hands_over`: the consumer got parameters. `notes`: the producer released what it held when the
    consumer had loaded it, before any lease ran out. `partial`: it loaded some of it, and left out
    more than a block.
    """

    hands_over: bool
    notes: bool
    partial: bool


NOTHING = HandOver(hands_over=False, notes=False, partial=False)


def hand_over_case() -> Case:
    """Return the case in which a producer hands one prompt to a consumer."""
    case = {
        "id": "internal.hand-over",
        "area": "internal",
        "text": "A producer computes a prompt, and a consumer asks for its KV.",
        "config": {"engines": {"p": "kv_producer", "d": "kv_consumer"}},
        "engines": ["reference"],
        "steps": [
            {"add": {"req": "p1", "prompt": 13, "max_tokens": 1, "hand_over": True}},
            {"run": {"until": "p1"}},
            {"on": "d"},
            {"add": {"req": "d1", "prompt": {"same": "p1"}, "handed": "p1"}},
            {"run": {}},
        ],
    }
    return Case.model_validate(case, strict=False)


def hand_over(target: Target, tmp: Path) -> HandOver:
    """Return what comes of one request that a router sends to a producer and to a consumer."""
    from kvconform.compat.vllm_api import KVConnectorBase_V1

    cls = target.resolve()
    hooks = ("request_finished", "request_finished_all_groups")
    if not any(_own(cls, hook, KVConnectorBase_V1) for hook in hooks):
        return NOTHING
    case = hand_over_case()
    variant = Variant(case, "reference", "sync", "v1", 1, case.config.block_size)
    run = run_variant(variant, target, seed=0, tmp=tmp / "hand-over", rests=True)
    handed = [e for e in run.trace if e["kind"] == "pair.params"]
    ends = [e for e in run.trace if e["kind"] == "pair.request"]
    return HandOver(
        hands_over=any(not e["none"] for e in handed),
        notes=any(e["held"] and e["released"] and not e["early"] for e in ends),
        partial=any(0 < e["loaded"] < e["offered"] - variant.block_size for e in ends),
    )


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of that name; False if that is not known."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def takes_every_stage(cls: type[Any]) -> bool:
    """Return whether vLLM's base class lets this one run with several pipeline stages.

    It refuses the handshake metadata of other stages than the first, unless that is overridden.
    """
    from kvconform.compat.vllm_api import KVConnectorBase_V1

    return _own(cls, "set_xfer_handshake_metadata_pp_aware", KVConnectorBase_V1) or not _own(
        cls, "get_handshake_metadata", KVConnectorBase_V1
    )


def _own(cls: type[Any], method: str, base: type[Any]) -> bool:
    """Return whether `cls` overrides a method of `base`, or `base` does not have it."""
    return getattr(cls, method, None) is not getattr(base, method, len)


def promises_of(target: Target, tmp: Path, caps: dict[str, Any], *, declared: bool) -> Promises:
    """Return the promises of a target with known capabilities. Calibration runs on demand."""
    return _promises(Calibration(target, tmp), caps, declared)


def _promises(calibration: Calibration, caps: dict[str, Any], declared: bool) -> Promises:
    target = calibration.target
    return Promises(
        caps,
        declared,
        lambda plain, size: calibration.came_back(plain, size)[0],
        splits=target.declared(target.resolve()).get("context_parallel", False),
    )


def _children_keep_hybrid(target: Target, tmp: Path) -> bool:
    """Return whether vLLM keeps several KV cache groups with this MultiConnector.

    It does if all children of the connector support them.
    """
    from kvconform.compat.vllm_api import transfer_config
    from kvconform.observe.static_checks import keeps_hybrid

    config = transfer_config(
        target.name,
        target.role or "kv_both",
        target.options(tmp, 4),
        target.module,
        "recompute",
        "asked",
    )
    return keeps_hybrid(config)


def _shorter(chunk: int) -> Plain:
    """Return a plain repeat of a prompt that is little longer than a chunk."""
    length = chunk + LONG[0] + 1
    return Plain(length, 1, length, length)


LONG = (16, 500)
"""Block size and length of the longest plain prompt."""


def _first_hit(calibration: Calibration) -> tuple[int, int, int, bool]:
    """Return the first plain repeat that hits.

    That is (block size, prompt length, tokens that came back, whether asynchronously). Not every
    length hits with every connector. `LONG` is for chunks of up to 256 tokens: with the outputs it
    fills a second chunk.
    """
    for block, length in ((4, 41), (4, 42), (4, 43), (4, 44), LONG):
        back, is_async = calibration.came_back(Plain(length, 1, length, length), block)
        if back > 0:
            return block, length, back, is_async
    return 4, 0, 0, False


def _large_chunk(calibration: Calibration) -> int:
    """Return the tokens per chunk of a connector that finds nothing of short prompts, or 0.

    Without this, whole blocks would be promised in the name of an author who has declared that
    prompts are saved, and not how large a chunk is. A connector that finds part of a short prompt
    is held to whole blocks.
    """
    block, length, back, _ = _first_hit(calibration)
    if back == 0 or (block, length) != LONG:
        return 0
    lengths = (length - 101, length - 202)
    others = (calibration.came_back(Plain(n, 1, n, n), block)[0] for n in lengths)
    return math.gcd(back, *others)


def _outlives_process(calibration: Calibration, target: Target) -> tuple[bool, str]:
    """Return whether KV comes back after a restart, and the doubt about that, or "".

    The engine is restarted first: what is lost then is lost with the process, too. A restart that
    breaks off is for the cases to judge.
    """
    block, length, prompt, _ = _first_hit(calibration)
    if prompt == 0:
        return False, ""
    for restart in RESTARTS if target.device != "cuda" else RESTARTS[:1]:
        plain = Plain(length, 1, length, length, restart=restart)
        try:
            back, _ = calibration.came_back(plain, block)
        except ElsewhereError as error:
            return True, f"from a restart that broke off: {error}"
        if broke := calibration.error_of(plain, block):
            return True, f"from a restart that broke off: {broke}"
        if back == 0:
            return False, ""
    return True, ""


RESTARTS: tuple[Literal["engine", "process"], ...] = ("engine", "process")
"""Kinds of restart, the cheaper one first."""


def _finer(calibration: Calibration, chunk: int) -> str:
    """Return the evidence that more comes back than whole chunks of `chunk` tokens, or "".

    It comes from a repeat of 41 tokens.
    """
    plain = Plain(41, 1, 41, 41)
    back = calibration.came_back(plain, 4)[0] if chunk > 1 else 0
    known = plain.prompt + plain.outputs
    if back <= known // chunk * chunk:
        return ""
    return f"{back} of {plain.prompt} tokens came back, more than whole chunks of {chunk}"


def _busy(length: int, back: int, block: int) -> Crowd:
    """Return a crowd that keeps a connector busy.

    There are other requests to save and to load, and a load could bring only the last block: the
    rest is in the engine's own cache.
    """
    return Crowd(
        before=(length,),
        alongside=(length, length),
        after=(length,),
        loads=(length - 1,),
        local=(back - 1) // block * block,
    )


_profiles: dict[str, Profile] = {}
_assumed: dict[str, tuple[dict[str, Any], dict[str, str]]] = {}


def assume(connector: str, caps: dict[str, Any], sources: dict[str, str]) -> None:
    """Have this process take a connector's capabilities for these, and not calibrate.

    For answers that a complete run checks. A profile that this process knows already stays.
    """
    _assumed[connector] = caps, sources


def _identity(target: Target) -> str:
    """Return a text that is equal for targets that behave alike."""
    return repr(
        (
            target.connector,
            sorted(target.extra_config.items(), key=str),
            target.role,
            sorted(target.capabilities.items(), key=str),
            target.half,
            target.device,
            target.adapters,
            target.router,
            sorted(target.request_params.items()),
        )
    )


def target_profile(target: Target, tmp: Path) -> Profile:
    """Return the profile of a target, computed once per process. Writes below `tmp`."""
    key = _identity(target)
    if key not in _profiles:
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        folder = tmp / f"profile-{digest}"
        if target.connector in _assumed:
            _profiles[key] = _profile(*_assumed[target.connector], {}, Calibration(target, folder))
        else:
            _profiles[key] = profile_of(target, folder)
    return _profiles[key]


def in_its_role(target: Target) -> Target:
    """Return the target with a kv_role that it supports.

    A role that is set stays. Without one, the cases' own role applies, unless the connector
    declares roles without kv_both: then its first one is set.
    """
    if target.connector is None or target.role is not None:
        return target
    roles = list(target.declared(target.resolve()).get("roles", ()))
    if not roles or "kv_both" in roles:
        return target
    return replace(target, role=roles[0])
