# SPDX-License-Identifier: Apache-2.0
"""A call of `kvconform gpu`: which parts run, for how long, and what is kept after each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from threading import Event, Lock
from xml.etree.ElementTree import ParseError

from kvconform import __version__, files
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.gpu import child, page
from kvconform.gpu.parts import PARTS, Part, Reading, Setting, Stage
from kvconform.gpu.result import (
    NAME,
    SETTLED,
    Machine,
    Outcome,
    Result,
    Status,
    load,
    save,
    today,
)

SHORTEST = 5.0
"""Seconds below which no part is begun."""
NO_TIME = "no time was left"
WORTH: dict[Status, int] = {"not run": 0, "timed out": 1, "done": 2, "failed": 2}
"""An outcome replaces an earlier one that is not worth more."""
Say = Callable[[str], None]


def machine() -> Machine:
    """Return this machine. EnvironmentProblem if its Python cannot say."""
    asked = [sys.executable, "-m", "kvconform.gpu.machine"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    try:
        return Machine(**json.loads(said.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EnvironmentProblem(f"the machine's device cannot be asked: {last}") from None


def begin(setting: Setting, parts: Sequence[Part], *, afresh: bool) -> Result:
    """Return the stored result that this call goes on with, or a new one.

    UsageError if the stored one is of another machine, other versions or another device.
    """
    path = setting.file(NAME)
    known = None if afresh else load(path)
    outcomes = [
        Outcome(part=part.id, title=part.title, reason="it was not its turn yet") for part in parts
    ]
    if known is None:
        return Result(machine=setting.machine, emulated=setting.emulated, parts=outcomes)
    changed = known.machine.differences(setting.machine)
    if known.kvconform != __version__:
        changed.append(f"kvconform {known.kvconform} -> {__version__}")
    if known.emulated != setting.emulated:
        changed.append("the device")
    if changed:
        raise UsageError(
            f"{path} is a result of another machine ({', '.join(changed)});"
            " --afresh replaces it, --out names another folder"
        )
    there = {each.part: each for each in known.parts}
    known.parts = [there.get(each.part, each) for each in outcomes]
    return known


def rounds(
    result: Result, parts: Sequence[Part], only: Sequence[str]
) -> Iterator[tuple[Stage, list[Part]]]:
    """Yield the parts to run by stage; after all, those that were timed out: others may fit.

    `only`: these, also if they have been run.
    """
    chosen = [
        part
        for part in parts
        if (part.id in only if only else result.of(part.id).status not in SETTLED)
    ]
    late = {each.part for each in result.parts if not only and each.status == "timed out"}

    def order(part: Part) -> tuple[bool, Stage]:
        return part.id in late, part.stage

    for (_, stage), together in groupby(sorted(chosen, key=order), key=order):
        yield stage, list(together)


def keep(result: Result, setting: Setting) -> None:
    """Write the result and its page."""
    save(result, setting.file(NAME))
    files.replace(setting.file(page.NAME), page.page(result))


def run(
    setting: Setting,
    minutes: float,
    say: Say,
    *,
    afresh: bool = False,
    only: Sequence[str] = (),
    parts: Sequence[Part] = PARTS,
    jobs: int = 1,
) -> Result:
    """Run the parts that have not been run, for at most `minutes`; return the result.

    `only`: these, also if they have been run. `jobs`: how many parts of a stage run at the same
    time. The result is written after each part, so that an interrupted call keeps what it has.
    UsageError for an unknown part.
    """
    until = time.monotonic() + minutes * 60
    unknown = set(only) - {part.id for part in parts}
    if unknown:
        names = ", ".join(part.id for part in parts)
        raise UsageError(f"there is no part {min(unknown)!r}; there are {names}")
    result = begin(setting, parts, afresh=afresh)
    keep(result, setting)
    stop, lock = Event(), Lock()

    def work(part: Part) -> None:
        """Run a part if time is left for it, and keep its outcome."""
        found = None
        if child.left(until) >= SHORTEST or part.lacks(setting) is not None:
            say(f"{part.id}: {part.title}")
            found = one(part, setting, until, stop)
        with lock:
            note(part, found)

    def note(part: Part, found: Outcome | None) -> None:
        """Keep the outcome of a part, and say it. None: no time was left.

        One that did not end does not replace that of an earlier call that did.
        """
        before = result.of(part.id)
        if found is not None:
            if WORTH[found.status] >= WORTH[before.status]:
                result.put(found)
            took = "" if found.status == "not run" else f" in {found.seconds:.0f} s"
            reason = f": {found.reason}" if found.reason else ""
            say(f"  {part.id}: {found.status}{took}{reason}")
        elif before.status == "not run":
            result.put(before.model_copy(update={"reason": NO_TIME}))
        keep(result, setting)

    # All are chosen now: their outcomes change while they run.
    for stage, together in list(rounds(result, parts, only)):
        with ThreadPoolExecutor(1 if stage == Stage.ALONE else jobs) as pool:
            running = [pool.submit(work, part) for part in together]
            try:
                for done in as_completed(running):
                    done.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return result


def one(part: Part, setting: Setting, until: float, stop: Event | None = None) -> Outcome:
    """Run one part until the time `until` of the monotonic clock at most; return its outcome.

    It is ended when `stop` is set, and counts as not run then.
    """
    made = Outcome(part=part.id, title=part.title, date=today())
    lacking = part.lacks(setting)
    if lacking is not None:
        return made.model_copy(update={"reason": lacking, "date": ""})
    log = setting.file(f"{part.id}.log")
    log.unlink(missing_ok=True)
    began = time.monotonic()
    bad: int | None = 0
    for command in part.commands(setting):
        ended = child.run(command, log, child.left(until), part.environment(setting), stop)
        bad = ended if bad == 0 else bad
        if ended is None:
            bad = None
            break
    seconds = round(time.monotonic() - began, 1)
    said = read(part, setting)
    status: Status = "done"
    reason = ""
    if bad is None:
        said_last = child.last_words(log)
        status, reason = "timed out", f"ended after {seconds:.0f} s"
        if stop is not None and stop.is_set():
            status, reason = "not run", f"interrupted after {seconds:.0f} s"
        reason += f", when it had said: {said_last}" if said_last else ""
    elif bad or said.problem:
        status = "failed"
        reason = said.problem or f"status {bad}: {child.last_words(log) or 'no output'}"
    update = {"status": status, "reason": reason, "seconds": seconds, "figures": said.figures}
    return made.model_copy(update=update)


def read(part: Part, setting: Setting) -> Reading:
    """Return what a part's files say; files that cannot be read are its problem."""
    try:
        return part.read(setting)
    except (OSError, ValueError, KeyError, TypeError, ParseError) as error:
        return Reading(problem=f"its results cannot be read: {error}")
