# SPDX-License-Identifier: Apache-2.0
"""A connector judged in many vLLM releases, and what changed from one release to the next: `python -m kvconform.versions`."""

from __future__ import annotations

RELEASES = (
    "0.11.2", "0.12.0", "0.13.0", "0.14.1", "0.16.0", "0.18.1", "0.20.2", "0.23.0", "0.26.0", "0.29.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
"""The releases that are compared when none are named: those in which the interface or the scheduler's protocol changed."""
