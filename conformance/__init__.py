# SPDX-License-Identifier: Apache-2.0
"""kvconform: the contract of vLLM's KV connectors, written down and made executable."""

__version__ = "0.2.0"
