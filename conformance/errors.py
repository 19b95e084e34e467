# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run with one clear sentence and a defined exit code."""

from __future__ import annotations


class KvconformError(Exception):
    """Base of errors meant for a person: `message` is one sentence that says what to do. Exit code `code`."""

    code = 3

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(KvconformError):
    """The user asked for something that cannot be: unknown option, id, class, broken YAML. Exit code 2."""

    code = 2


class EnvironmentProblem(KvconformError):
    """The environment or the harness is at fault: vLLM missing or too old, a worker that cannot start. Exit code 3."""

    code = 3
