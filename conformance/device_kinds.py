# SPDX-License-Identifier: Apache-2.0
"""The devices that a KV cache can be on, and which of their streams can be slow. Imports nothing: the command line needs it."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda", "emulated"]
Slow = Literal["compute", "transfers"]
SLOW: tuple[Slow, ...] = ("compute", "transfers")
