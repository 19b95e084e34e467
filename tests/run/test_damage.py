# SPDX-License-Identifier: Apache-2.0
"""Tests of damage to what a connector has stored, and of connectors that have nothing to damage."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pydantic import ValidationError

from kvconform.config.settings import load
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.contract.steps import NOTHING_TO_DAMAGE, NOTHING_TO_FILL, Damage
from kvconform.contract.trace import Trace
from kvconform.errors import EnvironmentProblem
from kvconform.judge.records import CaseReport
from kvconform.observe.call import Call
from kvconform.process.damaged import DAMAGED, damage_files
from kvconform.process.servers import Servers
from kvconform.run.case import run_and_judge
from kvconform.run.damage import Damager
from stores import FOLDER

REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
CONTENT = bytes(range(200))


@pytest.mark.parametrize(
    ("how", "length"), [("removed", None), ("truncated", 100), ("longer", 264), ("garbage", 200)]
)
def test_every_file_is_replaced(how: str, length: int | None, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("one", "a/b/two"):
        (tmp_path / name).write_bytes(CONTENT)
    (tmp_path / "empty").touch()
    with (tmp_path / "one").open("rb") as file:
        assert damage_files(tmp_path, how) == (3 if how == "removed" else 2)
        assert file.read() == CONTENT, "an open file stays as it was"
    for name in ("one", "a/b/two"):
        path = tmp_path / name
        data = path.read_bytes() if path.exists() else None
        assert (None if data is None else len(data)) == length and data != CONTENT
    assert (tmp_path / "empty").exists() == (how != "removed")
    assert not list(tmp_path.rglob("*.damaged"))


def test_one_file_in_so_many_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/2", "a/1", "b", "c", "d"):
        (tmp_path / name).write_bytes(CONTENT)
    assert damage_files(tmp_path, "removed", every=2) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["1", "a", "b", "d"]


def test_damage_is_of_one_kind() -> None:
    with pytest.raises(ValidationError, match="`every` is about `files`"):
        Damage.model_validate({"servers": "stopped", "every": 2})
    for wrong in (
        {},
        {"files": "removed", "servers": "stopped"},
        {"disk": "full", "files": "longer"},
    ):
        with pytest.raises(ValidationError, match="one of `files`, `servers` and `disk`"):
            Damage.model_validate(wrong)


def judged(name: str, options: dict[str, Any], folder: Path) -> CaseReport:
    spec = load_spec()
    variant = spec.cases[f"lifecycle.damage-{name}"].variants(["reference"])[0]
    return run_and_judge(variant, Target(REFERENCE, options), spec, seed=0, tmp=folder / name)


@pytest.mark.parametrize("how", DAMAGED)
def test_a_load_from_damaged_files_is_reported_as_failed(how: str, tmp_path: Path) -> None:
    report = judged(how, {"store": "{tmp}/store"}, tmp_path)
    assert not [row for row in report.rows if row.verdict in ("FAIL", "ERROR")]
    assert not report.unmet
    kinds = [event["kind"] for event in report.trace]
    assert kinds.index("store.damaged") < kinds.index("transfer.failed")
    assert all(row.beyond == ("damage",) and not row.gating for row in report.rows)


def test_saves_that_fail_on_a_full_disk_are_no_failure_of_a_correct_connector(
    tmp_path: Path,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    report = judged("disk", {"store": "{tmp}/store"}, tmp_path)
    assert not [row for row in report.rows if row.verdict in ("FAIL", "ERROR")]
    assert not report.unmet
    assert not any(event["kind"] == "transfer.failed" for event in report.trace)
    granted = {
        event["req"]: event["external"] for event in report.trace if event["kind"] == "alloc"
    }
    # What was stored of a is loaded; of b and c nothing was.
    assert (granted["b"], granted["d"], granted["e"], granted["f"]) == (16, 16, 0, 16)
    assert all(row.beyond == ("damage",) and not row.gating for row in report.rows)
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("garbage", NOTHING_TO_DAMAGE),
        ("disk", NOTHING_TO_FILL),
        ("servers", "the connector's settings declare no [[servers]]"),
    ],
)
def test_without_anything_to_damage_nothing_is_judged(
    name: str, sentence: str, tmp_path: Path
) -> None:
    report = judged(name, {}, tmp_path)
    assert {(row.verdict, row.message) for row in report.rows} == {("UNSUPPORTED", sentence)}


def judged_with_a_server(how: str, folder: Path, command: str | None = None) -> CaseReport:
    """Judge the reference connector over a server. `command` damages its values, if it is given."""
    settings = load({}, file=str(FOLDER / "http.toml"))
    if command is not None:
        servers = [spec.model_copy(update={"damage": command}) for spec in settings.servers]
        settings = settings.model_copy(update={"servers": servers})
    with Servers(settings, folder / "servers", folder / "logs") as running:
        return judged(how, running.settle(settings).extra_config, folder)


@pytest.mark.parametrize(
    "how", ["removed", *(pytest.param(how, marks=pytest.mark.long) for how in [*DAMAGED][1:])]
)
def test_a_load_of_damaged_values_of_a_server_is_reported_as_failed(
    how: str, tmp_path: Path
) -> None:
    report = judged_with_a_server(how, tmp_path)
    assert not [row for row in report.rows if row.verdict in ("FAIL", "ERROR")]
    kinds = [event["kind"] for event in report.trace]
    assert kinds.index("store.damaged") < kinds.index("transfer.failed")


@pytest.mark.parametrize(
    ("command", "problem"),
    [("false", "failed"), ("true", "does not print how many"), ("echo done", "does not print")],
)
def test_a_command_that_does_not_damage_ends_the_run_with_a_sentence(
    command: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentProblem, match=f"cannot be damaged: `{command}` {problem}"):
        judged_with_a_server("garbage", tmp_path, command)


def test_where_no_value_was_damaged_nothing_is_judged(tmp_path: Path) -> None:
    report = judged_with_a_server("garbage", tmp_path, "echo 0")
    assert {(row.verdict, row.message) for row in report.rows} == {
        ("UNSUPPORTED", NOTHING_TO_DAMAGE)
    }


def test_damage_strikes_once_and_after_a_grant(tmp_path: Path) -> None:
    (tmp_path / "value").write_bytes(CONTENT)
    trace, listeners = Trace(), {}
    damager = Damager(tmp_path, trace)
    probe: Any = SimpleNamespace(on=lambda hook, after: listeners.update({hook: after}))
    damager.arm(Damage(files="longer"), probe)
    for granted in (0, 4, 4):
        call = Call(None, "update_state_after_alloc", "scheduler", 0, (None, None, granted), {})
        listeners[call.hook](call)
        assert len((tmp_path / "value").read_bytes()) == (264 if granted else 200)
    assert [event["count"] for event in trace.events] == [1]


def test_links_stay_and_modes_are_kept(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(CONTENT)
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / ("x" * 250)).write_bytes(CONTENT)
    (folder / ("x" * 250)).chmod(0o640)
    assert damage_files(folder, "truncated") == 1
    assert outside.read_bytes() == CONTENT and (folder / "link").is_symlink()
    assert (folder / ("x" * 250)).stat().st_mode & 0o777 == 0o640
