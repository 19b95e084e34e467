# SPDX-License-Identifier: Apache-2.0
"""The dispatch mode that queues operators on device memory as work of the current stream.

All other operators run unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from kvconform.emulation.context import Emulation, active
from kvconform.emulation.memory import Block, Kind
from kvconform.emulation.note import DeviceFault, NotEmulated
from kvconform.emulation.operation import Operation, operation

REMEMBERED = 4096  # calls whose result shapes are cached


class Call:
    """One queued operator call: the arguments as the work will use them, and their blocks.

    It refers to no device tensor of the user's, so that the end of one is noticed while the work
    waits.
    """

    def __init__(
        self,
        emulation: Emulation,
        facts: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: list[str],
    ) -> None:
        self.emulation = emulation
        self.facts = facts
        self.blocks: list[Block] = []
        self._read: list[torch.Tensor] = []
        self.waits = False  # a host operand is moved to the device first
        self.args = tuple(
            self._freeze(value, position in facts.written) for position, value in enumerate(args)
        )
        self.kwargs = {
            name: self._freeze(value, names.index(name) in facts.written)
            for name, value in kwargs.items()
        }

    def sources(self) -> list[Any]:
        """Return the device tensors that the operator only reads."""
        return self._read

    def _freeze(self, value: Any, written: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._freeze(item, written) for item in value)
        return self._operand(value, written) if isinstance(value, torch.Tensor) else value

    def _operand(self, tensor: torch.Tensor, written: bool) -> torch.Tensor:
        block = self.emulation.memory.block_of(tensor)
        if block is not None:
            self.blocks.append(block)
            if block.kind is Kind.DEVICE:
                stand_in = self.emulation.stand_in(tensor, block)
                if not written:
                    self._read.append(stand_in)
                return stand_in
        if self.facts.custom:
            # It may use pinned memory when it runs, and pageable memory that it reads at the call.
            if written and block is None:
                raise NotEmulated(
                    "operator of a C++ extension that writes pageable host memory "
                    "and uses device memory"
                )
            return tensor.clone() if block is None else tensor.detach()
        if self.facts.indexing:
            self.waits = True
        elif tensor.dim() or written:
            raise RuntimeError(
                "An operation on tensors of cuda:0 was given a tensor in host memory (cpu); "
                "all have to be on one device."
            )
        return tensor.clone()


class Dispatch(TorchDispatchMode):
    """Mode that queues operators on device tensors; one instance per thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would import the compiler, which is not needed."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[Any, Any] = {}

    @property
    def emulation(self) -> Emulation:
        """The calling thread's emulation."""
        return active()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        emulation = self.emulation
        if emulation.off or not self._any_on_device((*args, *kwargs.values())):
            return func(*args, **kwargs)
        facts = operation(func)
        if facts.metadata and func._schema.name != "aten::resize_":
            return func(*args, **kwargs)
        with emulation.machine.lock:
            return self._queue(func, facts, args, kwargs)

    def _any_on_device(self, values: Any) -> bool:
        for value in values:
            if isinstance(value, (list, tuple)):
                if self._any_on_device(value):
                    return True
            elif self.emulation.on_device(value):
                return True
        return False

    def _queue(
        self, func: Any, facts: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        emulation = self.emulation
        name = func._schema.name
        if name == "aten::copy_":
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            emulation.copies.of_tensors(args[0], args[1], bool(non_blocking))
            return args[0]
        if name == "aten::record_stream":
            raise NotEmulated("record_stream() that bypasses torch.Tensor.record_stream")
        resizes = name == "aten::resize_" or any(
            value.numel() == 0 for value in leaves(kwargs.get("out"))
        )
        if resizes:
            raise NotEmulated(
                "device tensor that is resized in place (resize_, or out= with an empty tensor)"
            )
        if not facts.runs:
            raise NotEmulated(f"operator {func}: it has no CPU kernel")
        queue = emulation.queue
        if "index_put" in name:
            check_values(*args[:3])
        if facts.reads_back or (facts.indexing and self._masks(args[1], name, args)):
            emulation.synchronize(queue, f"{func} reads device values")
            return self._now(func, args, kwargs)
        names = [argument.name for argument in func._schema.arguments]
        with emulation.raw():
            call = Call(emulation, facts, args, kwargs, names)
        if call.waits:
            emulation.synchronize(queue, f"{func} with a host tensor as index")
        new = None
        if None in facts.returned:
            try:
                new = self._shapes_of(func, args, kwargs)
            except (NotImplementedError, RuntimeError) as error:
                no_shape_function = isinstance(error, NotImplementedError) or facts.custom
                if not no_shape_function:
                    raise
                emulation.note("undelayed", f"{func} has no shape function", queue)
                with emulation.raw():
                    emulation.machine.demand(emulation.machine.mark(queue))
                return self._now(func, args, kwargs)
        results, targets = self._results(
            new, facts, dict(zip(names, args, strict=False)) | kwargs, names
        )

        def run() -> None:
            try:
                out = func(*call.args, **call.kwargs)
            except Exception as error:
                raise DeviceFault(
                    f"{func} failed when its turn on {queue.name} came: {error}"
                ) from error
            for made, target in zip(leaves(out if targets else None), targets, strict=False):
                if target is not None:
                    target.copy_(made)

        watch = None
        deterministic = torch.Tag.nondeterministic_seeded not in func.tags
        if deterministic and any(block.home is not queue for block in call.blocks):
            read = partial(self._read, func, call) if targets else call.sources
            watch = emulation.watch(queue, str(func), read)
        emulation.put(queue, run, [*call.blocks, *self._blocks_of(targets)], watch=watch)
        return results

    @staticmethod
    def _read(func: Any, call: Call) -> list[Any]:
        """Return the operator's new results, computed from what its operands hold now."""
        return leaves(func(*call.args, **call.kwargs))

    def _masks(self, indices: Any, name: str, args: tuple[Any, ...]) -> bool:
        """Return whether the host has to count the true elements of a boolean mask.

        The assignment of one value through one mask needs no count.
        """
        masks = any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in indices
        )
        assigns_one_value = (
            "put" in name
            and isinstance(args[2], torch.Tensor)
            and args[2].numel() == 1
            and len(indices) == 1
        )
        return masks and not assigns_one_value

    def _shapes_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operator's results as meta tensors.

        They are cached: most calls recur with the same shapes.
        """
        kwargs = {
            name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")
        }
        with self.emulation.raw():
            key = (func, shape_key(args), shape_key(tuple(kwargs.items())))
            known = self._shapes.get(key)
            if known is None:
                known = func(
                    *to_meta(args), **{name: to_meta(value) for name, value in kwargs.items()}
                )
                if len(self._shapes) == REMEMBERED:
                    self._shapes.clear()
                self._shapes[key] = known
            return known

    def _results(
        self, new: Any, facts: Operation, given: dict[str, Any], names: list[str]
    ) -> tuple[Any, list[torch.Tensor | None]]:
        """Return the call's results, and the device tensors that its work will fill.

        There is one target for each result tensor; None where the result is an argument.
        """
        targets: list[torch.Tensor | None] = []

        def make(meta: Any) -> Any:
            if not isinstance(meta, torch.Tensor):
                return meta
            tensor = self.emulation.device_tensor(meta)
            with self.emulation.raw():
                block = self.emulation.memory.block_of(tensor)
                assert block is not None
                targets.append(self.emulation.stand_in(tensor, block))
            return tensor

        if not facts.returned:
            return None, targets
        if all(position is not None for position in facts.returned):
            same = tuple(
                given.get(names[position]) for position in facts.returned if position is not None
            )
            return (same[0] if len(same) == 1 else same), targets
        if all(position is None for position in facts.returned):
            return tree_map(make, new), targets
        mixed = []
        for position, meta in zip(facts.returned, new, strict=True):
            if position is None:
                mixed.append(make(meta))
            else:
                targets.append(None)
                mixed.append(given.get(names[position]))
        return tuple(mixed), targets

    def _blocks_of(self, targets: list[torch.Tensor | None]) -> list[Block]:
        with self.emulation.raw():
            found = [
                self.emulation.memory.block_of(target) for target in targets if target is not None
            ]
        return [block for block in found if block is not None]

    def _now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator at once, after the host has waited; new tensors are on the device."""
        with self.emulation.raw():
            out = func(*args, **kwargs)
        given = {id(value) for value in (*args, *kwargs.values())}

        def to_device(value: Any) -> Any:
            is_new = isinstance(value, torch.Tensor) and id(value) not in given
            return self._moved(value) if is_new else value

        return tree_map(to_device, out)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device tensor with the same contents."""
        made = self.emulation.device_tensor(tensor)
        with self.emulation.raw():
            made.copy_(tensor)
        return made


def to_meta(value: Any) -> Any:
    """Return the same value with meta tensors: shape, strides and dtype, but no bytes."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(to_meta(item) for item in value)
    return value


