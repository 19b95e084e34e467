# SPDX-License-Identifier: Apache-2.0
"""A CUDA device emulated over host tensors: streams, events and kinds of memory.

The order in which work runs is as adversarial as CUDA permits (docs/emulation.md).
"""
