# SPDX-License-Identifier: Apache-2.0
"""Static checks of a connector's class against the installed base class, and of vLLM itself.

The checks of vLLM cover what it must refuse at its start, and names that it has removed. They
are made once, on the classes, a configuration, and the first instance.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from kvconform.compat import vllm_api
from kvconform.compat.groups import knows_layout
from kvconform.compat.vllm_api import (
    KVConnectorBase_V1,
    KVConnectorFactory,
    KVConnectorRole,
    KVTransferConfig,
    SupportsHMA,
    VllmConfig,
)
from kvconform.observe.probe import hook_names

Finding = tuple[str, bool, str]


def inspect_class(cls: type, extra_config: dict[str, Any], config: Any) -> Iterator[Finding]:
    """Yield (item, ok, detail) for each check of a connector's class.

    Calls the class methods that vLLM calls without an instance; changes nothing else.
    """
    yield constructor(cls, extra_config)
    missing = _not_implemented(cls)
    yield "abstract-methods", not missing, f"not implemented: {missing}" if missing else ""
    asked = _class_methods(cls, extra_config, config)
    yield asked
    if asked[1]:
        name = cls.get_required_kvcache_layout(config)  # type: ignore[attr-defined]
        known = name is None or knows_layout(name)
        yield "required-layout", known, "" if known else f"{name!r} is unknown"
        if getattr(config, "kv_transfer_config", None) is not None:
            yield agrees_with_itself(config)
    yield _start_load(cls)
    if getattr(config, "kv_transfer_config", None) is not None:
        kept = keeps_hybrid(config.kv_transfer_config)
        detail = "" if kept else _why_not_hybrid(cls, config.kv_transfer_config)
        yield "hybrid-kept", kept, detail
    hooks = {name: _plain(getattr(cls, name, None)) for name in hook_names()}
    awaited = [name for name, hook in hooks.items() if inspect.iscoroutinefunction(hook)]
    detail = f"{', '.join(awaited)}: a coroutine function, which vLLM does not await"
    yield "awaited:hooks", not awaited, detail if awaited else ""
    for name, member in vars(KVConnectorBase_V1).items():
        if isinstance(member, property) and not name.startswith("_"):
            own = inspect.getattr_static(cls, name)
            ok = not callable(own)
            detail = "" if ok else f"is a {type(own).__name__}, which is always true"
            yield f"property:{name}", ok, detail
    for name in hook_names():
        own = getattr(cls, name, None)
        base = getattr(KVConnectorBase_V1, name, None)
        if own is None or base is None or _plain(own) is _plain(base) or name == "start_load_kv":
            continue
        problem = _accepts_like(_plain(own), _plain(base))
        yield f"signature:{name}", problem is None, problem or ""


def _why_not_hybrid(cls: type, transfer: Any) -> str:
    """Return why vLLM turns its hybrid cache manager off for the class."""
    if not issubclass(cls, SupportsHMA):
        return f"vLLM turns it off: {cls.__name__} is no subclass of SupportsHMA"
    children = transfer.kv_connector_extra_config.get("connectors", [])
    without = [
        child["kv_connector"]
        for child in children
        if not keeps_hybrid(KVTransferConfig(**{"engine_id": transfer.engine_id, **child}))
    ]
    return (
        f"vLLM turns it off: not every child of {cls.__name__} is a subclass of SupportsHMA"
        f" ({', '.join(without) or 'it has none'}); do not declare hma, or declare hma = false"
    )


def keeps_hybrid(transfer: Any) -> bool:
    """Return whether vLLM keeps its hybrid cache manager on, if the user does not decide.

    `transfer`: the transfer configuration; None: without a connector.
    """
    config = VllmConfig(kv_transfer_config=copy.copy(transfer))
    return not config.scheduler_config.disable_hybrid_kv_cache_manager


def agrees_with_itself(config: Any) -> Finding:
    """Check that a class asks for one layout as several children of MultiConnector, one per role.

    `config` names the class.
    """
    own = config.kv_transfer_config
    child = {
        "kv_connector": own.kv_connector,
        "kv_connector_extra_config": own.kv_connector_extra_config,
    }
    if own.kv_connector_module_path:
        child["kv_connector_module_path"] = own.kv_connector_module_path
    outer = copy.copy(config)
    roles = ("kv_both", "kv_producer", "kv_consumer")
    children = [{**child, "kv_role": role} for role in roles]
    outer.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    try:
        MultiConnector.get_required_kvcache_layout(outer)
    except ValueError as error:
        found = str(error).splitlines()[0]
        return "multi-layout", False, f"get_required_kvcache_layout by kv_role: {found}"
    except Exception:  # the check class-methods reports what the class itself raises
        return "multi-layout", True, ""
    return "multi-layout", True, ""


def inspect_instance(connector: Any) -> Iterator[Finding]:
    """Yield (item, ok, detail) for each property of the scheduler half, once it is bound."""
    for name, member in vars(KVConnectorBase_V1).items():
        if isinstance(member, property) and name != "role" and not name.startswith("_"):
            value = getattr(connector, name)
            ok = isinstance(value, bool)
            yield f"property:{name}", ok, "" if ok else f"is {value!r}"


def bound(connector: Any, called: set[str]) -> Finding:
    """Check that the block pool reached a connector that overrides both hooks of BINDS.

    `called`: the hooks called so far, at any depth.
    """
    methods = {name: _plain(getattr(type(connector), name, None)) for name in BINDS}
    overrides_both = all(
        getattr(method, "__qualname__", "") != f"KVConnectorBase_V1.{name}"
        for name, method in methods.items()
    )
    missed = overrides_both and BINDS[0] in called and BINDS[1] not in called
    detail = "bind_gpu_block_pool is overridden and never called" if missed else ""
    return "bind-hooks", not missed, detail


BINDS = ("bind_kv_cache_manager", "bind_gpu_block_pool")


def _plain(function: Any) -> Any:
    return getattr(function, "_kvconform_original", function)


def constructor(cls: type, extra_config: dict[str, Any]) -> Finding:
    """Check that vLLM can construct a connector's class and, if there is one, its OffloadingSpec.

    Constructs neither.
    """
    problem = _refused_class(cls)
    if problem is None and "spec_module_path" in extra_config:
        problem = _refused_spec(cls, extra_config)
    return "constructor", problem is None, problem or ""


def _refused_spec(cls: type, extra_config: dict[str, Any]) -> str | None:
    """Return why vLLM refuses the OffloadingSpec that the configuration names, or None.

    None also if the configuration is wrong: if there is no such module or class.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
            OffloadingConnector,
        )
        from vllm.v1.kv_offload.base import OffloadingSpec
    except ImportError:  # before vLLM has specs, or where it keeps them elsewhere
        return None
    if not issubclass(cls, OffloadingConnector):
        return None
    try:
        module = importlib.import_module(str(extra_config["spec_module_path"]))
    except Exception:  # the user's module may raise anything while it is imported
        return None
    name = extra_config.get("spec_name")
    spec = getattr(module, str(name), None)
    if spec is None:
        return None
    if not (isinstance(spec, type) and issubclass(spec, OffloadingSpec)):
        return f"{name} is no subclass of vLLM's OffloadingSpec"
    missing = sorted(getattr(spec, "__abstractmethods__", ()))
    if missing:
        return f"the OffloadingSpec {name} does not implement {', '.join(missing)}"
    passed = list(inspect.signature(OffloadingSpec).parameters)
    try:
        inspect.signature(spec).bind(*(object() for _ in passed))
    except TypeError as error:
        return f"the OffloadingSpec {name} cannot be called with ({', '.join(passed)}): {error}"
    return None


