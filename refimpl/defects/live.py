# SPDX-License-Identifier: Apache-2.0
"""Known-bad connectors for all of vLLM: each is the reference connector, and what it loads is wrong without anybody saying so.

They touch the KV as vLLM has it, block by block, whatever the layout: the tensors that the worker half was given at its registration.
"""

from __future__ import annotations

from typing import Any

import torch

from kvconform.refimpl.connector import ReferenceConnector


class _Tampers(ReferenceConnector):
    """Remembers the KV tensors, and which blocks a step's synchronous loads fill."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._tensors = dict(kv_caches)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        super().start_load_kv(forward_context, **kwargs)
        for name, tensor in self._tensors.items():
            axis = tensor.shape.index(
                max(tensor.shape[:2])
            )  # blocks are along the first or the second axis
            new, old = tensor.movedim(axis, 0), before[name].movedim(axis, 0)
            blocks = [
                number for number in range(len(new)) if not torch.equal(new[number], old[number])
            ]
            self.tamper(name, new, old, blocks)

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        """Spoil the loaded `blocks` of a layer; new, old [blocks, ...]: its KV after and before the load."""
        raise NotImplementedError


class ScalesLoads(_Tampers):
    """What comes back is a tenth too small."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        for number in blocks[:1]:
            new[number] *= 0.9


class SkipsLastLayer(_Tampers):
    """Loads all layers but the last."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        if layer == list(self._tensors)[-1]:
            for number in blocks:
                new[number] = old[number]


class RoundsLoads(_Tampers):
    """Keeps float32 KV in half as many bits."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        for number in blocks:
            new[number] = new[number].to(torch.bfloat16).to(new.dtype)


class SwapsBlocks(_Tampers):
    """Loads the blocks of one step in the wrong order: a request reads another prefix's KV."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        if len(blocks) > 1:
            new[blocks] = new[blocks].roll(1, 0).clone()


class KeepsServer(ReferenceConnector):
    """Starts a process in its worker half, in a session of its own, and never ends it."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        import subprocess
        import sys

        server = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); time.sleep(600)"
        subprocess.Popen(
            [sys.executable, "-c", server], start_new_session=True, stdin=subprocess.DEVNULL
        )
        super().register_kv_caches(kv_caches)


class NeverReports(ReferenceConnector):
    """Loads asynchronously, and never says that it has."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, _ = super().get_finished(finished_req_ids)
        return sent, None


class NeverLetsGo(ReferenceConnector):
    """Says of every finished request that it still sends its blocks, and never that it has."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        _, parameters = super().request_finished(request, block_ids)
        return True, parameters
