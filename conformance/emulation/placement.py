# SPDX-License-Identifier: Apache-2.0
"""The function mode that rewrites calls that create, move or read tensors.

It sees the arguments as the caller wrote them: device, pin_memory and the like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvconform.emulation.context import Emulation, active
from kvconform.emulation.dispatch import to_meta
from kvconform.emulation.note import NotEmulated

CUDA = torch.device("cuda", 0)
# These build the tensor on the host, then copy it with a wait.
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
EMPTY = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.empty_permuted,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
ZEROS = {torch.zeros, torch.zeros_like, torch.Tensor.new_zeros}


def wants_cuda(device: Any) -> bool:
    """Return whether a device argument names the emulated device.

    Raises NotEmulated for a second CUDA device.
    """
    if device is None:
        return False
    if isinstance(device, int):
        device = torch.device("cuda", device)
    device = torch.device(device)
    if device.type == "cuda" and device.index not in (None, 0):
        raise NotEmulated(f"second device ({device})")
    return bool(device.type == "cuda")


class Placement(TorchFunctionMode):
    """Mode that rewrites calls that name the device or pinned memory; one instance per thread."""

    def __init__(self) -> None:
        super().__init__()
        self.special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self.to,
            torch.Tensor.cpu: lambda tensor, memory_format=None: self.to(
                tensor, "cpu", memory_format=memory_format
            ),
            torch.Tensor.type_as: lambda tensor, other: self.to(tensor, other),
            torch.Tensor.tolist: lambda tensor: self.host_copy(tensor, "tolist()").tolist(),
            torch.Tensor.numpy: self.numpy,
            torch.Tensor.__array__: self.numpy,
            torch.Tensor.__dlpack__: self.dlpack,
            torch.Tensor.__deepcopy__: self.deepcopy,
            torch.Tensor.share_memory_: self.share_memory,
            torch.Tensor.data_ptr: self.data_ptr,
            torch.Tensor.__setitem__: self.set_item,
            torch.Tensor.new_tensor: self.new_tensor,
            torch.device: self.device,
        }

    @property
    def emulation(self) -> Emulation:
        """The calling thread's emulation."""
        return active()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.emulation.off:
            return func(*args, **kwargs)
        special = self.special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if "device" in kwargs or kwargs.get("pin_memory"):
            return self.place(func, args, dict(kwargs))
        return func(*args, **kwargs)

    # -- creating tensors

    def place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that has device= or pin_memory=."""
        emulation = self.emulation
        device = kwargs.pop("device", None)
        pin = kwargs.pop("pin_memory", None)
        if isinstance(device, int):
            device = torch.device("cuda", device)
        cuda = wants_cuda(device)
        given = next((value for value in args if isinstance(value, torch.Tensor)), None)
        there = given is not None and emulation.on_device(given)
        if there and (cuda or device is None):
            if pin:
                raise RuntimeError("Only host tensors can be pinned; this one is made on cuda:0.")
            return func(*args, **kwargs)
        if device is not None and torch.device(device).type not in ("cpu", "cuda"):
            return func(*args, device=device, **kwargs)
        if func in FROM_HOST and given is not None:  # no new tensor, but a move
            moved = self.to(given, device, dtype=kwargs.get("dtype"), copy=func is torch.tensor)
            return moved.pin_memory() if pin else moved
        if cuda and pin:
            raise RuntimeError("Only host tensors can be pinned; this one is made on cuda:0.")
        with emulation.raw():
            if there and given is not None:
                like = torch.empty_strided(given.size(), given.stride(), dtype=given.dtype)
                args = tuple(like if value is given else value for value in args)
            made = func(*args, device="cpu", **kwargs)
        if cuda:
            return self.on_device(made, func)
        return self.pinned(made, func) if pin else made

    def on_device(self, made: torch.Tensor, func: Any) -> torch.Tensor:
        """Return a device tensor with the contents that a factory made on the host.

        The current stream writes them.
        """
        emulation = self.emulation
        tensor = emulation.device_tensor(made)
        if func in FROM_HOST:
            tensor.copy_(made)
        elif func not in EMPTY:
            with emulation.raw():
                block = emulation.memory.block_of(tensor)
                assert block is not None
                target = emulation.stand_in(tensor, block)
            emulation.put(emulation.queue, lambda: target.copy_(made), [block])
        return tensor

    def pinned(self, made: torch.Tensor, func: Any) -> torch.Tensor:
        """Return a pinned tensor with the same contents."""
        tensor = self.emulation.pinned_tensor(made, zero=func in ZEROS)
        if func not in EMPTY and func not in ZEROS:
            with self.emulation.raw():
                tensor.copy_(made)
        return tensor

    def new_tensor(
        self,
        tensor: torch.Tensor,
        data: Any,
        *,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        """Handle Tensor.new_tensor(): default to the tensor's device and dtype."""
        if device is None:
            device = CUDA if self.emulation.on_device(tensor) else "cpu"
        return self.place(
            torch.tensor, (data,), {"dtype": dtype or tensor.dtype, "device": device, **options}
        )

    # -- moving tensors

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Handle Tensor.to(...) in all its forms."""
        rest = list(args)
        device = kwargs.get("device")
        dtype = kwargs.get("dtype")
        other = kwargs.get("other")
        if rest and isinstance(rest[0], torch.Tensor):
            other = rest.pop(0)
        elif rest and isinstance(rest[0], torch.dtype):
            dtype = rest.pop(0)
        elif rest:
            device = rest.pop(0)
            if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
                dtype = rest.pop(0)
        emulation = self.emulation
        there = emulation.on_device(tensor)
        if other is not None:
            dtype = other.dtype
            cuda = emulation.on_device(other)
        elif device is None:
            cuda = there
        else:
            cuda = wants_cuda(device)
        options = dict(zip(("non_blocking", "copy"), rest, strict=False))
        options |= {
            key: value
            for key, value in kwargs.items()
            if key in ("non_blocking", "copy", "memory_format") and value is not None
        }
        if cuda == there:
            host_device = None if cuda else device
            return torch.Tensor.to(tensor, device=host_device, dtype=dtype, **options)
        return self.move(
            tensor,
            cuda,
            dtype or tensor.dtype,
            bool(options.get("non_blocking")),
            options.get("memory_format"),
        )

    def move(
        self,
        tensor: torch.Tensor,
        cuda: bool,
        dtype: torch.dtype,
        non_blocking: bool,
        memory_format: Any = None,
    ) -> torch.Tensor:
        """Return a copy on the other side.

        A non-blocking copy to the host is in pinned memory and not complete yet, as in torch.
        """
        emulation = self.emulation
        with emulation.raw():
            like = torch.empty_like(
                to_meta(tensor), dtype=dtype, memory_format=memory_format or torch.preserve_format
            )
        if cuda:
            made = emulation.device_tensor(like)
        elif non_blocking:
            made = emulation.pinned_tensor(like)
        else:
            with emulation.raw():
                made = torch.empty_strided(like.size(), like.stride(), dtype=dtype)
        return made.copy_(tensor, non_blocking=non_blocking)

    def host_copy(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return a host tensor itself, or the contents of a device tensor after a host wait."""
        emulation = self.emulation
        if not emulation.on_device(tensor):
            return tensor
        emulation.synchronize(emulation.queue, what)
        with emulation.raw():
            return tensor.clone()

    def numpy(self, tensor: torch.Tensor, *args: Any, force: bool = False, **kwargs: Any) -> Any:
        """Handle Tensor.numpy(): only host tensors can be shared with numpy."""
        if self.emulation.on_device(tensor):
            if not force:
                raise TypeError(
                    "A tensor of device cuda:0 cannot be given to numpy; "
                    "it has to be copied to the host first (Tensor.cpu())."
                )
            tensor = self.host_copy(tensor, "numpy(force=True)")
        return tensor.numpy() if not args and not kwargs else tensor.__array__(*args, **kwargs)

    def set_item(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        """Handle item assignment: a number for a device tensor becomes a device tensor."""
        if isinstance(value, (bool, int, float)) and self.emulation.on_device(tensor):
            with self.emulation.raw():
                made = torch.full((), value, dtype=tensor.dtype)
            value = self.on_device(made, torch.full)
        tensor[index] = value

    def share_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Handle Tensor.share_memory_(): device tensors are shared already."""
        return tensor if self.emulation.on_device(tensor) else tensor.share_memory_()

    def device(self, *args: Any, **kwargs: Any) -> torch.device:
        """Handle torch.device(): a bare number names a CUDA device."""
        if args and isinstance(args[0], int):
            args = ("cuda", *args)
        return torch.device(*args, **kwargs)

    def dlpack(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Handle DLPack export, which exists for host tensors only."""
        if self.emulation.on_device(tensor):
            raise NotEmulated("export of device memory through DLPack")
        return torch.Tensor.__dlpack__(tensor, *args, **kwargs)

    def deepcopy(self, tensor: torch.Tensor, memo: Any) -> Any:
        """Handle copy.deepcopy(): a copy of a device tensor is work of the stream."""
        if not self.emulation.on_device(tensor):
            return tensor.__deepcopy__(memo)
        return memo.setdefault(id(tensor), tensor.clone())

    def data_ptr(self, tensor: torch.Tensor) -> int:
        """Return the address; raw copies may use a host tensor whose address is known."""
        if self.emulation.memory.block_of(tensor) is None and tensor.device.type == "cpu":
            self.emulation.memory.seen(tensor)
        return tensor.data_ptr()
