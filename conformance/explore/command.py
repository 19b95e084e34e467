# SPDX-License-Identifier: Apache-2.0
"""Profiles and output of `kvconform explore`; its exit codes are those of `kvconform run`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kvconform.compat.installed import check_vllm
from kvconform.config.catalogue import check_servers, lacking
from kvconform.config.exists import check_connector_exists, check_connector_name, check_router
from kvconform.config.mentioned import unmentioned
from kvconform.config.settings import Settings
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.execute.choice import LOCAL, Choice
from kvconform.explore import result
from kvconform.explore.campaign import Campaign, Found, explore, first, reduce
from kvconform.explore.corpus import APART, Corpus
from kvconform.explore.keep import keep
from kvconform.explore.places import database
from kvconform.explore.pool import Pool
from kvconform.explore.races import races
from kvconform.explore.workload import Workload
from kvconform.files import check_writable, scratch_root
from kvconform.process.scratch import temporary
from kvconform.report.causes import run_of
from kvconform.report.layout import is_watched, make_console, paragraph
from kvconform.session.gateways import environment_of, reseeded_server, unfit
from kvconform.words import many

LIMIT = 12
"""Number of failures to shrink."""
REFRESH = 0.2
"""Seconds between two changes of the bar on a terminal."""
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
    "gate": Profile(200, "200 workloads, the same every time"),
    "small": Profile(2_000, "small ones, many a second; the same every time", small=True),
    "nightly": Profile(5_000, "other workloads every day", daily=True, guided=True),
    "hunt": Profile(
        1_000_000,
        "until --minutes or --seconds are over; goes on where the corpus ends",
        guided=True,
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
    seconds: float | None,
    out: Path,
    tries: int = 400,
    places: Sequence[str] = (),
    verbose: bool = False,
    where: Choice = LOCAL,
) -> int:
    """Run a campaign, shrink its failures and print the result; return the exit code.

    0: no failure, or only risks; 1: failures, or nothing was judged; 3: the harness failed.
    `seconds` bounds all of it. `places`: of the corpus, which is extended. `verbose`: name all
    requirements that were never exercised. `where`: the executor of the workloads.

    EnvironmentProblem after SIGINT or SIGTERM, when what was found until then has been printed.
    """
    end = None if seconds is None else time.monotonic() + seconds
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
    if chosen.examples >= 1_000_000 and seconds is None and examples is None:
        raise UsageError(
            f"profile {profile} ends after --minutes N, --seconds N or --examples N:"
            " give one of them"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # of every worker
    console = make_console()
    vllm, warnings = check_vllm()
    warnings += lacking(settings.catalogue)
    check_servers(settings.servers)
    check_connector_name(settings.connector, settings.pythonpath)
    check_connector_exists(
        settings.connector, settings.pythonpath, stand_ins=bool(settings.adapters)
    )
    check_router(settings.router, settings.pythonpath)
    warnings += unmentioned(settings.connector, settings.all_options, settings.pythonpath)
    check_writable("--out", out)
    corpus = Corpus(database(places) if places else None, settings.catalogue or settings.connector)
    corpus.begin()
    for warning in warnings:
        paragraph(console, "warning", warning)
    seed = settings.seed + (int(time.time()) // 86_400 if chosen.daily else 0)
    console.print(
        f"kvconform explore  {settings.connector}  vLLM {vllm}"
        f" · profile {profile}: {chosen.text} · seed {seed}"
    )
    if corpus.campaign:
        console.print(
            f"corpus       {len(corpus.seeds)} workloads, {len(corpus.pairs)} pairs reached,"
            f" {many(corpus.failing, 'failure')}; this is campaign {corpus.campaign + 1}"
        )
    if corpus.unreadable:
        paragraph(console, "warning", f"an entry of the corpus is left out: {corpus.unreadable}")
    replayed = corpus.failing + len(corpus.seeds) if chosen.guided else 0
    count = chosen.examples + replayed if examples is None else examples
    workloads = first(_workloads(settings, chosen, seed, count, corpus), count)
    again = shlex.join([*run_of(settings), *settings.arguments])

    def written(found: Found) -> None:
        keep(found, out, again)
        if found.failure.requirement not in campaign.unknown:
            corpus.fail(found.failure, found.workload, shrunk=found.shrunk)

    campaign = Campaign(corpus=corpus)
    interrupted = False
    with temporary("explore", scratch_root()) as scratch, _ends_by_signal():
        given = settings.workers if "workers" in settings.model_fields_set else None
        workers = where.workers(given, settings.workers)
        pool = Pool(settings, scratch, workers, end, where, guided=chosen.guided)
        try:
            with _other_hash_seed(settings, scratch / "reseeded.log"), pool:
                _campaign(pool, console, campaign, workloads, written, count=count, tries=tries)
        except KeyboardInterrupt:
            interrupted = True
    result.show(console, campaign, pool.deaths, verbose=verbose)
    if pool.over and not campaign.runs:
        console.print(
            "the time was over before the first workload was; importing vLLM is part of it:"
            " give more --seconds"
        )
    if seconds is not None and examples is None and campaign.runs == count and not pool.over:
        more = "" if profile == "hunt" else "; --profile hunt goes on until the time is over"
        console.print(f"profile {profile} ended before the time did{more}")
    if interrupted:
        raise EnvironmentProblem("interrupted")
    if any(not found.failure.risk for found in campaign.found.values()):
        return 1
    if campaign.errors:
        return 3
    return 0 if campaign.judged else 1


@contextlib.contextmanager
def _other_hash_seed(settings: Settings, log: Path) -> Iterator[None]:
    """Have runs with another hash seed forked; where that is unsafe, each is an interpreter.

    What the imports say goes to `log`.
    """
    if unfit(settings) is not None:
        yield
        return
    with log.open("wb") as output, reseeded_server(environment_of(settings), output, late=True):
        yield


def _campaign(
    pool: Pool,
    console: Console,
    campaign: Campaign,
    workloads: Iterator[Workload],
    written: Callable[[Found], None],
    *,
    count: int,
    tries: int,
) -> None:
    """Run and shrink. `written` writes a failure's case. `count`: of workloads, for progress."""

    def found(new: Found) -> None:
        written(new)
        result.announce(console, new)

    left = None if pool.end is None else pool.end - time.monotonic()
    try:
        with _Progress(console, count) as progress:
            explore(
                pool,
                workloads,
                campaign,
                seconds=left,
                found=found,
                unknown=written,
                progress=progress.print,
            )
    finally:
        campaign.corpus.end()
    total = len(campaign.found) + len(campaign.unknown)
    if total and tries and not pool.over:
        some = min(len(campaign.found), LIMIT) + len(campaign.unknown)
        console.print(f"shrinking {some} of {many(total, 'failure')} ...")
        reduce(pool, campaign, written, tries=tries, limit=LIMIT)
        campaign.corpus.end()


