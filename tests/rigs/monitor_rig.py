# SPDX-License-Identifier: Apache-2.0
"""Events and requirements for tests of monitors."""

from __future__ import annotations

from typing import Any

from kvconform.contract.requirement import Requirement

Event = dict[str, Any]
END: Event = {"kind": "run.end", "crashed": False}


def requirement(**pattern: Any) -> Requirement:
    return Requirement.model_validate({"id": "x.y", "text": "It MUST be.", **pattern})
