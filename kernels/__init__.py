# SPDX-License-Identifier: Apache-2.0
"""Kernels over a paged KV cache, in Triton and in plain torch (docs/kernels.md).

The modules are `write`, `verify`, `digest`, `transfer` (gather and scatter) and `poison`. They need
torch and numpy, and use Triton where it is installed. Importing this package imports none of them.
"""
