# SPDX-License-Identifier: Apache-2.0
"""One call of a hook, and the check of the value that it returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvconform.contract.trace import Event


class ValueCheck(NamedTuple):
    """Outcome of the check of one returned value.

    - `ok`: the value has the contract's type.
    - `msgpack_ok`: returned transfer parameters can be serialised.
    - `aliased`: returned transfer parameters, to which the engine adds one, are the request's own
      dict, not a new one. It adds one to those that ask for a remote prefill.
    - `text`: short description of the value.
    """

    ok: bool = True
    msgpack_ok: bool = True
    aliased: bool = False
    text: str = "None"


def short(value: Any) -> str:
    """Return a short description of a value for traces, without memory addresses."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(short(v) for v in value)[:8]) + "}"
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        inside = ", ".join(short(v) for v in value)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, dict) and len(value) <= 8:
        return "{" + ", ".join(f"{short(k)}: {short(v)}" for k, v in value.items()) + "}"
    return type(value).__name__


def _ids(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(isinstance(v, str) for v in value)


def _finish(call: Call) -> ValueCheck:
    value = call.result
    ok = (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], bool)
        and (value[1] is None or isinstance(value[1], dict))
    )
    if not ok:
        return ValueCheck(ok=False, text=short(value))
    params = value[1]
    msgpack_ok = True
    aliased = False
    if params is not None:
        import msgspec

        try:
            msgspec.msgpack.encode(params)
        except Exception:  # whatever the encoder rejects cannot reach the front end
            msgpack_ok = False
        own = getattr(call.arg(0, "request"), "kv_transfer_params", None)
        aliased = bool(params.get("do_remote_prefill")) and params is own
    return ValueCheck(True, msgpack_ok, aliased, short(value))


def _transfer_results(value: Any) -> bool:
    return all(
        _ids(getattr(value, name, None))
        for name in ("finished_sending", "finished_recving", "failed_recving")
    )


def _finished(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(v is None or _ids(v) for v in value)


def _blocks(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(isinstance(v, int) for v in value)


def _with(*methods: str) -> Callable[[Any], bool]:
    """Return a check for None, or an object with these methods.

    The class is not checked, because older vLLM releases do not have it.
    """
    return lambda value: (
        value is None or all(callable(getattr(value, name, None)) for name in methods)
    )


def _handshake(value: Any) -> bool:
    return value is None or any(
        cls.__name__ == "KVConnectorHandshakeMetadata" for cls in type(value).__mro__
    )


def _sources(call: Call) -> ValueCheck:
    value = call.result
    ok = isinstance(value, dict) and all(type(count) is int for count in value.values())
    return ValueCheck(
        ok=ok and sum(value.values()) == call.arg(1, "num_external_tokens"), text=short(value)
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "get_finished": _finished,
    "get_transfer_results": _transfer_results,
    "get_block_ids_with_load_errors": _blocks,
    "reset_cache": lambda v: v is None or isinstance(v, bool),
    "has_pending_block_frees": lambda v: isinstance(v, bool),
    "has_pending_push_work": lambda v: isinstance(v, bool),
    "register_finished_partial_tail": lambda v: isinstance(v, bool),
    "get_loaded_kv_cache_group_ids": lambda v: (
        isinstance(v, tuple) and all(isinstance(i, int) for i in v)
    ),
    "take_events": lambda v: v is None or hasattr(v, "__iter__"),
    "build_connector_worker_meta": _with("aggregate"),
    "get_kv_connector_stats": _with("is_empty", "aggregate", "reduce", "reset"),
    "get_kv_connector_kv_cache_events": _with(
        "add_events", "aggregate", "increment_workers", "get_all_events", "get_number_of_workers"
    ),
    "get_handshake_metadata": _handshake,
    "get_mem_pool_context": _with("__enter__", "__exit__"),
    "get_finished_count": lambda v: v is None or isinstance(v, int),
}


_OTHERS: dict[str, Callable[[Call], ValueCheck]] = {
    "request_finished": _finish,
    "request_finished_all_groups": _finish,
    "get_external_cache_hit_sources": _sources,
}
NOTHING = ValueCheck()
"""The check of a hook that returned None, as it may."""


def check_value(call: Call) -> ValueCheck:
    """Check the value that a finished outermost call returned. Reads only."""
    if call.result is None and call.hook not in _CHECKS and call.hook not in _OTHERS:
        return NOTHING
    if call.hook in _OTHERS:
        return _OTHERS[call.hook](call)
    check = _CHECKS.get(call.hook)
    ok = check is None or check(call.result)
    return NOTHING if ok and call.result is None else ValueCheck(ok=ok, text=short(call.result))


class Call:
    """One call of a hook: its arguments, and its result or the exception that it raised (`error`).

    Listeners keep data from before the call to after it in `scratch`.
    """

    __slots__ = (
        "args",
        "connector",
        "depth",
        "error",
        "event",
        "half",
        "hook",
        "kwargs",
        "result",
        "result_event",
        "scratch",
    )

    def __init__(
        self,
        connector: Any,
        hook: str,
        half: str,
        depth: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.connector = connector
        self.hook = hook
        self.half = half
        self.depth = depth
        self.args = args
        self.kwargs = kwargs
        self.result: Any = None
        self.error: BaseException | None = None
        self.event: Event | None = None
        self.result_event: Event | None = None
        self.scratch: dict[str, Any] = {}

    @property
    def legal(self) -> bool:
        """Whether the hook returned a value of the contract's type."""
        return (
            self.error is None
            and self.result_event is not None
            and bool(self.result_event["value_ok"])
        )

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument, given by position or by keyword."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)
