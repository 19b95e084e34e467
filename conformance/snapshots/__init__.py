# SPDX-License-Identifier: Apache-2.0
"""Recorded metadata and stored KV of a connector, compared with a later run."""
