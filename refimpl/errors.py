# SPDX-License-Identifier: Apache-2.0
"""What the reference engine raises: an engine assertion (somebody broke the contract) or a broken invariant (the engine is wrong)."""

from __future__ import annotations


class EngineAssertion(AssertionError):
    """The engine refuses to go on: an answer or a report of the connector is illegal. `rule` names the rule of the contract (R001..)."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class IntegrityError(Exception):
    """The reference engine's own books are wrong. `subject` names the block or the request ("block 7", "request r0")."""

    def __init__(self, subject: str, message: str) -> None:
        super().__init__(f"{subject}: {message}")
        self.subject = subject