def _not_implemented(cls: type) -> str:
    """Return the abstract methods that a class leaves out, as a list; empty if there are none."""
    return ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))


def _refused_class(cls: type) -> str | None:
    """Return why vLLM refuses the connector's class, or None."""
    if missing := _not_implemented(cls):
        return f"does not implement {missing}, so Python does not construct it"
    names = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in names)
    if not takes_any and not any(p.name == "kv_cache_config" for p in names):
        return "has no parameter named kv_cache_config: vLLM refuses the two-argument form"
    try:
        inspect.signature(cls).bind(object(), object(), object())
    except TypeError as error:
        return f"cannot be called with (vllm_config, role, kv_cache_config): {error}"
    return None


def _class_methods(cls: type, extra_config: dict[str, Any], config: Any) -> Finding:
    asked = (
        "get_required_kvcache_layout",
        "requires_piecewise_for_cudagraph",
        "supports_sleep_mode",
        "build_kv_connector_stats",
    )
    for name in (*asked, "build_prom_metrics"):
        member = inspect.getattr_static(cls, name, None)
        if member is not None and not isinstance(member, (classmethod, staticmethod)):
            return "class-methods", False, f"{name} is not a class method, but vLLM asks the class"
    try:
        cls.requires_piecewise_for_cudagraph(dict(extra_config))  # type: ignore[attr-defined]
        cls.get_required_kvcache_layout(config)  # type: ignore[attr-defined]
    except Exception as error:  # whatever the class raises would end vLLM's start-up
        return "class-methods", False, f"{type(error).__name__}: {error}".splitlines()[0]
    return "class-methods", True, ""