def shape_key(value: Any) -> Any:
    """Return the part of an argument that the shape of a result can depend on; hashable.

    Numbers keep their type: 1, 1.0 and True promote differently.
    """
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(shape_key(item) for item in value)
    return type(value), value


def check_values(target: torch.Tensor, indices: Any, values: torch.Tensor) -> None:
    """Raise RuntimeError if the values do not fit the indexed part, as torch does at the call.

    They may have the wrong shape or data type. Masks are not checked here: they have to be read.
    """
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return
    empty = [None if index is None else to_meta(index) for index in indices]
    wanted = torch.ops.aten.index.Tensor(to_meta(target), empty).shape
    try:
        fits = torch.broadcast_shapes(values.shape, wanted) == wanted
    except RuntimeError:
        fits = False
    if not fits:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} "
            f"cannot be broadcast to indexing result of shape {list(wanted)}"
        )
    if values.dtype != target.dtype:
        one = torch.zeros(1, dtype=torch.long, device="cpu")
        small, smallest = (
            torch.empty(1, dtype=each.dtype, device="cpu") for each in (target, values)
        )
        torch.ops.aten.index_put(small, [one], smallest)  # raises, in torch's words


def leaves(value: Any) -> list[Any]:
    """Return the tensors of an operator's result, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, torch.Tensor) else []
