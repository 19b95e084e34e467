# SPDX-License-Identifier: Apache-2.0
"""What the harness tells an engine about its requests."""

from __future__ import annotations

from dataclasses import dataclass

from kvconform.model import Script
from kvconform.provenance import Identity


@dataclass
class Info:
    """What the harness knows about one incarnation of a request."""

    name: str
    generation: int
    identity: Identity
    script: Script
