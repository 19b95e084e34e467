# SPDX-License-Identifier: Apache-2.0
"""Comparison of two reports: two versions of a connector, or of vLLM."""
