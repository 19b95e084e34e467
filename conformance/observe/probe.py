# SPDX-License-Identifier: Apache-2.0
"""The probe: records every call that crosses the connector interface.

The connector's class is patched in place. A subclass would break `type(self) is C`, lookups by
module path, and MultiConnector's children. Hooks are found by introspection of the installed base
class, so a method that a newer vLLM adds is recorded too. A patched class calls the `Probe` that is
active; if none is active, the patch costs one attribute read.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kvconform.contract.trace import Trace
from kvconform.errors import numbers_at, ordinary, place_of
from kvconform.kv import device
from kvconform.observe.call import NOTHING, Call, check_value
from kvconform.process import watchdog

Listener = Callable[["Call"], None]
Surroundings = Callable[[str], AbstractContextManager[None]]
"""Returns the context in which a sibling's hook of this name runs."""


class Probe:
    """Records the hooks of one engine's connector halves in a trace, and calls listeners.

    Only instances of patched classes reach it. A MultiConnector's other children are not recorded:
    what surrounds the hooks of those that are patched is in `around_siblings`. The half is the
    instance's role.
    """

    active: Probe | None = None

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.before: dict[str, list[Listener]] = {}
        self.after: dict[str, list[Listener]] = {}
        self.after_any: list[Listener] = []
        self.around_siblings: Surroundings | None = None
        self.depth = 0
        self._main = threading.get_ident()
        self.last_error: tuple[str, BaseException] | None = None

    def on(
        self, hook: str, *, before: Listener | None = None, after: Listener | None = None
    ) -> None:
        """Call `before` and `after` around each outermost call of `hook`, even if it raises."""
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
        """Run one hook under the probe, and return its result.

        Raises the hook's exception; as a Panic if that is not an `Exception`.
        """
        half = self.half_of(connector)
        rank = 0
        if half is None:
            return self._unrecorded(
                connector, hook, functools.partial(call, connector, *args, **kwargs)
            )
        item = Call(connector, hook, half, self.depth, args, kwargs)
        outermost = self.depth == 0
        if outermost:
            for listener in self.before.get(hook, ()):
                listener(item)
        bound = None
        if half == "worker":
            bound = _has_metadata(connector)
        item.event = self.trace.emit(
            "hook.called",
            hook=hook,
            half=half,
            rank=rank,
            depth=item.depth,
            bound=bound,
            thread="main",
        )
        self.depth += 1
        timed_out = False
        try:
            with watchdog.hook(hook, step=self.trace.step):
                if outermost and half == "worker" and device.current.streamed:
                    with device.current.calling():
                        item.result = call(connector, *args, **kwargs)
                else:
                    item.result = call(connector, *args, **kwargs)
        except watchdog.HookTimeout as error:
            item.error = error
            timed_out = True
            raise
        except BaseException as error:
            item.error = error
            if outermost and (shown := ordinary(error)) is not error:
                # The traceback decides to whom the error is attributed.
                raise shown.with_traceback(error.__traceback__) from error
            raise
        finally:
            self.depth -= 1
            self._returned(item, timed_out, outermost)
        return item.result

    def _unrecorded(self, connector: Any, hook: str, call: Callable[[], Any]) -> Any:
        """Run a hook that is not recorded, a sibling's in its surroundings; return its result."""
        around = self.around_siblings
        if around is None or not hasattr(connector, "kvconform_sibling"):
            return call()
        self.around_siblings = None  # the outermost call only
        try:
            with around(hook):
                return call()
        finally:
            self.around_siblings = around

    def half_of(self, connector: Any) -> str | None:
        """Return `scheduler` or `worker`, or None if calls of this object are not recorded.

        Recorded are calls from the engine's thread to the connector that is judged, not to its
        siblings.
        """
        role = getattr(connector, "_role", None)
        if role is None or threading.get_ident() != self._main:
            return None
        if hasattr(connector, "kvconform_sibling"):
            return None
        known = _halves.get(id(role))
        if known is None:
            half = str(getattr(role, "name", "") or "").lower() or None
            known = _halves[id(role)] = role, half
        return known[1]

    def _returned(self, item: Call, timed_out: bool, outermost: bool) -> None:
        check = check_value(item) if outermost and item.error is None else NOTHING
        text = place = None
        if item.error is not None:
            place = place_of(item.error, type(item.connector))
            text = f"{type(item.error).__name__}: {item.error}".splitlines()[0][:300]
            if place is not None:
                numbers = numbers_at(item.error, type(item.connector))
                values = "".join(f"; {name} = {value}" for name, value in numbers.items())
                text += f" ({place}{values})"
        layer = None
        if item.hook in ("wait_for_layer_load", "save_kv_layer"):
            layer = item.arg(0, "layer_name")
        assert item.event is not None
        item.result_event = self.trace.emit(
            "hook.returned",
            hook=item.hook,
            depth=item.depth,
            error=None if item.error is None else type(item.error).__name__,
            error_text=text,
            error_at=None if place is None else list(place),
            value=check.text,
            value_ok=check.ok,
            mutated_args=False,
            params_msgpack_ok=check.msgpack_ok,
            params_aliased=check.aliased,
            called_seq=item.event["seq"],
            layer=layer,
            timed_out=timed_out,
        )
        if item.error is not None:
            known = self.last_error is not None and self.last_error[1] is item.error
            if not known:  # an inner hook has not recorded it already
                self.last_error = (item.hook, item.error)
        if outermost:
            for listener in self.after.get(item.hook, ()):
                listener(item)
            for listener in self.after_any:
                listener(item)


