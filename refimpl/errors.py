# SPDX-License-Identifier: Apache-2.0
"""Errors of the reference engine: a breach of the contract by its caller, or a broken invariant."""

from __future__ import annotations


class EngineAssertion(AssertionError):
    """Raised when the engine refuses an illegal answer or report of the connector.

    `rule` is the rule of the contract that was broken (R001, ...).
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class IntegrityError(Exception):
    """Raised when the reference engine's own state is inconsistent.

    `subject` is the block or the request concerned ("block 7", "request r0").
    """

    def __init__(self, subject: str, message: str) -> None:
        super().__init__(f"{subject}: {message}")
        self.subject = subject
