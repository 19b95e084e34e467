# SPDX-License-Identifier: Apache-2.0
"""Machines for tests of `kvconform gpu`: with vLLM, and with nothing but torch and Triton."""

from __future__ import annotations

from kvconform.gpu.result import Machine

BARE = Machine(
    device="a GPU",
    driver="1",
    capability="9.0",
    python="3.12",
    torch="2",
    triton="3",
    vllm=None,
    compiled=False,
)
MACHINE = BARE.model_copy(update={"vllm": "0.32.0", "compiled": True})
