# SPDX-License-Identifier: Apache-2.0
"""The probe: records every call that crosses the connector interface.

The connector's class is patched in place: a subclass would break `type(self) is C`, lookups by module path and MultiConnector's children.
Hooks are found by introspection on the installed base class, so a method that a newer vLLM adds is recorded too. The patch is
installed once per class and talks to whichever `Probe` is active; with none active it costs one attribute read.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvconform.contract.trace import Trace
from kvconform.errors import ordinary, place_of
from kvconform.kv import device
from kvconform.observe.call import NOTHING, Call, check_value
from kvconform.process import watchdog

Listener = Callable[["Call"], None]


class Probe:
    """Records the hooks of one engine's connector halves into a trace and tells listeners.

    Only instances of the patched class reach it, so a MultiConnector's children stay out; the half is the instance's role.
    """

    active: Probe | None = None

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.before: dict[str, list[Listener]] = {}
        self.after: dict[str, list[Listener]] = {}
        self.after_any: list[Listener] = []
        self._depth = 0
        self._main = threading.get_ident()
        self.last_error: tuple[str, BaseException] | None = None

    def on(
        self, hook: str, *, before: Listener | None = None, after: Listener | None = None
    ) -> None:
        """Call `before`/`after` around each outermost call of `hook` (also when it raised)."""
        if before:
            self.before.setdefault(hook, []).append(before)
        if after:
            self.after.setdefault(hook, []).append(after)

    def record(
        self,
        connector: Any,
        hook: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one hook under the probe; returns what it returned, raises what it raised (as a Panic, if that is no `Exception`)."""
        half, rank = self.half_of(connector), 0
        if half is None:
            return call(connector, *args, **kwargs)
        item = Call(connector, hook, half, self._depth, args, kwargs)
        outermost = self._depth == 0
        if outermost:
            for listener in self.before.get(hook, ()):
                listener(item)
        bound = None
        if half == "worker":
            bound = getattr(connector, "_connector_metadata", None) is not None
        item.event = self.trace.emit(
            "hook.called",
            hook=hook,
            half=half,
            rank=rank,
            depth=item.depth,
            bound=bound,
            thread="main",
        )
        self._depth += 1
        timed_out = False
        try:
            with watchdog.hook(hook, step=self.trace.step):
                if outermost and half == "worker" and device.current.streamed:
                    with device.current.calling():
                        item.result = call(connector, *args, **kwargs)
                else:
                    item.result = call(connector, *args, **kwargs)
        except watchdog.HookTimeout as error:
            item.error, timed_out = error, True
            raise
        except BaseException as error:
            item.error = error
            if outermost and (shown := ordinary(error)) is not error:
                raise shown.with_traceback(
                    error.__traceback__
                ) from error  # whose fault it is goes by the traceback
            raise
        finally:
            self._depth -= 1
            self._returned(item, rank, timed_out, outermost)
        return item.result

    def half_of(self, connector: Any) -> str | None:
        """`scheduler` or `worker` if calls of it are recorded: of the connector that is judged, not of its siblings, and from the engine's
        thread; else None.
        """
        role = getattr(connector, "_role", None)
        if (
            role is None
            or threading.get_ident() != self._main
            or hasattr(connector, "kvconform_sibling")
        ):
            return None
        known = _halves.get(id(role))
        if known is None:  # the role is kept, too: nothing else can have its id
            known = _halves[id(role)] = role, str(getattr(role, "name", "") or "").lower() or None
        return known[1]

    def _returned(self, item: Call, rank: int, timed_out: bool, outermost: bool) -> None:
        check = check_value(item) if outermost and item.error is None else NOTHING
        text = None
        if item.error is not None:
            place = place_of(item.error, type(item.connector))
            text = f"{type(item.error).__name__}: {item.error}".splitlines()[0][:300] + place
        assert item.event is not None
        item.result_event = self.trace.emit(
            "hook.returned",
            hook=item.hook,
            half=item.half,
            rank=rank,
            depth=item.depth,
            error=None if item.error is None else type(item.error).__name__,
            error_text=text,
            value=check.text,
            value_ok=check.ok,
            mutated_args=False,
            params_msgpack_ok=check.msgpack_ok,
            params_aliased=check.aliased,
            called_seq=item.event["seq"],
            layer=item.arg(0, "layer_name")
            if item.hook in ("wait_for_layer_load", "save_kv_layer")
            else None,
            timed_out=timed_out,
        )
        if item.error is not None and (
            self.last_error is None or self.last_error[1] is not item.error
        ):
            self.last_error = (item.hook, item.error)
        if outermost:
            for listener in self.after.get(item.hook, ()):
                listener(item)
            for listener in self.after_any:
                listener(item)


_halves: dict[int, tuple[Any, str | None]] = {}
"""Role and half, by the id of the role: hashing a member of an Enum takes longer than all the rest of `half_of`."""


