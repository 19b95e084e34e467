# SPDX-License-Identifier: Apache-2.0
"""Kernels over a paged KV cache, in Triton and in plain torch: `write`, `verify`, `digest`, `transfer` (gather and scatter), `poison`.

Importing this package imports nothing; its modules need torch and numpy, and use Triton where it is installed (docs/kernels.md).
"""
