# SPDX-License-Identifier: Apache-2.0
"""What workers answer: results, exceptions, and how their processes ended."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from kvconform.errors import EnvironmentProblem, KvconformError, one_line
from kvconform.execute.work import Place
from kvconform.process.watchdog import Note, read_note

SHOWN = 12
"""Lines of a dead worker's log that are kept."""


@dataclass(frozen=True)
class Answer:
    """A message of a worker. `value` depends on the kind.

    - `ready`: the worker is built. None.
    - `result`: of the piece that it was given first. What the piece returned.
    - `raised`: by that piece. The exception.
    - `refused`: no worker can be built here. The exception.
    """

    kind: Literal["ready", "result", "raised", "refused"]
    value: Any = None


@dataclass(frozen=True)
class Death:
    """The end of a worker's process during a piece, which the piece may have caused.

    `code`: exit code, negative for a signal; None if unknown. `note`: what the process was doing,
    if it had a watchdog. `printed`: the end of its log. `where`: its machine, if not this one.
    """

    code: int | None
    note: Note | None = None
    printed: str = ""
    where: str = ""

    def __str__(self) -> str:
        where = f" on {self.where}" if self.where else ""
        return f"(exit code {self.code}){where}" + f":\n{self.printed}" * bool(self.printed)


@dataclass(frozen=True)
class Loss:
    """The end of a worker with its machine, which no piece is blamed for. `why`: a sentence."""

    why: str


def death_of(place: Place, code: int | None) -> Death:
    """Return how a worker's process ended, from the files that it left in its scratch folder."""
    try:
        text = place.log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return Death(code, read_note(place.note), "\n".join(text.splitlines()[-SHOWN:]))


def packed(answer: Answer) -> bytes:
    """Return an answer as bytes. An exception is replaced if it cannot be pickled.

    A result that cannot be pickled becomes an exception. Exceptions of programming errors carry
    their traceback as a note.
    """
    if isinstance(answer.value, BaseException):
        answer = Answer(answer.kind, _portable(answer.value))
    try:
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle runs code of the result's classes
        return pickle.dumps(Answer("raised", EnvironmentProblem(f"a result is lost: {error}")))


def _portable(error: BaseException) -> BaseException:
    if not isinstance(error, KvconformError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's class may need arguments that pickle does not have
        return EnvironmentProblem(f"a worker failed: {one_line(error)}")
    return error if type(copy) is type(error) else EnvironmentProblem(one_line(error))


def unpacked(data: bytes) -> Answer:
    """Return the answer that `packed` turned into `data`."""
    answer: Answer = pickle.loads(data)
    return answer
