# SPDX-License-Identifier: Apache-2.0
"""A CUDA device emulated over host tensors: streams, events and memory kinds, as adversarial as CUDA permits (docs/emulation.md)."""
