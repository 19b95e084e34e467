# SPDX-License-Identifier: Apache-2.0
"""Copies between device, pinned and pageable memory: what is read and written when, and which of them make the host wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .machine import Queue
from .memory import Block, Kind

if TYPE_CHECKING:
    from .context import Emulation


def in_one_piece(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Whether a copy engine can move one into the other as they lie: the same dtype, sizes and strides, with neither gaps nor overlaps,
    whatever the order of the dimensions. Torch makes no temporary for such a copy."""
    if dst.dtype != src.dtype or dst.size() != src.size():
        return False
    steps = [(to, of, size) for to, of, size in zip(dst.stride(), src.stride(), dst.size(), strict=True) if size != 1]
    expected = 1
    for to, of, size in sorted(steps):
        if to != expected or of != expected:
            return False
        expected *= size
    return True


def direct(dst: torch.Tensor, src: torch.Tensor, to_device: bool) -> bool:
    """Whether a copy that need not block uses the host's tensor itself. If not in one piece, torch puts in order, and converts, what is on
    the device there; a tensor of the host it has to find in order, or there is pageable memory in between."""
    return in_one_piece(dst, src) or (src.expand_as(dst) if to_device else dst).is_contiguous()


class Copies:
    """The copy operations of one emulation."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.made_by_address = 0

    def by_address(self, queue: Queue, copies: list[tuple[int, int, int]], any_order: bool, what: str) -> None:
        """Queue copies given as (destination, source, bytes). Pageable sources are read at the call, as staging does; a pageable
        destination makes the host wait. Pinned and device memory is used when the work's turn comes, and nothing keeps it from being freed
        until then."""
        emulation = self.emulation
        self.made_by_address += 1
        with emulation.machine.lock, emulation.raw():
            early = any_order and emulation.machine.delay == "compute"
            blocks: list[Block] = []
            parts: list[tuple[Block, int, Block, int, int, torch.Tensor | None]] = []
            waits = False
            for dst, src, nbytes in copies:
                to, of = emulation.memory.resolve(dst, nbytes), emulation.memory.resolve(src, nbytes)
                at = src - of.start
                staged = of.bytes[at : at + nbytes].clone() if early or of.kind is Kind.PAGEABLE else None
                parts.append((to, dst - to.start, of, at, nbytes, staged))
                blocks += [to] if staged is not None else [to, of]
                waits = waits or to.kind is Kind.PAGEABLE
            held = list(dict.fromkeys(blocks))

            def run() -> None:
                for block in held:
                    if emulation.memory.forsaken(block):
                        emulation.memory.overwrite_registered(block)
                for to, into, of, at, nbytes, staged in parts:
                    to.bytes[into : into + nbytes].copy_(of.bytes[at : at + nbytes] if staged is None else staged)

            sources = [(of, at, n) for _, _, of, at, n, _ in parts if of.kind is Kind.DEVICE]
            watch = emulation.watch(queue, what, lambda: [of.bytes[at : at + n] for of, at, n in sources]) if sources else None
            if early and watch is not None:
                emulation.machine.watch(watch)  # it has been read just now
            emulation.put(queue, run, held, raw=True, watch=None if early else watch)
        if waits:
            emulation.synchronize(queue, f"{what} to pageable memory")

    def of_tensors(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
        """tensor.copy_() where at least one of the two is in device memory; at least one of them makes this the current stream's work."""
        emulation = self.emulation
        queue = emulation.queue
        with emulation.machine.lock, emulation.raw():
            to, of = emulation.memory.block_of(dst), emulation.memory.block_of(src)
            to_device = to is not None and to.kind is Kind.DEVICE
            from_device = of is not None and of.kind is Kind.DEVICE
            unstaged = non_blocking and to_device != from_device and direct(dst, src, to_device)
            if not from_device and not (of is not None and unstaged):
                source = src.clone()  # staged, or the host waits anyway
            else:
                source = emulation.stand_in(src, of) if from_device and of is not None else src.detach()
            target = emulation.stand_in(dst, to) if to_device and to is not None else dst.detach()
            uses = [block for block in (to, of) if block is not None and not (block is of and not from_device and source is not src)]
            watch = emulation.watch(queue, "copy_", lambda: [source]) if from_device else None
            emulation.put(queue, lambda: target.copy_(source), uses, watch=watch)
        if to_device and from_device:
            return
        asynchronous = non_blocking and (to_device or (to is not None and unstaged))
        if not asynchronous:
            emulation.synchronize(queue, "blocking copy to the device" if to_device else "blocking copy to the host")
