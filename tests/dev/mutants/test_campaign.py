# SPDX-License-Identifier: Apache-2.0
"""Tests of what surrounds the judging: samples, shards, order, results, judgements, pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvconform.config.settings import Shard
from kvconform.dev.mutants import judgement, page, result, score
from kvconform.dev.mutants.campaign import Choice, chosen, left
from kvconform.dev.mutants.judgement import Judgement
from kvconform.dev.mutants.mutation import Mutation, digest
from kvconform.dev.mutants.order import Killers
from kvconform.dev.mutants.original import Original, read
from kvconform.dev.mutants.result import Result
from kvconform.dev.mutants.sites import mutations_of
from kvconform.dev.mutants.subject import Setup, Subject, path_of, settings_of, subjects
from kvconform.errors import UsageError
from places import ROOT

SOURCE = b"def f(a, b, c):\n    return a < b + 1 and b < c + 2 and f(a, b, [c])\n"
ALL = mutations_of(SOURCE, "m")


def of(mutation: Mutation, outcome: result.Outcome, **fields: object) -> Result:
    """A result of a mutation."""
    return result.of(
        mutation.site,
        subject="s",
        digest=digest(mutation.source),
        suite="x",
        outcome=outcome,
        **fields,
    )


def test_shards_are_a_partition_of_the_sample() -> None:
    sample = chosen(ALL, Choice(sample=9, seed=3))
    parts = [
        chosen(ALL, Choice(sample=9, seed=3, shard=Shard(number, 4))) for number in (1, 2, 3, 4)
    ]
    joined = [each.site for part in parts for each in part]
    assert sorted(joined) == sorted(each.site for each in sample)
    assert len(sample) == 9


def test_a_larger_sample_contains_a_smaller_one_and_a_seed_draws_others() -> None:
    def sites(sample: int, seed: int) -> list[object]:
        return [each.site for each in chosen(ALL, Choice(sample=sample, seed=seed))]

    assert sites(8, 0)[:4] == sites(4, 0)
    assert sites(4, 1) != sites(4, 0)


def test_a_later_run_continues_with_what_has_no_result_for_the_same_source() -> None:
    killed, survived, changed = of(ALL[0], "killed"), of(ALL[1], "survived"), of(ALL[2], "killed")
    changed.digest = "another"
    assert left(ALL[:4], [killed, survived, changed], again=False) == [ALL[2], ALL[3]]
    assert left(ALL[:4], [killed, survived, changed], again=True) == [ALL[1]]


def test_results_are_read_back_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "s.jsonl"
    result.append(path, of(ALL[0], "survived", diff=["-a", "+b"]))
    result.append(path, of(ALL[0], "killed", means="raise", run="r"))
    with path.open("a") as file:
        file.write('{"subject": "s", "mod')
    result.append(path, of(ALL[1], "survived"))
    found, _ = result.read(path)
    assert found == of(ALL[0], "killed", means="raise", run="r")
    result.rewrite(path, [found])
    assert result.read(path) == [found]


def test_runs_that_killed_neighbours_come_first() -> None:
    killers = Killers()
    here, module = ALL[0].site, "m"
    other = ALL[0].site.__class__(module, "g", "boundary", "x")
    far = ALL[0].site.__class__("n", "g", "boundary", "x")
    killers.add(far, "far")
    killers.add(other, "near")
    killers.add(here, "same")
    seconds = {"cheap": 1.0, "dear": 2.0, "same": 9.0, "near": 9.0, "far": 9.0}
    runs = ["dear", "far", "near", "cheap", "same"]
    assert killers.order(here, runs, seconds) == ["same", "near", "far", "cheap", "dear"]


def test_every_case_comes_once_before_one_comes_again() -> None:
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "a[3]": 3.0, "b[1]": 4.0, "b[2]": 5.0}
    found = Killers().order(ALL[0].site, sorted(seconds, reverse=True), seconds)
    assert found == ["a[1]", "b[1]", "a[2]", "b[2]", "a[3]"]


def test_only_runs_that_execute_the_line_are_repeated(tmp_path: Path) -> None:
    original = Original("key", seconds={"one": 1.0, "two": 1.0, "three": 0.1}, skipped=["three"])
    original.add_lines("one", "m", {1, 2})
    original.add_lines("two", "m", {2})
    assert original.reaching("m", (1, 1)) == {"one"}
    assert original.reaching("m", (1, 4)) == {"one", "two"}
    assert original.reaching("m", (7, 7)) == set()
    assert original.reaching("m", None) == {"one", "two"}
    original.save(tmp_path / "o.json")
    assert read(tmp_path / "o.json", "key") == original
    assert read(tmp_path / "o.json", "other") is None


def test_the_score_leaves_out_what_is_trivial_or_no_fault() -> None:
    found = score.Score()
    for means in ("requirement", "hang", "raise", "death", "start"):
        found.add(of(ALL[0], "killed", means=means), None)
    kinds: tuple[judgement.Kind, ...] = ("equivalent", "performance", "open", "recommendation")
    for kind in kinds:
        known = Judgement(module="m", operator="o", line="l", kind=kind, why="w")
        found.add(of(ALL[0], "survived"), known)
    found.add(of(ALL[0], "survived"), None)
    found.add(of(ALL[0], "undecided"), None)
    assert (found.found, found.missed, found.share) == (2, 2, 0.5)
    assert found.strict_share == 0.4
    assert found.undecided == 1


def test_a_judgement_on_what_no_longer_exists_is_obsolete() -> None:
    gone = ALL[0].site.__class__("m", "f", "boundary", "return b < a")
    sites = [each.site for each in ALL]
    assert judgement.obsolete([ALL[0].site, gone], sites) == [gone]


def test_two_judgements_on_one_mutant_are_refused(tmp_path: Path) -> None:
    entry = "- {module: m, operator: o, line: x, kind: open, why: w}\n"
    (tmp_path / "survivors").mkdir()
    (tmp_path / "survivors" / "s.yaml").write_text(entry * 2)
    with pytest.raises(ValueError, match="two entries for m:<module> .o. x"):
        judgement.read("s", tmp_path)


def test_judgements_and_pages_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert page.problems(ROOT) == []
    for path, text in page.texts(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale"


def test_a_module_without_a_judged_mutant_is_named(tmp_path: Path) -> None:
    """Results about lines that are gone do not count; nor are installed packages counted."""
    (tmp_path / "settings.toml").write_text('pythonpath = ["."]\n')
    for name in ("one_of_mine", "other_of_mine"):
        (tmp_path / f"{name}.py").write_bytes(SOURCE)
    setup = {"id": "s", "file": "settings.toml"}
    subject = Subject.model_validate(
        {
            "id": "s",
            "text": "t",
            "connector": "one_of_mine:C",
            "modules": ["one_of_mine", "other_of_mine", "pydantic.main", "not_installed"],
            "setups": [setup],
        }
    )
    site = next(iter(mutations_of(SOURCE, "one_of_mine"))).site
    results = [
        result.of(each, subject="s", digest="d", suite="x", outcome="killed")
        for each in (site, replace(site, line="return gone"), replace(site, module="pydantic.main"))
    ]
    modules = page.modules_of(subject, results, tmp_path)
    total = len(ALL)
    assert [(each.name, each.total, each.judged) for each in modules] == [
        ("one_of_mine", total, 1),
        ("other_of_mine", total, 0),
        ("pydantic.main", None, 1),
        ("not_installed", None, 0),
    ]
    chapter = page.Chapter(subject, results, {}, modules)
    assert chapter.never_judged == ["other_of_mine", "not_installed"]
    assert (chapter.judged, chapter.all_mutants) == (2, None)


def test_every_survivor_on_record_has_its_diff() -> None:
    for name in subjects():
        for each in result.read(ROOT / page.RESULTS / f"{name}.jsonl"):
            assert each.outcome != "survived" or each.diff, each.site


@pytest.mark.parametrize("name", subjects())
def test_subjects_declare_what_they_promise(name: str) -> None:
    subject = subjects()[name]
    for setup in subject.setups:
        settings = settings_of(subject, setup, ROOT)
        assert {"store", "saves", "async_load", "transfer"} <= set(settings.capabilities), setup.id


def test_a_configuration_may_have_few_cases_and_options_after_a_restart() -> None:
    setup = Setup(id="s", cases=["identity.*"], extra_config_after_restart={"codec": "int8"})
    reference = subjects()["reference"]
    found = settings_of(reference, setup, ROOT)
    assert (found.select, found.extra_config_after_restart) == (["identity.*"], {"codec": "int8"})
    assert settings_of(reference, setup, ROOT, ["groups"]).select == ["groups"]


def test_modules_are_found_without_being_imported() -> None:
    subject = subjects()["reference"]
    assert path_of("kvconform.refimpl.keys", subject, ROOT).name == "keys.py"
    with pytest.raises(UsageError, match="kvconform.refimpl.missing of subject reference"):
        path_of("kvconform.refimpl.missing", subject, ROOT)


def test_a_setup_is_data() -> None:
    setup = Setup(id="s", capabilities={"store": True})
    assert json.loads(setup.model_dump_json())["capabilities"] == {"store": True}


def test_a_capability_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown capability 'layerwise'"):
        Setup(id="s", capabilities={"layerwise": True})
