# SPDX-License-Identifier: Apache-2.0
"""Engines: what calls the connector. `reference` is ours, `vllm` is the installed vLLM's scheduler with our worker."""

ENGINES = ("reference", "vllm")
