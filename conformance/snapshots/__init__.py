# SPDX-License-Identifier: Apache-2.0
"""Golden snapshots: what a connector's metadata, its hooks and the KV that it stored looked like, kept for comparison across versions."""
