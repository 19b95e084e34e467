# SPDX-License-Identifier: Apache-2.0
"""Learns a connector's capabilities from its class and from the plainest runs there are, and what it promises from calibration."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.capabilities import CAPABILITIES, complete
from kvconform.contract.case import Variant
from kvconform.judge.aggregate import contradicted
from kvconform.run.promises import ROOM, Crowd, Plain, Promises, plain_case
from kvconform.run.runner import run_variant


@dataclass
class Profile:
    """Capabilities of a target, where each came from (declared, inferred, default; kvconform.judge.aggregate for what is contradicted), and its
    promises.
    """

    caps: dict[str, Any]
    sources: dict[str, str]
    promises: Promises


class Calibration:
    """Runs the plain round trip, on the reference engine if that can; results are kept per (workload, block size). `broke`: how the first
    run that broke off did, and `announced` what a lookup in one said that there is: tokens, and whether they come asynchronously.
    """

    def __init__(self, target: Target, tmp: Path) -> None:
        self.target, self.tmp = target, tmp
        self._counter = itertools.count()
        self._known: dict[tuple[Plain, int], tuple[int, bool]] = {}
        self.broke: str | None = None
        self.announced: tuple[int, bool] | None = None

    def came_back(self, plain: Plain, block_size: int) -> tuple[int, bool]:
        """(tokens that were there at the second lookup, whether by an asynchronous load) in the plain workload."""
        key = (plain, block_size)
        if key not in self._known:
            case = plain_case(plain, block_size)
            variant = Variant(case, case.engines[0], "sync", "v1", 1, block_size)
            number = next(
                self._counter
            )  # also the seed: a store that outlives its run must not know the next one's tokens
            run = run_variant(
                variant, self.target, seed=number, tmp=self.tmp / f"calibration-{number}"
            )
            answers = [
                e
                for e in run.trace
                if e["kind"] == "lookup" and e["req"] == "b" and e["tokens"] is not None
            ]
            crash = next(
                (e for e in run.trace if e["kind"] in ("engine.crash", "engine.stall")), None
            )
            if crash is not None:
                self.broke = self.broke or str(crash.get("error") or "nothing went on")
            claim = (
                (max(0, answers[-1]["local"] + int(answers[-1]["tokens"])), answers[-1]["is_async"])
                if answers
                else (0, False)
            )
            if crash is not None and claim[0] > 0:
                self.announced = self.announced or claim
            self._known[key] = claim if crash is None else (0, False)
        return self._known[key]


def profile_of(target: Target, tmp: Path) -> Profile:
    """The profile of a target. Runs a few plain round trips on the reference engine; UsageError for impossible declarations."""
    cls = target.resolve()
    declared = target.declared(cls)
    complete(declared)
    caps, sources = dict(declared), dict.fromkeys(declared, "declared")
    contradictions: dict[str, str] = {}
    calibration = Calibration(target, tmp)

    def learn(name: str, value: Any) -> None:
        if name not in caps:
            caps[name], sources[name] = value, "inferred"
        elif sources[name] == "declared" and caps[name] != value:
            contradictions[name] = contradicted(caps[name], value)

    from kvconform.compat.vllm_api import SupportsHMA

    composite = cls.__name__ == "MultiConnector"
    learn("composite", composite)
    learn(
        "hma",
        issubclass(cls, SupportsHMA) and not (composite and not _children_keep_hybrid(target, tmp)),
    )
    roles = set(caps.get("roles", ()))
    if "transfer" not in caps:
        learn("transfer", {"kv_producer", "kv_consumer"} <= roles and "kv_both" not in roles)
    learn("fault_injection", hasattr(cls, "kvconform_fail_load"))
    if not {"store", "saves", "async_load"} <= set(caps):
        block, length, prompt, is_async = _first_hit(calibration)
        said = (
            prompt > 0 or calibration.announced is not None
        )  # what was announced and did not come is for the cases to judge
        if prompt == 0 and calibration.announced is not None:
            is_async = calibration.announced[1]
        more = (
            calibration.came_back(Plain(length, 24, length + 23, length + 25), block)[0]
            if prompt > 0
            else 0
        )
        if said or "async_load" not in caps:
            learn("async_load", is_async)
        learn("store", said)
        if prompt == 0 and calibration.broke and sources["store"] == "inferred":
            sources["store"] = f"inferred, from a plain run that broke off: {calibration.broke}"
        learn("saves", "none" if not said else "all" if more > length else "prompt")
        if prompt > block and "best_effort" not in caps:
            busy = Plain(length, 1, length, length, _busy(length, prompt, block))
            roomy = Plain(length, 1, length, length, room=ROOM)
            learn(
                "best_effort",
                any(calibration.came_back(plain, block)[0] < prompt for plain in (busy, roomy)),
            )
    for name in CAPABILITIES:
        sources.setdefault(name, "default")
    if sources.get("chunk_tokens") == "declared" and (
        seen := _finer(calibration, int(caps["chunk_tokens"]))
    ):
        contradictions["chunk_tokens"] = f"declared, but {seen}"
    full = complete(caps)
    has_declared = (
        sources["saves"] == "declared"
        and sources["chunk_tokens"] == "declared"
        and not full["best_effort"]
    )
    sources |= contradictions
    return Profile(full, sources, _promises(calibration, full, has_declared))


def promises_of(target: Target, tmp: Path, caps: dict[str, Any], *, declared: bool) -> Promises:
    """What a target promises whose capabilities are known. Runs nothing before somebody asks."""
    return _promises(Calibration(target, tmp), caps, declared)


def _promises(calibration: Calibration, caps: dict[str, Any], declared: bool) -> Promises:
    return Promises(caps, declared, lambda plain, size: calibration.came_back(plain, size)[0])


def _children_keep_hybrid(target: Target, tmp: Path) -> bool:
    """Whether vLLM takes a MultiConnector for one that works with several KV cache groups: all of its children must."""
    from kvconform.compat.vllm_api import transfer_config
    from kvconform.observe.static_checks import keeps_hybrid

    return keeps_hybrid(
        transfer_config(
            target.name,
            target.role or "kv_both",
            target.options(tmp, 4),
            target.module,
            "recompute",
            "asked",
        )
    )


def _first_hit(calibration: Calibration) -> tuple[int, int, int, bool]:
    """(block size, prompt length, tokens that came back, asynchronously?) of the first plain repeat that hits.

    Not every length does everywhere. The last one is for chunks of up to 256 tokens: with the outputs it fills a second one.
    """
    for block, length in (*((4, length) for length in range(41, 45)), (16, 500)):
        back, is_async = calibration.came_back(Plain(length, 1, length, length), block)
        if back > 0:
            return block, length, back, is_async
    return 4, 0, 0, False


def _finer(calibration: Calibration, chunk: int) -> str:
    """What shows that more comes back than whole chunks of so many tokens; empty if nothing does. A repeat of 41 tokens is asked."""
    plain = Plain(41, 1, 41, 41)
    back = calibration.came_back(plain, 4)[0] if chunk > 1 else 0
    known = 41 + 1  # the prompt's, and the one that was generated
    return (
        f"{back} of {plain.prompt} tokens came back, more than whole chunks of {chunk}"
        if back > known // chunk * chunk
        else ""
    )


def _busy(length: int, back: int, block: int) -> Crowd:
    """A crowd that asks much of a connector: others to save for and to load for, and little left that a load could spare."""
    return Crowd(
        before=(length,),
        beside=(length, length),
        after=(length,),
        loads=(length - 1,),
        local=(back - 1) // block * block,
    )


_profiles: dict[str, Profile] = {}


def target_profile(target: Target, tmp: Path) -> Profile:
    """The capabilities and promises of a target, worked out once per process; calibration runs write below `tmp`."""
    key = repr(
        (
            target.connector,
            sorted(target.extra_config.items(), key=str),
            target.role,
            sorted(target.capabilities.items(), key=str),
            target.half,
            target.device,
            target.adapters,
        )
    )
    if key not in _profiles:
        _profiles[key] = profile_of(
            target, tmp / f"profile-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        )
    return _profiles[key]


def in_its_role(target: Target) -> Target:
    """The target in a kv_role that it works with: the one that is set, else the cases', else the first one that it declares."""
    roles = (
        list(target.declared(target.resolve()).get("roles", ()))
        if target.connector is not None and target.role is None
        else []
    )
    return replace(target, role=roles[0]) if roles and "kv_both" not in roles else target
