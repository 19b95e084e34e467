# SPDX-License-Identifier: Apache-2.0
"""One engine driven by hand: scheduler (ours or vLLM's), ranks, workers, and both halves of the connector."""