def hook_names() -> tuple[str, ...]:
    """Public instance methods of the installed KVConnectorBase_V1 and its SupportsHMA companion, in definition order."""
    from kvconform.compat.vllm_api import hook_classes

    classes = tuple(hook_classes())
    return _names_of(classes, tuple(len(vars(cls)) for cls in classes))


@functools.lru_cache(maxsize=16)
def _names_of(classes: tuple[type, ...], _sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Worked out once per run of the process; again if a class has got another number of members."""
    from kvconform.compat.vllm_api import UNRECORDED

    names: list[str] = []
    for cls in classes:
        for name, member in vars(cls).items():
            if (
                inspect.isfunction(member)
                and not name.startswith("_")
                and name not in UNRECORDED
                and name not in names
            ):
                names.append(name)
    return tuple(names)


def _wrapper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    from kvconform.compat.vllm_api import RESULTS_IN_SETS

    by_sets = RESULTS_IN_SETS and name == "get_finished"

    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe = Probe.active
        if probe is None:
            return original(self, *args, **kwargs)
        if (
            by_sets and probe._depth == 0 and probe.half_of(self) is not None
        ):  # what is not recorded leaves the depth as it is
            results = self.get_transfer_results(*args, **kwargs)
            return results.finished_sending or None, results.finished_recving or None
        return probe.record(self, name, original, args, kwargs)

    recorded._kvconform_original = original  # type: ignore[attr-defined]
    return recorded


_of_classes = functools.lru_cache(maxsize=1024)(_wrapper)
"""Wrappers of what classes define: the same class is patched in every run."""


def _instance_form(cls: type, name: str) -> Callable[..., Any] | None:
    """The hook as a function of (self, ...), also where the class made it a static or class method; None if it is nothing to call."""
    static, member = (
        next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None),
        getattr(cls, name, None),
    )
    if isinstance(static, (staticmethod, classmethod)) and callable(member):
        return lambda self, *args, **kwargs: static.__get__(self, type(self))(*args, **kwargs)
    return member if callable(member) else None


_NONE = object()


class Patch:
    """Patches classes in place while it is entered, and restores every attribute afterwards.

    Within `parking`, what is left stays patched until other classes are: each attribute that is set on a class also undoes what Python has
    learned about its objects.
    """

    _parks = False
    _parked: list[Patch] = []

    def __init__(self, *classes: type) -> None:
        self.classes = classes
        self._changed: list[
            tuple[type, str, Any, Any]
        ] = []  # attribute, what the class itself had (or _NONE), what it has now

    def __enter__(self) -> Patch:
        if [each.classes for each in self._parked] == [self.classes] and self._parked[
            0
        ]._in_place():
            vars(self).update(vars(self._parked.pop()))
            return self
        self._unpark()
        for cls in self.classes:
            self._patch(cls)
        return self

    @classmethod
    @contextmanager
    def parking(cls) -> Iterator[None]:
        """The same classes are patched again and again while this is entered."""
        cls._parks = True
        try:
            yield
        finally:
            cls._parks = False
            cls._unpark()

    @classmethod
    def _unpark(cls) -> None:
        while cls._parked:
            cls._parked.pop()._restore()

    def _patch(self, cls: type) -> None:
        for name in hook_names():
            original = _instance_form(cls, name)
            if original is None or hasattr(original, "_kvconform_original"):
                continue
            own, wrapper = vars(cls).get(name, _NONE), _of_classes(name, original)
            setattr(cls, name, wrapper)
            self._changed.append((cls, name, own, wrapper))

    def _in_place(self) -> bool:
        """Whether nobody has put anything over it: a connector that wraps its own hooks finds them unwrapped in each run."""
        return all(vars(cls).get(name) is wrapper for cls, name, _, wrapper in self._changed)

    def __exit__(self, *exc: object) -> None:
        if self._parks and Probe.active is None and self._changed:  # not inside another run
            self._parked.append(self)
        else:
            self._restore()

    def _restore(self) -> None:
        for cls, name, own, _ in self._changed:
            if own is _NONE:
                delattr(cls, name)
            else:
                setattr(cls, name, own)
        self._changed.clear()


def wrap_instance_hooks(connector: Any) -> None:
    """Wrap hooks that a constructor assigned on the instance (`self.get_finished = ...`), which hide the patched class's.

    Also those of a MultiConnector's children that are of the patched class.
    """
    for child in getattr(connector, "_connectors", ()):
        if hasattr(type(child).build_connector_meta, "_kvconform_original"):
            wrap_instance_hooks(child)
    for name in hook_names():
        member = vars(connector).get(name) if hasattr(connector, "__dict__") else None
        if callable(member) and not hasattr(member, "_kvconform_original"):

            def bound(
                _self: Any, *args: Any, _member: Callable[..., Any] = member, **kwargs: Any
            ) -> Any:
                return _member(*args, **kwargs)

            wrapped = functools.partial(_wrapper(name, bound), connector)
            wrapped._kvconform_original = member  # type: ignore[attr-defined]
            setattr(connector, name, wrapped)
