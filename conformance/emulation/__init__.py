# SPDX-License-Identifier: Apache-2.0
"""A CUDA device emulated over host tensors: streams, events and memory kinds, executed as adversarially as CUDA permits. See
docs/emulation.md."""

from __future__ import annotations

from .context import Emulation, active
from .emulate import emulate
from .errors import DeviceFault, NotEmulated
from .note import Note

__all__ = ["DeviceFault", "Emulation", "NotEmulated", "Note", "active", "emulate"]
