# SPDX-License-Identifier: Apache-2.0
"""Environment that vLLM is imported in; import this before any of vLLM's modules.

vLLM decides while it is imported which platform it is on. It sets its logger up only when an engine
starts: what its modules say before, Python prints whatever VLLM_LOGGING_LEVEL says.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
    # Without a GPU, a CUDA build of vLLM finds no platform and refuses to build a configuration.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
