# SPDX-License-Identifier: Apache-2.0
"""Tests of `--shard` and `kvconform merge`.

They check what a part of a run may conclude, and that the parts make the whole. fake_runner stands
in for the engine, so vLLM is not needed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvconform.cli import main
from kvconform.config import selection
from kvconform.config.selection import cost, part, select, suite_digest
from kvconform.config.settings import Settings, Shard, parse
from program_rig import FAKE, GUARANTEE, MUST, SPEC, Result, kvconform

CASES = [v.case.id for v in select(SPEC, Settings(profile="smoke"), "0.32.0").variants]
CASES = list(dict.fromkeys(CASES))[:4]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_are_the_whole_and_even(count: int) -> None:
    whole = select(SPEC, Settings(), "0.32.0").variants
    parts = [part(whole, Shard(number, count)) for number in range(1, count + 1)]
    assert sorted(variant.id for each in parts for variant in each) == sorted(
        variant.id for variant in whole
    )
    positions = {variant.id: place for place, variant in enumerate(whole)}
    assert all(sorted(each, key=lambda variant: positions[variant.id]) == each for each in parts)
    loads = [sum(map(cost, each)) for each in parts]
    assert max(loads) <= max(1.05 * min(loads), max(map(cost, whole)))


def test_the_split_depends_on_the_selection_alone() -> None:
    whole = select(SPEC, Settings(), "0.32.0").variants
    again = part(list(reversed(whole)), Shard(2, 3))
    assert {variant.id for variant in again} == {variant.id for variant in part(whole, Shard(2, 3))}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "-1/2", ""])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ValueError, match="a shard is i/n"):
        parse(text)


def test_the_suite_is_known_by_its_content() -> None:
    assert suite_digest() == suite_digest() and len(suite_digest()) == 12


def test_a_changed_file_is_another_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    code, data = tmp_path / "code.py", tmp_path / "inner" / "data.yaml"
    code.write_text("x = 1\n")
    data.write_text("x: 1\n")
    monkeypatch.setattr(selection.importlib.resources, "files", lambda _: tmp_path)

    def changes(change: Callable[[], object]) -> bool:
        before = suite_digest()
        change()
        return suite_digest() != before

    assert changes(lambda: code.write_text("x = 2\n"))
    assert changes(lambda: data.write_text("x: 2\n"))
    assert changes(lambda: code.rename(tmp_path / "other.py"))
    assert changes(data.unlink)
    assert not changes(lambda: (tmp_path / "notes.txt").write_text("x"))
    assert not changes(lambda: (tmp_path / "other.py").write_bytes(b"x = 2\r\n"))


def verdicts(result: Result, requirement: str) -> set[str]:
    return {row["verdict"] for row in result.rows() if row["requirement"] == requirement}


def program(tmp_path: Path, folder: str, *arguments: str) -> Result:
    """`kvconform ARGUMENTS... --report-dir FOLDER` in tmp_path."""
    done = kvconform(*arguments, "--report-dir", folder, cwd=tmp_path, env=FAKE)
    return Result(done, tmp_path / folder)


def judge(
    tmp_path: Path, folder: str, *arguments: str, workers: int = 1, cases: list[str] | None = None
) -> Result:
    """A run of the cases (default: the profile `smoke`) with the settings in tmp_path."""
    chosen = ["-k", ",".join(cases)] if cases else ["--profile", "smoke"]
    return program(tmp_path, folder, "run", *chosen, "--workers", str(workers), *arguments)


def settings(
    tmp_path: Path,
    *,
    fail: dict[str, list[str]],
    expect: dict[str, str] | None = None,
    more: str = "",
) -> None:
    entries = "".join(
        f'\n[[expected-failures]]\nrequirement = "{name}"\ncase = "{case}"\nreason = "known"\n'
        for name, case in (expect or {}).items()
    )
    orders = json.dumps(fail).replace('": ', '" = ')
    (tmp_path / "kvconform.toml").write_text(
        f'connector = "json:Fake"\nextra-config = {{fail = {orders}}}\n{more}{entries}',
        encoding="utf-8",
    )


@pytest.mark.e2e
def test_the_joint_report_is_that_of_the_unsplit_run(tmp_path: Path) -> None:
    fail = {MUST[0]: [CASES[0]], MUST[1]: [CASES[1]], GUARANTEE: [CASES[2]]}
    settings(
        tmp_path,
        fail=fail,
        expect={MUST[0]: CASES[0], MUST[2]: CASES[3]},
        more=f'disable = ["{CASES[2]}"]\n',
    )
    whole = judge(tmp_path, "whole", workers=2)
    shards = [
        judge(tmp_path, f"s{number}", "--shard", f"{number}/2", workers=3 - number)
        for number in (1, 2)
    ]
    assert (
        "shard 1/2 of the selection" in shards[0].out
        and "in shard 2/2; kvconform merge gives the verdict" in shards[1].out
    )
    # it may still fail in the other one
    assert not any('"verdict": "XPASS"' in shard.report for shard in shards)
    joint = program(tmp_path, "joint", "merge", "s2", "s1")
    assert joint.report == whole.report
    assert joint.code == whole.code == 1
    assert verdicts(joint, MUST[2]) >= {"XPASS"} and verdicts(joint, MUST[0]) >= {"XFAIL"}
    for key in ("verdict", "counts", "requirements", "cases"):
        assert joint.summary[key] == whole.summary[key]
    answer = next(
        line for line in whole.out.splitlines() if line.startswith("NOT CONFORMANT")
    ).split("  in ")[0]
    assert answer in joint.out and "2 shards" in joint.out
    assert (joint.folder / "junit.xml").read_text().count("<testcase ") == (
        whole.folder / "junit.xml"
    ).read_text().count("<testcase ")


@pytest.mark.e2e
def test_what_does_not_belong_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings(tmp_path, fail={})
    # Where a file lies may differ between machines.
    same = ["--config", str(tmp_path / "kvconform.toml")]
    judge(tmp_path, "s1", "--full", "--shard", "1/2", *same, cases=CASES[:2])
    judge(tmp_path, "s2", "--full", "--shard", "2/2", cases=CASES[:2])
    judge(tmp_path, "whole", cases=CASES[:2])
    assert program(tmp_path, "joint", "merge", "s1", "s2").code == 0
    (tmp_path / "file").write_text("")
    nowhere = program(tmp_path, "file/joint", "merge", "s1", "s2")
    assert nowhere.code == 2 and "file is not a directory; name another" in nowhere.err

    def refused(*folders: str, out: str = "no") -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main(["merge", *folders, "--report-dir", out])
        said = capsys.readouterr().err
        assert done.value.code == 2 and not (tmp_path / "no").exists()
        assert len(said.splitlines()) == 1
        return said

    assert refused("s1") == "kvconform: shard 2/2 is missing\n"
    assert refused("s1", "s1", "s2") == "kvconform: shard 1/2 is there twice: s1 and s1\n"
    assert "whole is the report of a whole run, not of a shard" in refused("s1", "whole")
    assert refused("s1", "nothing").startswith("kvconform: there is no report nothing")
    assert "is the report of a shard" in refused("s1", "s2", out="s2")

    def changed(change: Any, *, last: bool = False) -> str:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        shutil.copytree(tmp_path / "s2", tmp_path / "x")
        lines = (tmp_path / "x" / "report.jsonl").read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0])
        rest = lines[1:-1] if last else lines[1:]
        change(header)
        (tmp_path / "x" / "report.jsonl").write_text(
            "\n".join([json.dumps(header), *rest]) + "\n", encoding="utf-8"
        )
        return refused("s1", "x")

    apart = "kvconform: s1 and x do not belong together: "
    assert (
        changed(lambda h: h.update(connector="json:Other"))
        == f"{apart}the connector is json:Fake in one and json:Other in the other\n"
    )
    assert changed(lambda h: h.update(vllm="0.31.0")).startswith(f"{apart}vLLM is ")
    assert (
        changed(lambda h: h.update(seed=7)) == f"{apart}the seed is 0 in one and 7 in the other\n"
    )
    assert (
        changed(lambda h: h.update(profile="smoke"))
        == f"{apart}the profile is core in one and smoke in the other\n"
    )
    assert changed(lambda h: h.update(suite="0.0.9")).startswith(f"{apart}kvconform is ")
    assert (
        changed(lambda h: h["extra"]["settings"].update(strict=True))
        == f"{apart}strict is False in one and True in the other\n"
    )
    assert changed(lambda h: h["capabilities"].update(store=False)).startswith(
        f"{apart}the capability store is True in one and False"
    )
    assert (
        changed(lambda h: h["extra"].update(shard="2/3"))
        == f"{apart}the number of shards is 2 in one and 3 in the other\n"
    )
    assert changed(lambda h: None, last=True).endswith(
        "has no end: shard 2/2 was cut short; run it again\n"
    )
    (tmp_path / "x" / "report.jsonl").write_text('{"type": "row"}\n', encoding="utf-8")
    assert "x/report.jsonl:1: not a line of a report: row.requirement" in refused("s1", "x")
    damaged = "the file is damaged\n"
    assert changed(lambda h: h["extra"].update(shard="3/2")).endswith(
        f"the header does not name its shard; {damaged}"
    )
    assert changed(lambda h: h["extra"].update(shard=2)).endswith(
        f"the header does not name its shard; {damaged}"
    )
    assert changed(lambda h: h["extra"].pop("settings")).endswith(
        f"the header does not name its shard; {damaged}"
    )

    def rows(change: Any) -> str:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        shutil.copytree(tmp_path / "s2", tmp_path / "x")
        lines = (tmp_path / "x" / "report.jsonl").read_text(encoding="utf-8").splitlines()
        parts = [json.loads(line) for line in lines]
        change(parts)
        (tmp_path / "x" / "report.jsonl").write_text(
            "".join(json.dumps(part) + "\n" for part in parts), encoding="utf-8"
        )
        return refused("s1", "x")

    def stray(parts: list[dict[str, Any]]) -> None:
        first = json.loads(
            (tmp_path / "s1" / "report.jsonl").read_text(encoding="utf-8").splitlines()[1]
        )
        parts[1].update(
            {
                name: first[name]
                for name in ("case", "engine", "scheduling", "runner", "depth", "block_size")
            }
        )

    assert "rows with verdict" in rows(lambda parts: parts.pop(1)) and "and its end counts" in rows(
        lambda parts: parts.pop(1)
    )
    assert "rows with verdict FAIL, and its end counts" in rows(
        lambda parts: parts[1].update(verdict="FAIL")
    )
    assert rows(lambda parts: parts[1].update(requirement=parts[2]["requirement"])).endswith(
        f"twice; {damaged}"
    )
    assert "x has a run that is not in shard 2/2: " in rows(stray)
    for folder in ("s1", "s2"):  # another kvconform made both
        path = tmp_path / folder / "report.jsonl"
        path.write_text(
            path.read_text(encoding="utf-8").replace(suite_digest(), "0" * 12), encoding="utf-8"
        )
    assert "merge with the same one" in refused("s1", "s2")


@pytest.mark.e2e
def test_too_many_shards_and_what_is_none(tmp_path: Path) -> None:
    settings(tmp_path, fail={})
    done = judge(tmp_path, "s", "--shard", "1/99", cases=CASES[:1])
    assert done.code == 2 and "too few for 99 shards" in done.err
    done = judge(tmp_path, "s", "--shard", "3/2", cases=CASES[:1])
    assert done.code == 2 and "a shard is i/n" in done.err