def _start_load(cls: type) -> Finding:
    parameters = inspect.signature(_plain(cls.start_load_kv)).parameters.values()  # type: ignore[attr-defined]
    ok = any(p.kind == p.VAR_KEYWORD for p in parameters)
    detail = "" if ok else "takes no **kwargs, and model runner V2 passes some"
    return "start-load-kwargs", ok, detail


def _accepts_like(own: Any, base: Any) -> str | None:
    """Return why `own` cannot be called as vLLM calls `base`, or None if it can.

    vLLM passes the arguments by position, without those that have a default.
    """
    if not callable(own):
        return f"is not a function, but a {type(own).__name__}"
    wanted = [
        p
        for p in inspect.signature(base).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    count = sum(p.default is p.empty for p in wanted)
    try:
        inspect.signature(own).bind(*[object()] * count)
    except TypeError as error:
        arguments = "1 argument" if count == 2 else f"{count - 1} arguments"
        names = ", ".join(p.name for p in wanted[1:])
        return f"cannot be called with {arguments} ({names}): {error}"
    return None


NAME = "KvconformNobody"
"""A name that no connector is registered under."""


def inspect_engine(config: Any, cache_config: Any, child_registered_as: str) -> Iterator[Finding]:
    """Yield (item, ok, detail) for each check of vLLM itself.

    Leaves the registry, the environment and `config` as they were.
    """
    bare = copy.copy(config)
    bare.kv_transfer_config = None
    yield _refuses(
        "transfer-config",
        ValueError,
        lambda: KVConnectorBase_V1.__init__(_Blank(), bare, KVConnectorRole.WORKER, cache_config),
    )
    yield _refuses(
        "unknown-name", ValueError, lambda: KVConnectorFactory.get_connector_class(_transfer(NAME))
    )
    yield from _registry()
    yield _refuses("role-required", ValueError, lambda: KVTransferConfig(kv_connector=NAME))
    yield _refuses(
        "role-known", ValueError, lambda: KVTransferConfig(kv_connector=NAME, kv_role="nobody")
    )
    first = _transfer(NAME).engine_id
    second = _transfer(NAME).engine_id
    yield "engine-id", bool(first) and bool(second) and first != second, "not given, or given twice"
    # Until 0.12 there was no other policy than recompute.
    policy = vllm_api.later(_transfer(NAME), "kv_load_failure_policy", "recompute")
    yield "failure-policy", policy == "fail", f"is {policy}"
    yield _refuses(
        "encoder-decoder", AssertionError, lambda: _encoder_decoder(config, cache_config)
    )
    yield _refuses("expandable-segments", ValueError, lambda: _expandable_segments(config))
    yield _refuses("groups-opted-in", ValueError, lambda: _hybrid(config, cache_config))
    yield (
        "hybrid-kept",
        _keeps_hybrid(),
        "is turned off with a connector that supports several groups, and on without one",
    )
    yield _multi_stats("_Talker" if child_registered_as == "its-class" else NAME)
    for owner, names in REMOVED.items():
        left = [
            name
            for name in names
            if name in getattr(owner, "__dataclass_fields__", {}) or hasattr(owner, name)
        ]
        if owner is SchedulerOutput:
            # A field that is always empty carries no information.
            empty = getattr(SchedulerOutput, "make_empty", object)()  # since 0.12
            left = [name for name in left if getattr(empty, name, None) != []]
        yield f"removed:{owner.__name__}", not left, f"{', '.join(left)} is there" if left else ""


REMOVED: dict[Any, tuple[str, ...]] = {
    CachedRequestData: ("resumed_from_preemption", "resumed_req_token_ids"),
    SchedulerOutput: ("num_common_prefix_blocks",),
    KVConnectorBase_V1: ("register_cross_layers_kv_cache", "prefer_cross_layer_blocks"),
    KVTransferConfig: ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"),
}
"""Names of older releases, by the class that had them."""


class _Blank(KVConnectorBase_V1):
    """An object to call the base class's constructor on, without abstract methods."""

    def __init__(self) -> None:
        pass


_Blank.__abstractmethods__ = frozenset()


class _Hybrid(_Blank, SupportsHMA):
    """A connector that declares support for several KV cache groups, and does nothing."""


def _keeps_hybrid() -> bool:
    """Return whether the hybrid cache manager stays on, as it would be without a connector.

    It is off without a connector if the platform has none.
    """
    with patch.object(KVConnectorFactory, "get_connector_class", lambda *args: _Hybrid):
        return keeps_hybrid(_transfer(NAME)) or not keeps_hybrid(None)


class _Talker(_Blank):
    """A connector with statistics, which its class can rebuild from their data."""

    def get_kv_connector_stats(self) -> Any:
        return KVConnectorStats(data={"loads": 1})

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any:
        return KVConnectorStats(data=data or {})


def _multi_stats(name: str) -> Finding:
    """Check that a child's statistics reach the front end, if its class is registered as `name`."""
    registry = KVConnectorFactory._registry
    KVConnectorFactory.register_connector(name, __name__, "_Talker")
    try:
        stats = MultiConnector.get_kv_connector_stats(SimpleNamespace(_connectors=[_Talker()]))
        rebuilt = MultiConnector.build_kv_connector_stats(
            {key: dict(child.data) for key, child in stats.data.items()}
        )
        found = [dict(child.data) for child in rebuilt.data.values()]
        return "multi-stats", found == [{"loads": 1}], f"rebuilt as {found}"
    except Exception as error:  # in the front end, whatever is raised here ends the engine
        return "multi-stats", False, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        registry.pop(name, None)


def _transfer(name: str) -> Any:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both")


def _refuses(item: str, error: type[Exception], call: Callable[[], object]) -> Finding:
    try:
        call()
    except error:
        return item, True, ""
    except Exception as other:  # any other error is not the promised refusal
        return item, False, f"{type(other).__name__}: {other}".splitlines()[0][:200]
    return item, False, "is accepted"


def _registry() -> Iterator[Finding]:
    registry = KVConnectorFactory._registry
    try:
        KVConnectorFactory.register_connector(NAME, "kvconform_no_such_module", NAME)
        yield "lazy-registration", True, ""
        yield _refuses(
            "second-registration",
            ValueError,
            lambda: KVConnectorFactory.register_connector(NAME, "kvconform_other", NAME),
        )
        yield _refuses(
            "broken-registration",
            ModuleNotFoundError,
            lambda: KVConnectorFactory.get_connector_class(_transfer(NAME)),
        )
    finally:
        registry.pop(NAME, None)


def _hybrid(config: Any, cache_config: Any) -> None:
    """Ask for several KV cache groups with a connector that is written for one."""
    asked = copy.copy(config)
    asked.kv_transfer_config = _transfer(NAME)
    asked.scheduler_config = copy.copy(config.scheduler_config)
    asked.scheduler_config.disable_hybrid_kv_cache_manager = False
    with patch.object(KVConnectorFactory, "get_connector_class", lambda *args: _Blank):
        KVConnectorFactory.create_connector(
            config=asked, role=KVConnectorRole.WORKER, kv_cache_config=cache_config
        )


def _encoder_decoder(config: Any, cache_config: Any) -> None:
    with patch.object(
        type(config.model_config),
        "is_encoder_decoder",
        new_callable=PropertyMock,
        return_value=True,
    ):
        vllm_api.build_scheduler(
            config,
            cache_config,
            block_size=config.cache_config.block_size,
            scheduling="sync",
            runner="v1",
        )


def _expandable_segments(config: Any) -> None:
    with patch.dict(os.environ, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}):
        config._verify_kv_transfer_compat()
