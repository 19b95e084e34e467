# SPDX-License-Identifier: Apache-2.0
"""Profiles and output of `kvconform explore`; its exit codes are those of `kvconform run`."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvconform.compat.installed import check_vllm
from kvconform.config.catalogue import check_connector_exists, check_connector_name, lacking
from kvconform.config.settings import Settings
from kvconform.contract.loader import explained, load_spec
from kvconform.errors import UsageError
from kvconform.explore.campaign import Campaign, Corpus, Found, explore, first, reduce
from kvconform.explore.outcome import judgeable, never
from kvconform.explore.pool import Pool
from kvconform.explore.races import races
from kvconform.explore.workload import Workload
from kvconform.report.causes import run_of
from kvconform.report.layout import make_console, paragraph
from kvconform.words import many

SITUATIONS = (
    "hit",
    "load",
    "preemption",
    "rejected draft",
    "abort",
    "abort in flight",
    "abort during a load",
    "blocks held",
    "id taken again",
)
"""Situations whose share is printed, by their names in `outcome.reached`."""

LIMIT = 12
"""Number of failures to shrink."""
PAUSE = 15.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Profile:
    """Kind and default number of a campaign's workloads.

    `systematic`: races instead of draws. `daily`: another seed each day. `guided`: mutations of the
    corpus in between. `small`: small workloads.
    """

    examples: int
    text: str
    systematic: bool = False
    daily: bool = False
    guided: bool = False
    small: bool = False


PROFILES = {
    "gate": Profile(200, "seconds; the same workloads every time"),
    "small": Profile(2_000, "small ones, many a second; the same every time", small=True),
    "nightly": Profile(5_000, "other workloads every day", daily=True, guided=True),
    "hunt": Profile(
        1_000_000, "until --minutes are over; goes on where the corpus ends", guided=True
    ),
    "races": Profile(
        4_000,
        "aborts at every point of saves and loads in flight, in seven situations",
        systematic=True,
    ),
}


def run(
    settings: Settings,
    *,
    profile: str,
    examples: int | None,
    minutes: float | None,
    out: Path,
    tries: int = 400,
    folder: Path | None = None,
) -> int:
    """Run a campaign, shrink its failures and print the result; return the exit code.

    0: no failure, or only risks; 1: failures; 3: the harness failed. `folder`: of the corpus, which
    is extended.
    """
    if profile not in PROFILES:
        raise UsageError(
            f"there is no profile {profile!r} of explore; there are {', '.join(PROFILES)}"
        )
    if settings.engine == "live":
        raise UsageError(
            "explore runs the engines reference and vllm;"
            " for random workloads on the complete vLLM: kvconform run --engine live --seeds 20"
        )
    chosen = PROFILES[profile]
    if chosen.examples >= 1_000_000 and minutes is None and examples is None:
        raise UsageError(
            f"profile {profile} ends after --minutes N or --examples N: give one of them"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # of every worker
    console = make_console()
    vllm, warnings = check_vllm()
    warnings += lacking(settings.catalogue)
    check_connector_name(settings.connector, settings.pythonpath)
    check_connector_exists(settings.connector, settings.pythonpath)
    for warning in warnings:
        console.print(f"warning: {warning}")
    seed = settings.seed + (int(time.time()) // 86_400 if chosen.daily else 0)
    count = chosen.examples if examples is None else examples
    console.print(
        f"kvconform explore  {settings.connector}  vLLM {vllm}"
        f" · profile {profile}: {chosen.text} · seed {seed}"
    )
    for option, place in (("--out", out), ("--corpus", folder)):
        _writable(option, place)
    corpus = Corpus(folder)
    if corpus.pairs:
        console.print(
            f"corpus       {len(corpus.seeds)} workloads, {len(corpus.pairs)} pairs reached,"
            f" {corpus.drawn} drawn before"
        )
    workloads = first(_workloads(settings, chosen, seed, count, corpus), count)
    with _scratch() as scratch, Pool(settings, scratch, settings.workers) as pool:
        progress = _Progress(console, count).print
        campaign = explore(pool, workloads, minutes=minutes, progress=progress, corpus=corpus)
        corpus.save()
        if campaign.found:
            console.print(
                f"shrinking {min(len(campaign.found), LIMIT)} of {len(campaign.found)} failures ..."
            )
            again = shlex.join([*run_of(settings), *settings.arguments])
            reduce(pool, campaign, out, again, tries=tries, limit=LIMIT)
        deaths = pool.deaths
    _print(console, campaign, deaths)
    if any(not found.failure.risk for found in campaign.found.values()):
        return 1
    return 3 if campaign.errors or not campaign.runs else 0


def _writable(option: str, folder: Path | None) -> None:
    """Check that the folder can be made and written to, before the first workload. UsageError."""
    if folder is None:
        return
    existing = (each for each in (folder, *folder.absolute().parents) if each.exists())
    there = next(existing, None)
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK)):
        why = "may not be written to" if there.is_dir() else "is not a directory"
        raise UsageError(f"{option} {folder}: {there} {why}; name another folder")


def _workloads(
    settings: Settings, chosen: Profile, seed: int, count: int, corpus: Corpus
) -> Iterator[Workload]:
    engines = [engine for engine in settings.engines if engine != "live"]
    if chosen.systematic:
        return races(engines, settings.schedulings, settings.slows, seed)
    from kvconform.explore.draw import drawn

    fresh = drawn(
        engines,
        settings.schedulings,
        settings.slows,
        first_seed=seed,
        count=count + corpus.drawn,
        simple=chosen.small,
    )
    if not chosen.guided:
        return fresh
    return itertools.chain(corpus.seeds[:], corpus.guided(fresh, engines, settings.schedulings))


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    memory = "/dev/shm"  # stores are many small files
    folder = Path(
        tempfile.mkdtemp(
            prefix="kvconform-explore-", dir=memory if os.access(memory, os.W_OK) else None
        )
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Progress:
    """Prints a line of progress every PAUSE seconds."""

    def __init__(self, console: Console, count: int) -> None:
        self.console, self.count = console, count
        self._printed = time.monotonic()
        self._new = 0

    def print(self, campaign: Campaign) -> None:
        if time.monotonic() - self._printed > PAUSE:
            self._printed = time.monotonic()
            speed = campaign.runs / campaign.seconds
            fresh, self._new = campaign.new - self._new, campaign.new
            news = f"{fresh * 60 / PAUSE:.0f} new pairs per minute"
            self.console.print(
                f"{campaign.runs}/{self.count} workloads, {speed:.0f} per second, {news},"
                f" {many(len(campaign.found), 'failure')}"
            )


def _failure(console: Console, found: Found) -> None:
    """Print a failure with all that was found, and the case that shows it."""
    failure = found.failure
    risk = "risk: " if failure.risk else ""
    console.print()
    title = f"{failure.requirement}  {risk}in {many(found.count, 'workload')}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    paragraph(console, "found", failure.message)
    if not found.path:
        paragraph(console, "case", "not shrunk")
        return
    requests, steps, *_ = found.workload.size
    paragraph(console, "case", f"{found.path}")
    paragraph(console, "", f"{many(requests, 'request')}, {many(steps, 'step')}")


def _print(console: Console, campaign: Campaign, deaths: int) -> None:
    ran = max(1, campaign.runs - campaign.unsupported)
    shares = ", ".join(f"{name} {100 * campaign.reached[name] // ran}%" for name in SITUATIONS)
    console.print(f"\nreached      {shares}")
    asked = judgeable(load_spec().requirements.values(), campaign.capabilities)
    unseen = never(asked, campaign.corpus.pairs)
    console.print(
        f"coverage     {len(campaign.corpus.pairs)} pairs, {campaign.new} of them new;"
        f" {len(campaign.corpus.seeds)} workloads in the corpus"
    )
    if unseen:
        text = f"{len(unseen)} of {many(len(asked), 'requirement')} were never exercised: "
        paragraph(console, "gaps", text + ", ".join(unseen))
    known = explained(load_spec())
    for name, count in campaign.guarantees.most_common():
        why = "NOT KNOWN: a fault of the engine or of this suite"
        if name in known:
            why = f"known: {known[name].id}, docs/engine-findings.md"
        if unlike := campaign.unmarked[name]:
            why = f"{unlike} of them NOT KNOWN: without the mark of {known[name].id}"
        console.print(
            f"vLLM         guarantee {name} was broken in {many(count, 'workload')} ({why});"
            " not the connector's fault"
        )
    if deaths:
        console.print(f"processes    {deaths} ended and were replaced")
    for workload, error in campaign.errors[:5]:
        console.print(f"harness      {workload.data['id']}: {error}")
    if campaign.found:
        for found in sorted(campaign.found.values(), key=lambda each: -each.count):
            _failure(console, found)
    risks = sum(found.failure.risk for found in campaign.found.values())
    failures = len(campaign.found) - risks
    verdict = many(failures, "failure") if failures else "nothing failed"
    if risks:
        verdict += f", {many(risks, 'risk')} (situations that vLLM does not bring about)"
    if campaign.errors:
        verdict += f", {many(len(campaign.errors), 'error')} of the harness"
    speed = campaign.runs / max(campaign.seconds, 1e-9)
    console.print(
        f"\n{many(campaign.runs, 'workload')} in {campaign.seconds:.0f} s ({speed:.0f} per second):"
        f" {verdict}"
    )
