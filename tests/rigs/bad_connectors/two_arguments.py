# SPDX-License-Identifier: Apache-2.0
"""A connector with a constructor that vLLM refuses."""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.connector import ReferenceConnector


class Connector(ReferenceConnector):
    def __init__(self, vllm_config: Any, *others: Any) -> None:
        super().__init__(vllm_config, *others)
