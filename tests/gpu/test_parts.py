# SPDX-License-Identifier: Apache-2.0
"""Tests of the parts of `kvconform gpu`: their commands, and how their results are read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_rig import BARE, MACHINE
from kvconform.contract.loader import load_spec
from kvconform.gpu import page, parts, steps, streams
from kvconform.gpu.parts import (
    ON_DEVICE,
    PACKAGE,
    PARTS,
    Part,
    Setting,
    Stage,
    kernel_tests_of,
    pytest_of,
)
from kvconform.gpu.result import Outcome, Result
from kvconform.gpu.streams import Made
from places import TESTS


def named(name: str) -> Part:
    return next(part for part in PARTS if part.id == name)


def test_on_a_bare_machine_each_part_that_cannot_run_says_why(tmp_path: Path) -> None:
    setting = Setting(BARE, tmp_path)
    lacking = {part.id: part.lacks(setting) for part in PARTS}
    assert [name for name, why in lacking.items() if why is None] == ["kernel-bench"]
    assert "without its tests" in str(lacking["kernel-tests"])
    assert lacking["gate-vllm"] == "vLLM is not installed"
    assert lacking["racecheck-cases"] == "compute-sanitizer is not on the path"


def test_on_a_machine_with_everything_each_part_has_a_command(tmp_path: Path) -> None:
    setting = Setting(MACHINE, tmp_path, tests=TESTS, sanitizer="/bin/compute-sanitizer")
    for part in PARTS:
        assert part.lacks(setting) is None
        assert all(part.commands(setting))
    said = {part.id: " ".join(part.commands(setting)[0]) for part in PARTS}
    assert (
        "--device cuda" in said["gate-reference"] and "--engine reference" in said["gate-reference"]
    )
    assert said["memcheck-cases"].startswith("/bin/compute-sanitizer --tool memcheck")
    assert "kvconform.gpu.streams" in said["memcheck-cases"]
    assert ON_DEVICE in said["racecheck-kernels"]
    assert [part.id for part in PARTS if part.stage == Stage.STREAMS] == [
        "stream-defects",
        "stream-cases",
    ]
    first, second = named("stream-cases").commands(setting)
    assert "cuda" in first and "emulated" in second


def test_without_a_gpu_the_same_parts_use_the_emulated_device(tmp_path: Path) -> None:
    setting = Setting(MACHINE, tmp_path, emulated=True, tests=TESTS)
    for part in PARTS:
        if part.lacks(setting) is None:
            assert "cuda" not in part.commands(setting)[0]
    assert "--emulate-cuda" in named("goldens").commands(setting)[0]
    assert named("kernel-tests").environment(setting) == {"TRITON_INTERPRET": "1"}


def test_the_tests_of_a_checkout_and_of_a_pack_are_found(tmp_path: Path) -> None:
    assert kernel_tests_of(PACKAGE) == TESTS
    assert kernel_tests_of(tmp_path / "kvconform") is None
    (tmp_path / "kvconform_tests" / "kernels").mkdir(parents=True)
    assert kernel_tests_of(tmp_path / "kvconform") == tmp_path / "kvconform_tests"


def test_the_kernels_tests_run_from_any_folder(tmp_path: Path) -> None:
    setting = Setting(MACHINE, tmp_path, tests=TESTS)
    [command] = named("kernel-tests").commands(setting)
    folder = str(TESTS / "kernels")
    file = f"{folder}/test_arguments.py"
    one = [file if word == folder else word for word in command]
    one += ["-k", "test_content_may_be_unsigned"]
    subprocess.run(one, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    reading = named("kernel-tests").read(setting)
    assert reading.figures["tests"] == 1 and reading.problem == ""


def test_the_sanitizer_repeats_the_compiled_tests_of_alignment(tmp_path: Path) -> None:
    setting = Setting(MACHINE, tmp_path, tests=TESTS)
    listed = pytest_of("memcheck-kernels", setting, "-k", ON_DEVICE, "--collect-only")
    said = subprocess.run(listed, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True)
    names = [line for line in said.stdout.splitlines() if "::" in line]
    assert any("test_alignment" in name for name in names)
    assert all("cuda" in name for name in names)
    assert not [name for name in names if "cuda-torch" in name]


def test_failed_tests_are_named(tmp_path: Path) -> None:
    (tmp_path / "kernel-tests.xml").write_text(
        '<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0">'
        '<testcase name="a"/><testcase name="b[1]"><failure/></testcase></testsuite></testsuites>',
        encoding="utf-8",
    )
    reading = named("kernel-tests").read(Setting(MACHINE, tmp_path))
    assert reading.problem == "b[1]" and reading.figures["failures"] == 1


def test_tests_that_were_all_skipped_do_not_pass(tmp_path: Path) -> None:
    (tmp_path / "memcheck-kernels.xml").write_text(
        '<testsuites><testsuite tests="2" failures="0" errors="0" skipped="2"/></testsuites>',
        encoding="utf-8",
    )
    reading = named("memcheck-kernels").read(Setting(MACHINE, tmp_path))
    assert reading.problem == "all tests were skipped"


def test_a_statement_is_read(tmp_path: Path) -> None:
    (tmp_path / "gate-vllm").mkdir()
    said = {"verdict": "nonconformant", "passed": 3, "core": 9, "profile": "core"}
    failed = [f"load.a{number}" for number in range(7)]
    (tmp_path / "gate-vllm" / "statement.json").write_text(json.dumps({**said, "failed": failed}))
    reading = named("gate-vllm").read(Setting(MACHINE, tmp_path))
    assert reading.figures == said and reading.problem.endswith("load.a4; and 2 others")


def test_nothing_is_read_of_what_has_not_begun(tmp_path: Path) -> None:
    for part in PARTS:
        reading = part.read(Setting(MACHINE, tmp_path))
        assert reading.figures == {} and reading.problem == ""


def test_comparing_may_take_a_tenth_of_a_step(tmp_path: Path) -> None:
    setting = Setting(MACHINE, tmp_path)
    cpu, device = (parts.step_file(setting, name) for name in ("cpu", "cuda"))
    cpu.write_text('{"steps": 48, "share": 0.2}', encoding="utf-8")
    device.write_text('{"steps": 48, "share": 0.05}', encoding="utf-8")
    reading = parts.read_steps(setting)
    assert reading.figures["share cpu"] == 0.2 and reading.figures["share device"] == 0.05
    assert reading.problem == ""
    device.write_text('{"steps": 48, "share": 0.1}', encoding="utf-8")
    assert parts.read_steps(setting).problem == ("comparing takes 10% of a step, and may take 10%")


def test_the_time_of_a_step_is_taken_on_the_cpu_and_on_a_device() -> None:
    for device in ("cpu", "emulated"):
        found = steps.measure(device, "streams.save-then-load")  # type: ignore[arg-type]
        assert found["steps"] > 0 and 0 < found["compare_ms"] < found["step_ms"]


def test_a_planted_defect_is_found_missed_or_unobservable() -> None:
    wanted = ["streams.x", "load.content"]
    ran = [
        Made("r1", "found", {"streams.x": "UNOBSERVABLE", "load.content": "FAIL"}),
        Made("r2", "missed", {"streams.x": "UNOBSERVABLE", "load.content": "PASS"}),
        Made("r3", "blind", {"streams.x": "UNOBSERVABLE", "load.content": "UNOBSERVABLE"}),
        Made("r4", "other", {"streams.x": "UNOBSERVABLE", "load.content": "PASS", "y": "FAIL"}),
    ]
    names = ("found", "missed", "blind", "other")
    assert [streams.outcome(name, wanted, ran).status for name in names] == [
        "found",
        "missed",
        "unobservable",
        "found otherwise",
    ]


def test_differences_between_two_devices_are_listed() -> None:
    real = [Made("r1", "", {"a": "PASS", "b": "UNOBSERVABLE", "c": "FAIL"}), Made("r2", "", {})]
    emulated = [Made("r1", "", {"a": "PASS", "b": "PASS", "c": "PASS"}), Made("r3", "", {})]
    assert streams.differences(real, emulated) == [
        "c in r1: FAIL, PASS",
        "r2 was made on one device only",
        "r3 was made on one device only",
    ]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text('{"run": "r1", "defect": "", "verdicts": {}}\n{"run": "r2"', encoding="utf-8")
    assert [made.run for made in streams.read(file)] == ["r1"]


def test_all_planted_defects_of_the_device_are_run() -> None:
    spec = load_spec()
    names = {subject.defect for subject in streams.subjects(spec, True)}
    assert names == set(streams.defects(spec)) and "saves-before-compute" in names
    [correct] = streams.subjects(spec, False)
    assert correct.cases == [case for case in spec.cases if case.startswith("streams.")]


def test_the_correct_connector_and_a_defect_on_the_emulated_device(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    spec = load_spec()
    wanted = {"": False, "saves-before-compute": True}
    made: list[Made] = []
    for name, planted in wanted.items():
        [subject] = [each for each in streams.subjects(spec, planted) if each.defect == name]
        runs = streams.runs(subject, spec, "emulated", tmp_path)
        made += [next(runs)]
    correct, defect = made
    assert streams.failures([correct]) == [] and correct.verdicts["save.confirmed"] == "PASS"
    found = streams.outcome("saves-before-compute", ["streams.save-after-write"], [defect])
    assert found.status == "found"


def test_the_page_has_all_tables_and_a_section_without_a_result_says_so() -> None:
    row = {"kernel": "write", "by": "triton", "layout": "LBHNC", "dtype": "bfloat16", "tokens": 16}
    figures = {"rows": [{**row, "gbps": 1.5, "ratio": 0.9, "launches": None}]}
    defects = {"defects": [{"defect": "unfenced", "status": "found", "by": ["save.owned"]}]}
    result = Result(
        machine=MACHINE,
        parts=[
            Outcome(part="a", title="A", status="done", date="2026-01-01", figures=figures),
            Outcome(part="b", title="B", status="failed", reason="x | y", figures=defects),
            Outcome(part="c", title="C", figures={"differences": ["z in r"]}),
        ],
    )
    text = page.page(result)
    assert "| `write` | triton | LBHNC | bfloat16 | 16 | 1.5 | 0.9 |  |" in text
    assert "| `unfenced` | found | `save.owned` |" in text and "- z in r" in text
    assert "| C | NOT MEASURED |" in text and r"x \| y" in text
    assert page.section(result) in text
    nothing = page.section(None)
    assert nothing.startswith("**NOT MEASURED**")
    assert nothing.count("| NOT MEASURED |") == len(PARTS)


def test_the_module_is_the_command() -> None:
    asked = [sys.executable, "-m", "kvconform.gpu", "--help"]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert "--minutes" in said and "--afresh" in said
