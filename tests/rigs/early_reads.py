# SPDX-License-Identifier: Apache-2.0
"""A connector with a planted defect: it reads its level on the device too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.cache.arena import DeviceBackend
from kvconform.refimpl.cache.tiers import Level, Tiers
from kvconform.refimpl.variants.tiers import Tiered

if TYPE_CHECKING:
    import torch


class ReadsEarly(DeviceBackend):
    """Takes what is in the host's buffer before the copy from the device has ended."""

    def _await(self, copied: torch.cuda.Event) -> None:
        return


class _Levels(Tiers):
    def __init__(self, levels: Sequence[Level], *args: Any, **options: Any) -> None:
        for level in levels:
            if isinstance(level.backend, DeviceBackend):
                level.backend = ReadsEarly(level.backend.size)
        super().__init__(levels, *args, **options)


class ReadsDeviceEarly(Tiered):
    """The connector over such a level."""

    tiers_kind = _Levels
