# SPDX-License-Identifier: Apache-2.0
"""Replacements for the properties and methods of torch.Tensor that a function mode does not see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvconform.emulation.context import RAW, active
from kvconform.emulation.memory import Kind
from kvconform.emulation.patch import Patches
from kvconform.emulation.placement import CUDA, Placement

if TYPE_CHECKING:
    from kvconform.emulation.stream import GenericStream


def patch_tensors(patches: Patches) -> None:
    """Replace properties and methods of torch.Tensor.

    In `raw()` they behave as torch's own, except that memory pinned by the emulation stays pinned.
    """
    base = torch._C.TensorBase
    placement = Placement()  # for its methods only; the mode is not entered

    def there(tensor: torch.Tensor) -> bool:
        emulation = active()
        block = None if emulation.off else emulation.memory.block_of(tensor)
        return block is not None and block.kind is Kind.DEVICE

    def device(tensor: torch.Tensor) -> torch.device:
        return CUDA if there(tensor) else base.device.__get__(tensor)

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        block = active().memory.block_of(tensor)
        return block is not None and block.kind is Kind.PINNED

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if there(tensor):
            raise RuntimeError("Only host tensors can be pinned; this one is on cuda:0.")
        if is_pinned(tensor):
            return tensor
        with RAW:
            like = tensor.contiguous()
        return placement.pinned(like, None)

    def cuda(
        tensor: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = None,
    ) -> torch.Tensor:
        return placement.to(
            tensor,
            "cuda" if device is None else device,
            non_blocking=non_blocking,
            memory_format=memory_format,
        )

    def record_stream(tensor: torch.Tensor, stream: GenericStream) -> None:
        memory = active().memory
        block = memory.block_of(tensor)
        if block is not None:
            memory.record(block, stream.queue)

    reduce_ex = torch.Tensor.__reduce_ex__

    def reduce(tensor: torch.Tensor, protocol: Any) -> Any:
        """Pickle a device tensor as a host tensor, after the host has waited for its bytes.

        torch.save() uses it as well.
        """
        if there(tensor):
            tensor = placement.host_copy(tensor, "pickled")
        return reduce_ex(tensor, protocol)

    def shallow(tensor: torch.Tensor) -> Any:
        """Handle copy.copy(): build the copy from what pickling takes, over the same memory."""
        with RAW:
            made, arguments, *state = tensor.__reduce_ex__(4)
            twin = made(*arguments)
            if state and state[0]:
                twin.__dict__.update(state[0])
            return twin

    patches.set(torch.Tensor, "__copy__", shallow)
    patches.set(torch.Tensor, "__reduce_ex__", reduce)
    patches.set(torch.Tensor, "device", property(device))
    patches.set(torch.Tensor, "is_cuda", property(there))
    patches.set(
        torch.Tensor,
        "is_cpu",
        property(lambda tensor: not there(tensor) and base.is_cpu.__get__(tensor)),
    )
    patches.set(
        torch.Tensor, "get_device", lambda tensor: 0 if there(tensor) else base.get_device(tensor)
    )
    patches.set(torch.Tensor, "is_pinned", is_pinned)
    patches.set(torch.Tensor, "pin_memory", pin_memory)
    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "record_stream", record_stream)
