# SPDX-License-Identifier: Apache-2.0
"""Keeps vLLM's modules quiet while they are imported; import this before any of them.

vLLM 0.32 sets its logger up when an engine starts. What its modules say before, for example that
Triton cannot be used, Python prints whatever VLLM_LOGGING_LEVEL says.
"""

from __future__ import annotations

import logging
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