_halves: dict[int, tuple[Any, str | None]] = {}
"""Role and half, by the id of the role; the role is kept so that no other object gets its id.

Hashing a member of an Enum takes longer than the rest of `half_of`.
"""


def _has_metadata(connector: Any) -> bool:
    """Return whether a worker half says that it has metadata, as it says to vLLM; unrecorded.

    It may keep them where it likes. That the question raises is seen when the engine asks it.
    """
    if not hasattr(connector, "has_connector_metadata"):  # an older release
        return getattr(connector, "_connector_metadata", None) is not None
    active, Probe.active = Probe.active, None
    try:
        return bool(connector.has_connector_metadata())
    except Exception:
        return False
    finally:
        Probe.active = active


def hook_names() -> tuple[str, ...]:
    """Return the hooks in the order of their definition.

    They are the public instance methods of the installed KVConnectorBase_V1 and of SupportsHMA.
    """
    from kvconform.compat.vllm_api import hook_classes

    classes = tuple(hook_classes())
    return _names_of(classes, tuple(len(vars(cls)) for cls in classes))


@functools.lru_cache(maxsize=16)
def _names_of(classes: tuple[type, ...], _sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Return the hooks that `classes` define; again if a class has another number of members."""
    from kvconform.compat.vllm_api import UNRECORDED

    names: list[str] = []
    for cls in classes:
        for name, member in vars(cls).items():
            public = inspect.isfunction(member) and not name.startswith("_")
            if public and name not in UNRECORDED and name not in names:
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
        # A call that is not recorded leaves the depth as it is.
        if by_sets and probe.depth == 0 and probe.half_of(self) is not None:
            results = self.get_transfer_results(*args, **kwargs)
            return results.finished_sending or None, results.finished_recving or None
        return probe.record(self, name, original, args, kwargs)

    recorded._kvconform_original = original  # type: ignore[attr-defined]
    return recorded


_of_classes = functools.lru_cache(maxsize=1024)(_wrapper)
"""Cached wrappers of the methods of classes: the same class is patched in every run."""


def _instance_form(cls: type, name: str) -> Callable[..., Any] | None:
    """Return the hook as a function of (self, ...), or None if it cannot be called.

    The class may have made it a static method or a class method.
    """
    static = next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None)
    member = getattr(cls, name, None)
    if isinstance(static, (staticmethod, classmethod)) and callable(member):
        return lambda self, *args, **kwargs: static.__get__(self, type(self))(*args, **kwargs)
    return member if callable(member) else None


_NONE = object()


class Patch:
    """Patches classes in place while it is entered, and restores every attribute afterwards."""

    def __init__(self, *classes: type) -> None:
        self.classes = classes
        # Class, attribute, value in the class itself before (or _NONE).
        self._changed: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Patch:
        for cls in self.classes:
            self._patch(cls)
        return self

    def _patch(self, cls: type) -> None:
        for name in hook_names():
            original = _instance_form(cls, name)
            if original is None or hasattr(original, "_kvconform_original"):
                continue
            own = vars(cls).get(name, _NONE)
            setattr(cls, name, _of_classes(name, original))
            self._changed.append((cls, name, own))

    def __exit__(self, *exc: object) -> None:
        for cls, name, own in self._changed:
            if own is _NONE:
                delattr(cls, name)
            else:
                setattr(cls, name, own)
        self._changed.clear()


def wrap_instance_hooks(connector: Any) -> None:
    """Wrap the hooks that a constructor assigned on the instance (`self.get_finished = ...`).

    They hide those of the patched class. Children of a MultiConnector that are of the patched class
    are included.
    """
    for child in getattr(connector, "_connectors", ()):
        if hasattr(type(child).build_connector_meta, "_kvconform_original"):
            wrap_instance_hooks(child)
    own = getattr(connector, "__dict__", {})
    for name in [each for each in hook_names() if each in own]:
        member = own[name]
        if callable(member) and not hasattr(member, "_kvconform_original"):

            def bound(
                _self: Any, *args: Any, _member: Callable[..., Any] = member, **kwargs: Any
            ) -> Any:
                return _member(*args, **kwargs)

            wrapped = functools.partial(_wrapper(name, bound), connector)
            wrapped._kvconform_original = member  # type: ignore[attr-defined]
            setattr(connector, name, wrapped)
