# SPDX-License-Identifier: Apache-2.0
"""Planted defects for the complete vLLM: wrong loads that are not reported, and leftovers.

The loads are spoiled in the KV tensors of vLLM, block by block, whatever the layout.
"""

from __future__ import annotations

from typing import Any

import torch

from kvconform.refimpl.connector import Finish, ReferenceConnector


class _Tampers(ReferenceConnector):
    """Spoils the blocks that a step's synchronous loads have filled."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._tensors = dict(kv_caches)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        super().start_load_kv(forward_context, **kwargs)
        for name, tensor in self._tensors.items():
            # Blocks are along the first or the second axis.
            axis = tensor.shape.index(max(tensor.shape[:2]))
            new, old = tensor.movedim(axis, 0), before[name].movedim(axis, 0)
            loaded = [each for each in range(len(new)) if not torch.equal(new[each], old[each])]
            self.tamper(name, new, old, loaded)

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        """Spoil the loaded `blocks` of a layer.

        `new` and `old` [blocks, ...] are its KV after and before the load.
        """
        raise NotImplementedError


class ScalesLoads(_Tampers):
    """Loads the first block of a step a tenth too small."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        for number in blocks[:1]:
            new[number] *= 0.9


class SkipsLastLayer(_Tampers):
    """Loads all layers but the last."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        if layer == list(self._tensors)[-1]:
            for number in blocks:
                new[number] = old[number]


class ForgetsTheDraftModel(ReferenceConnector):
    """Registers the layers of the model, and none of the model that makes drafts."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(
            {name: layer for name, layer in kv_caches.items() if "draft" not in name}
        )


class RoundsLoads(_Tampers):
    """Rounds the float32 KV that it loads to bfloat16."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        for number in blocks:
            new[number] = new[number].to(torch.bfloat16).to(new.dtype)


class SwapsBlocks(_Tampers):
    """Loads the blocks of one step in the wrong order: a request reads another prefix's KV."""

    def tamper(self, layer: str, new: torch.Tensor, old: torch.Tensor, blocks: list[int]) -> None:
        if len(blocks) > 1:
            new[blocks] = new[blocks].roll(1, 0).clone()


class KeepsServer(ReferenceConnector):
    """Starts a server in its worker half, in a session of its own, and never ends it."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        import subprocess
        import sys

        server = (
            "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); "
            "time.sleep(600)"
        )
        subprocess.Popen(
            [sys.executable, "-c", server], start_new_session=True, stdin=subprocess.DEVNULL
        )
        super().register_kv_caches(kv_caches)


class NeverReports(ReferenceConnector):
    """Loads asynchronously, and never reports that it has."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, _ = super().get_finished(finished_req_ids)
        return sent, None


class NeverLetsGo(ReferenceConnector):
    """Keeps the blocks of every finished request as if to send them, and never reports it."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        _, parameters = super().request_finished(request, block_ids)
        return True, parameters
