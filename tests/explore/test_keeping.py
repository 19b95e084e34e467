# SPDX-License-Identifier: Apache-2.0
"""Tests of what a campaign leaves: failures as cases at once, and its result within its time."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from kvconform.cli import main
from kvconform.config.settings import load
from kvconform.contract.loader import load_spec
from kvconform.explore import command, result
from kvconform.explore.campaign import Campaign, Found, explore, reduce
from kvconform.explore.draw import drawn
from kvconform.explore.keep import keep
from kvconform.explore.outcome import Failure, Outcome
from kvconform.explore.pool import Pool
from kvconform.explore.workload import Workload

AGAIN = "kvconform run x:Y"
MESSAGE = " ".join(f"word{number}" for number in range(60)) + " last.word [`e.end <= 4` is false]"


class FakePool:
    """Answers every workload with `answer`, without processes; over after `runs` of them."""

    end: float | None = None
    deaths = 0

    def __init__(self, answer: Callable[[Workload], Outcome], runs: int = 10**6) -> None:
        self.answer = answer
        self.left = runs

    @property
    def over(self) -> bool:
        return self.left <= 0

    def outcomes(
        self, workloads: Iterable[Workload], requirements: list[str] | None = None
    ) -> Iterator[tuple[Workload, Outcome]]:
        for workload in workloads:
            if self.over:
                return
            self.left -= 1
            yield workload, self.answer(workload)


def fails(workload: Workload) -> Outcome:
    return Outcome(failures=[Failure("save.confirmed", MESSAGE, step=1)])


def some(count: int) -> list[Workload]:
    return list(drawn(["reference"], ["sync"], None, first_seed=1, count=count))


def campaign_of(
    pool: FakePool,
    workloads: list[Workload],
    found: Callable[[Found], None],
    unknown: Callable[[Found], None] = lambda _: None,
) -> Any:
    campaign = Campaign()
    explore(
        cast(Pool, pool),
        workloads,
        campaign,
        seconds=pool.end,
        found=found,
        unknown=unknown,
        progress=lambda _: None,
    )
    return campaign


def printed(campaign: Campaign, *, verbose: bool = False, width: int = 80) -> str:
    out = io.StringIO()
    result.show(Console(file=out, width=width, highlight=False), campaign, 0, verbose=verbose)
    return out.getvalue()


def test_a_failure_is_a_case_before_the_next_workload_runs(tmp_path: Path) -> None:
    written: list[int] = []

    def answer(workload: Workload) -> Outcome:
        written.append(len(list(tmp_path.glob("*.yaml"))))
        return fails(workload)

    campaign_of(FakePool(answer), some(3), lambda found: keep(found, tmp_path, AGAIN))
    assert written == [0, 1, 1]
    [path] = tmp_path.iterdir()
    spec = load_spec(cases=[str(path)])
    assert spec.own_cases == ["found.save-confirmed"]
    text = path.read_text(encoding="utf-8")
    assert f"{AGAIN} --case {path} --seed" in text and "not shrunk to the end" in text


def test_a_broken_guarantee_that_nothing_explains_is_shrunk_to_a_case(tmp_path: Path) -> None:
    def answer(workload: Workload) -> Outcome:
        unknown = [Failure("engine.real-is-known", MESSAGE, step=1)]
        return Outcome(broken_guarantees=["engine.real-is-known"], unknown=unknown)

    def failed(found: Found) -> None:
        pytest.fail("it is no failure")

    written: list[str] = []
    campaign = campaign_of(
        FakePool(answer), some(3), failed, lambda new: written.append(new.failure.requirement)
    )
    assert written == ["engine.real-is-known"]
    assert campaign.unknown["engine.real-is-known"].count == 3 and not campaign.found
    reduce(
        cast(Pool, FakePool(answer)),
        campaign,
        lambda found: keep(found, tmp_path, AGAIN),
        tries=9,
        limit=0,
    )
    [path] = tmp_path.iterdir()
    text = " ".join(printed(campaign, width=200).split())
    assert "broken in 3 workloads (3 of them NOT KNOWN" in text and str(path) in text


def test_a_failure_is_printed_when_it_is_found(tmp_path: Path) -> None:
    out = io.StringIO()
    found = Found(Failure("save.confirmed", MESSAGE), some(1)[0], path=tmp_path / "a.yaml")
    result.announce(Console(file=out, width=80, highlight=False), found)
    assert f"save.confirmed: {MESSAGE} (not shrunk yet:" in " ".join(out.getvalue().split())


def test_an_interrupt_while_shrinking_leaves_the_smallest_case_so_far(tmp_path: Path) -> None:
    sizes: list[tuple[int, ...]] = []

    def answer(workload: Workload) -> Outcome:
        if len(sizes) == 3:
            raise KeyboardInterrupt
        sizes.append(workload.size)
        return fails(workload)

    pool = FakePool(answer)
    campaign = campaign_of(pool, some(1), lambda found: keep(found, tmp_path, AGAIN))
    with pytest.raises(KeyboardInterrupt):
        reduce(
            cast(Pool, pool),
            campaign,
            lambda found: keep(found, tmp_path, AGAIN),
            tries=50,
            limit=1,
        )
    [path] = tmp_path.iterdir()
    case = load_spec(cases=[str(path)]).cases["found.save-confirmed"]
    assert sizes[2] < sizes[1] < sizes[0] and len(case.steps) == sizes[2][1]
    assert "1 not shrunk to the end" in printed(campaign)


def test_time_that_is_over_ends_shrinking_and_is_said(tmp_path: Path) -> None:
    pool = FakePool(fails, runs=3)
    campaign = campaign_of(pool, some(1), lambda found: keep(found, tmp_path, AGAIN))
    reduce(
        cast(Pool, pool), campaign, lambda found: keep(found, tmp_path, AGAIN), tries=50, limit=1
    )
    [found] = campaign.found.values()
    assert pool.left == 0 and not found.shrunk
    assert "1 failure, 1 not shrunk to the end" in printed(campaign)
    rest = FakePool(fails)
    reduce(
        cast(Pool, rest), campaign, lambda found: keep(found, tmp_path, AGAIN), tries=50, limit=1
    )
    assert found.shrunk and "not shrunk" not in printed(campaign)
    assert "and shrunk" in next(tmp_path.iterdir()).read_text(encoding="utf-8")


def test_a_part_of_the_time_is_left_for_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    counts = {}
    for name, answer in {"fails": fails, "passes": lambda _: Outcome()}.items():
        pool = FakePool(answer)
        pool.end = 100.0
        counts[name] = campaign_of(pool, some(80), lambda _: None).runs
    assert 30 < counts["fails"] < counts["passes"] <= 50  # two readings of the clock for each


def test_a_pool_whose_time_is_over_starts_nothing(tmp_path: Path) -> None:
    with Pool(load({"workers": 1}), tmp_path, 1, end=time.monotonic()) as pool:
        assert pool.over and list(pool.outcomes(some(2))) == []


def test_nothing_judged_is_not_nothing_failed() -> None:
    assert "0 workloads: nothing was judged" in printed(Campaign())
    lacking = campaign_of(FakePool(lambda _: Outcome(unsupported=True)), some(2), lambda _: None)
    said = printed(lacking)
    assert "nothing was judged" in said and "nothing failed" not in said
    assert "2 need what the connector does not declare" in " ".join(said.split())
    passed = campaign_of(FakePool(lambda _: Outcome()), some(2), lambda _: None)
    assert "nothing failed" in printed(passed)


def test_a_campaign_without_time_judges_nothing_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["explore", "--seconds", "0.001", "-n", "1"])
    assert done.value.code == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "0 workloads: nothing was judged" in said and "give more --seconds" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [40, 80])
def test_no_diagnosis_is_cut_and_no_id_is_broken(width: int, tmp_path: Path) -> None:
    guarantee = "engine.a-guarantee-with-a-very-long-name-of-many-parts-that-does-not-fit"
    campaign = campaign_of(FakePool(fails), some(2), lambda found: keep(found, tmp_path, AGAIN))
    campaign.guarantees[guarantee] += 1
    campaign.errors.append((some(1)[0], "KeyError: [bold] is text"))
    text = printed(campaign, width=width)
    assert MESSAGE in " ".join(text.split())
    assert guarantee in text and "[bold] is text" in " ".join(text.split())
    verbose = printed(campaign, verbose=True, width=width)
    gaps = next(lines for lines in verbose.split("\n\n") if "never exercised" in lines)
    named = set(gaps.replace(",", " ").split()) & set(load_spec().requirements)
    count = int(gaps.split("gaps")[1].split()[0])
    assert len(named) == count > 60


def test_gaps_are_a_short_list_by_area() -> None:
    spec = load_spec()
    unseen = [each.id for each in spec.requirements.values() if each.area in ("api", "load")]
    areas = result.gaps(list(spec.requirements.values()), unseen)
    [line] = result.gap_lines(areas, 80, verbose=False)
    assert line == f"api {len(areas['api'])}, load {len(areas['load'])}"
    narrow = result.gap_lines({f"area{n}": ["a.b"] for n in range(30)}, 20, verbose=False)
    assert all(len(each) <= 20 and each.rstrip(",").endswith(" 1") for each in narrow)


def test_a_folder_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for option in ("--out", "--corpus"):
        for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/below")):
            with pytest.raises(SystemExit) as done:
                main(["explore", option, str(place)])
            assert done.value.code == 2
            assert f"{option} {place}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_both_units_of_time_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--minutes", "1", "--seconds", "1"],
        ["--seconds", "0"],
        ["--minutes", "-1"],
    ):
        with pytest.raises(SystemExit) as done:
            main(["explore", *arguments])
        assert done.value.code == 2
        assert "kvconform: " in capsys.readouterr().err


def test_sigterm_ends_like_an_interrupt_with_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(command, "explore", interrupted)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as done:
            main(["explore", "-n", "1"])
    finally:
        signal.signal(signal.SIGTERM, before)  # that of the whole program stays
    assert done.value.code == 3
    said = capsys.readouterr()
    assert "0 workloads: nothing was judged" in said.out and "interrupted" in said.err