@contextlib.contextmanager
def _ends_by_signal() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C within the block."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
        first_seed=seed + APART * corpus.campaign * chosen.guided,
        count=count,
        simple=chosen.small,
    )
    if not chosen.guided:
        return fresh
    return corpus.guided(fresh, engines, settings.schedulings)


class _Progress:
    """Shows how far a campaign is: a bar on a terminal, elsewhere a line every PAUSE seconds.

    A context manager. `count`: of workloads, which may be more than the time is enough for.
    """

    def __init__(self, console: Console, count: int) -> None:
        self.console, self.count = console, count
        self._printed = self._shown = time.monotonic()
        self._new = 0
        # A thread that refreshed the bar would count as the connector's where workloads run here.
        self._bar = Bar(
            BarColumn(16),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not is_watched(console),
        )
        self._task = self._bar.add_task("exploring", total=count, now="importing vLLM")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def print(self, campaign: Campaign) -> None:
        """Show what has been run until now."""
        text = f"{campaign.runs}/{self.count} workloads, {result.pace(campaign)}"
        failures = many(len(campaign.found), "failure")
        self._bar.update(self._task, completed=campaign.runs, now=f"{text}, {failures}")
        if time.monotonic() - self._shown > REFRESH:
            self._shown = time.monotonic()
            self._bar.refresh()
        if time.monotonic() - self._printed > PAUSE and self._bar.disable:
            self._printed = time.monotonic()
            fresh, self._new = campaign.new - self._new, campaign.new
            pace = f"{fresh * 60 / PAUSE:.0f} new pairs per minute"
            self.console.print(f"{text}, {pace}, {failures}")
