# SPDX-License-Identifier: Apache-2.0
"""The end of a sentence about a name that does not exist: what may have been meant.

Errors that end a run with one clear sentence and a defined exit code.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import PurePath


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """`; did you mean a or b?` for the nearest of the known names, or nothing."""
    close = difflib.get_close_matches(name, list(known), most, 0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


BENEATH = frozenset(
    {"kvconform", "torch", "numpy", "msgspec", "pydantic", "pydantic_core", "safetensors", "zmq"}
)
"""Packages whose lines say nothing about a connector that raised: ours, and what connectors are built on."""

VLLM = "vllm"
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of packages that somebody has installed: of what is there only the connector's own package is the connector's."""


class KvconformError(Exception):
    """Base of errors meant for a person: `message` is one sentence that says what to do, `details` what --debug adds. Exit code `code`."""

    code = 3

    def __init__(self, message: str, details: str | None = None) -> None:
        super().__init__(message)
        self.message, self.details = message, details


class UsageError(KvconformError):
    """The user asked for something that cannot be: unknown option, id, class, broken YAML. Exit code 2."""

    code = 2


class EnvironmentProblem(KvconformError):
    """The environment or the harness is at fault: vLLM missing or too old, a worker that cannot start. Exit code 3."""

    code = 3


class WrongPart(ValueError):
    """What is wrong with a part of a field or model, raised by a validator of the whole; `path` leads there, by keys and indexes."""

    def __init__(self, sentence: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(sentence)
        self.path = path


class Panic(RuntimeError):
    """What a connector raised that is no `Exception`, as one: a panic of its native code (PyO3's PanicException) or alike."""


def ordinary(error: BaseException) -> BaseException:
    """The error itself if it is an `Exception`, or one that ends a process on purpose; a Panic that says the same for all others."""
    if isinstance(error, Exception | KeyboardInterrupt | SystemExit | GeneratorExit):
        return error
    return Panic(f"{type(error).__name__}: {error}")


def place_of(error: BaseException, connector: type | None = None) -> str:
    """` (file.py:12, in function)`: the innermost place of a traceback that is the connector's own; empty if there is none.

    Its own is what lies in its top-level package, and what is installed nowhere: the other files of its checkout. A connector that is
    part of vLLM, or not given, has no package of its own: then all counts that is neither ours nor a library's under the connector. The
    suite's own connectors have no place: their lines change from commit to commit.
    """
    own = "" if connector is None else _package(connector.__module__)
    found, frame = "", error.__traceback__
    while frame is not None:
        package, code = (
            _package(str(frame.tb_frame.f_globals.get("__name__", ""))),
            frame.tb_frame.f_code,
        )
        file = PurePath(code.co_filename)
        ours = package == own or (package != VLLM and INSTALLED.isdisjoint(file.parts))
        if (
            package
            and (ours or not own or own == VLLM)
            and package not in BENEATH
            and package not in sys.stdlib_module_names
        ):
            found = f" ({file.name}:{frame.tb_lineno}, in {code.co_name})"
        frame = frame.tb_next
    return found


def _package(module: str) -> str:
    return module.partition(".")[0]


def one_line(error: BaseException) -> str:
    """Type and text of an error, and of its cause, in one line of at most 300 characters: of a configuration that vLLM refuses what its
    validators said, not how many."""
    problems = getattr(error, "errors", None) if type(error).__name__ == "ValidationError" else None
    said = (
        "; ".join(str(problem.get("msg")) for problem in problems())
        if callable(problems)
        else str(error)
    )
    text = (said if isinstance(error, Panic) else f"{type(error).__name__}: {said}").splitlines()[0]
    if error.__cause__ is not None and not isinstance(error, Panic):
        text += f" (from {type(error.__cause__).__name__}: {error.__cause__}".splitlines()[0] + ")"
    return text[:300]
