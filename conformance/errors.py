# SPDX-License-Identifier: Apache-2.0
"""Errors with one clear sentence and an exit code, the places they come from, and their wording."""

from __future__ import annotations

import difflib
import linecache
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import NamedTuple

LEAST_CLOSE = 0.6
"""The least ratio (difflib) of a name that may be meant: half of the letters alone says nothing."""


def did_you_mean(name: str, known: Iterable[str], most: int = 3, *, quoted: bool = False) -> str:
    """Return `; did you mean a or b?` with at most `most` known names close to `name`, or ""."""
    close = close_to(name, known, most)
    return meant([*map(repr, close)] if quoted else close)


def close_to(name: str, known: Iterable[str], most: int) -> list[str]:
    """Return at most `most` known names close to `name`, the closest first.

    Names that are much less close than the first are left out.
    """
    close = difflib.get_close_matches(name, list(known), most, LEAST_CLOSE)
    ratios = [difflib.SequenceMatcher(None, each, name).ratio() for each in close]
    return [each for each, ratio in zip(close, ratios, strict=True) if ratio >= ratios[0] - 0.1]


def meant(names: Sequence[str]) -> str:
    """Return `; did you mean a or b?`, or "" without names."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


class KvconformError(Exception):
    """Base of errors meant for a person.

    `message` is one sentence that says what to do, `details` is what --debug adds, and `code` is
    the exit code.
    """

    code = 3

    def __init__(self, message: str, details: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class UsageError(KvconformError):
    """A request that cannot be met: unknown option, id or class, broken YAML. Exit code 2."""

    code = 2


class EnvironmentProblem(KvconformError):
    """A fault of the environment or the harness. Exit code 3.

    Examples: vLLM is missing or too old, a worker cannot start.
    """

    code = 3


class Location(NamedTuple):
    """A line of a file of the specification; without `line`, the file (or an id) alone."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Problem(NamedTuple):
    """A mistake in a file of the specification."""

    where: Location
    sentence: str

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


class BrokenFile(UsageError):
    """A file that cannot be parsed, with the `problem` that was found first."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class WrongPart(ValueError):
    """A mistake in a part of a field or model, raised by a validator of the whole.

    `path` leads to the part, by keys and indexes.
    """

    def __init__(self, sentence: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(sentence)
        self.path = path


class Panic(RuntimeError):
    """Stand-in for what a connector raised that is no `Exception`.

    Native code does that when it panics (PyO3's PanicException).
    """


def ordinary(error: BaseException) -> BaseException:
    """Return the error, or a `Panic` with its type and text if it is no `Exception`.

    The exceptions that end a process on purpose are returned as they are.
    """
    if isinstance(error, Exception | KeyboardInterrupt | SystemExit | GeneratorExit):
        return error
    return Panic(f"{type(error).__name__}: {error}")


BENEATH = frozenset(
    {"kvconform", "torch", "numpy", "msgspec", "pydantic", "pydantic_core", "safetensors", "zmq"}
)
"""Packages whose lines do not explain why a connector raised: ours, and what connectors use."""

VLLM = "vllm"
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages; only the connector's own package in them is the connector's."""


class Place(NamedTuple):
    """A line of source that an error came from.

    `file` is the file's name without its directory, so that it is the same on every machine. `code`
    is the text of the line: it names the place even when lines were added above it.
    """

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


def place_of(error: BaseException, connector: type | None = None) -> Place | None:
    """Return the innermost place of an error's traceback that is the connector's own, or None.

    Its own are the files of its top-level package, and files that are installed nowhere: the rest
    of its checkout. A connector that is part of vLLM, or not given, has no package of its own. Then
    every place counts that is neither ours nor in a library that connectors are built on. The
    suite's own connectors have no place: their lines change from commit to commit.
    """
    traceback = _innermost(error, connector)
    if traceback is None:
        return None
    code = traceback.tb_frame.f_code
    return Place(
        PurePath(code.co_filename).name, traceback.tb_lineno, code.co_name, _line(traceback)
    )


def numbers_at(error: BaseException, connector: type | None = None) -> dict[str, int]:
    """Return the integers in local variables that the line of `place_of` names, by name."""
    traceback = _innermost(error, connector)
    if traceback is None:
        return {}
    known = traceback.tb_frame.f_locals
    named = dict.fromkeys(re.findall(r"(?<![\w.])[A-Za-z_]\w*", _line(traceback)))
    return {name: known[name] for name in named if type(known.get(name)) is int}


def _line(traceback: TracebackType) -> str:
    return linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno).strip()


def _innermost(error: BaseException, connector: type | None) -> TracebackType | None:
    """Return the innermost entry of an error's traceback that is the connector's own."""
    own = "" if connector is None else _package(connector.__module__)
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        if _is_own(traceback.tb_frame, own):
            found = traceback
        traceback = traceback.tb_next
    return found


def _is_own(frame: FrameType, own: str) -> bool:
    """Return whether a frame belongs to the connector, whose package is `own` ("": not known)."""
    package = _package(str(frame.f_globals.get("__name__", "")))
    if not package or package in BENEATH or package in sys.stdlib_module_names:
        return False
    if own in ("", VLLM, package):
        return True
    folders = PurePath(frame.f_code.co_filename).parts
    return package != VLLM and INSTALLED.isdisjoint(folders)


def _package(module: str) -> str:
    return module.partition(".")[0]


def one_line(error: BaseException) -> str:
    """Return type and text of an error, and of its cause, in one line of at most 300 characters.

    The text of pydantic's ValidationError, which vLLM raises for a configuration that it refuses,
    is what the validators said; pydantic's own begins with their number.
    """
    if isinstance(error, Panic):
        return str(error).splitlines()[0][:300]
    text = f"{type(error).__name__}: {_text(error)}".splitlines()[0]
    if error.__cause__ is not None:
        text += f" (from {type(error.__cause__).__name__}: {error.__cause__}".splitlines()[0] + ")"
    return text[:300]


def _text(error: BaseException) -> str:
    problems = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(problems):
        return "; ".join(str(problem.get("msg")) for problem in problems())
    return str(error)
