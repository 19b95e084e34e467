# SPDX-License-Identifier: Apache-2.0
"""Tests of the warm server: what it serves, what it survives, and when it ends."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import program_rig
import warm_rig
from kvconform.config.settings import Settings
from kvconform.contract.capabilities import CAPABILITIES, complete
from kvconform.errors import KvconformError
from kvconform.watch import client, imported, place
from kvconform.watch.imported import Imported
from kvconform.watch.loop import with_server
from warm_rig import RIGHT, RUN, WRONG, Project

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def warm() -> Iterator[Project]:
    with warm_rig.project() as project:
        client.start(project.settings, client.path_for(project.settings))
        yield project


@pytest.fixture
def mine(warm: Project) -> Iterator[Project]:
    """A project with a right connector, whose server must be the same one in the end."""
    warm.file.write_text(RIGHT)
    before = warm_rig.server_of(warm.settings)
    yield warm
    assert warm_rig.server_of(warm.settings) == before


def ask(project: Project, tmp_path: Path, known: client.Known | None = None) -> dict[str, Any]:
    """Return what fails in RUN; the capabilities are `known`, or found out."""
    found: list[Any] = []
    path = client.path_for(project.settings)
    options: dict[str, Any] = {"known": known, "scratch": tmp_path, "listener": found.append}
    client.run(project.settings, path, only=[RUN], **options)
    (result,) = found
    assert result["variant"] == RUN
    failed: dict[str, Any] = result["failed"]
    return failed


def test_capabilities_that_are_known_are_not_found_out(mine: Project, tmp_path: Path) -> None:
    built = mine.folder / "built"
    counts = f"""
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        with open({str(built)!r}, "a") as file:
            file.write("x")
"""

    def asked(name: str, known: client.Known | None = None) -> tuple[dict[str, Any], int]:
        built.write_text("")
        failed = ask(mine, tmp_path / name, known)
        return failed, len(built.read_text())

    mine.file.write_text(WRONG + counts)
    failed, number = asked("found")
    assert {"lookup.truth", "lookup.last-token"} <= set(failed)
    sources = dict.fromkeys(CAPABILITIES, "inferred")
    known = complete({"store": True, "saves": "all"}), sources
    again, fewer = asked("known", known)
    assert again == failed
    assert 0 < fewer < number


def reports(folder: Path) -> dict[str, bytes | dict[str, Any]]:
    """Return the files of a report without times."""
    found: dict[str, Any] = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.name not in ("junit.xml", "summary.json")
    }
    summary = json.loads((folder / "summary.json").read_text())
    text = json.dumps(summary)
    # Times of any clock: seconds with a fraction, milliseconds since 1970, and ISO dates.
    times = r"\d{4}-\d\d-\d\dT[0-9:.+]+|\b\d{13}\b|\b\d+\.\d+\b"
    found["summary.json"] = re.sub(times, "TIME", text)
    found["report.html"] = re.sub(times.encode(), b"TIME", found["report.html"])
    return found


@pytest.mark.parametrize(
    "text", [pytest.param(RIGHT, marks=pytest.mark.long), WRONG], ids=["right", "wrong"]
)
def test_report_and_output_are_those_of_a_run_without_server(mine: Project, text: str) -> None:
    mine.file.write_text(text)
    outputs, found = [], []
    for command, *more in (["run", "--no-server"], ["run"], ["watch", "--once"]):
        done = mine.kvconform(command, *more)
        assert done.returncode == (0 if text is RIGHT else 1)
        assert ("through the warm server" in done.stderr) is ([command, *more] == ["run"])
        shown = re.sub(
            r"(?m)^\d+ of \d+ runs made, .*\n", "", done.stdout
        )  # the progress of slow runs
        outputs.append(re.sub(r"in \d+\.\d s", "in TIME", shown))
        report = mine.folder / "kvconform-report"
        found.append(reports(report))
        shutil.rmtree(report)
    assert outputs[0] == outputs[1] == outputs[2]
    assert "report.jsonl" in found[0]
    assert found[0] == found[1] == found[2]


def test_an_edit_of_the_same_length_and_time_is_seen(mine: Project, tmp_path: Path) -> None:
    moment = mine.file.stat().st_mtime_ns
    assert ask(mine, tmp_path) == {}
    assert len(RIGHT) == len(WRONG)
    mine.file.write_text(WRONG)
    os.utime(mine.file, ns=(moment, moment))
    assert ask(mine, tmp_path)
    mine.file.write_text(RIGHT)
    os.utime(mine.file, ns=(moment, moment))
    assert ask(mine, tmp_path) == {}


def test_what_does_not_import_is_one_sentence(mine: Project, tmp_path: Path) -> None:
    mine.file.write_text("def (")
    with pytest.raises(KvconformError, match=r"cannot be imported: SyntaxError") as caught:
        ask(mine, tmp_path)
    assert (caught.value.code, "\n" in caught.value.message) == (2, False)
    done = mine.kvconform("run")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
    mine.file.unlink()
    with pytest.raises(KvconformError, match="No module named 'mine'"):
        ask(mine, tmp_path)


def test_a_connector_that_kills_its_process_group(mine: Project, tmp_path: Path) -> None:
    mine.file.write_text(RIGHT + warm_rig.EXITS)
    with pytest.raises(client.Died):
        ask(mine, tmp_path)
    done = mine.kvconform("run")
    assert (done.returncode, "hook.keeps-process" in done.stdout + done.stderr) == (1, True)
    mine.file.write_text(RIGHT)
    assert ask(mine, tmp_path) == {}


def test_nothing_of_a_run_is_left(mine: Project, tmp_path: Path) -> None:
    ask(mine, tmp_path)
    server = psutil.Process(warm_rig.server_of(mine.settings))
    # It keeps the process that test_runs_with_another_hash_seed_share_a_process is about.
    warm_rig.wait_for(lambda: {*server.children(recursive=True)} <= {*reseeded(mine)})
    assert server.num_threads() == 1


def reseeded(project: Project) -> list[psutil.Process]:
    """Return the processes of the project's server that have another hash seed."""
    server = warm_rig.server_of(project.settings)
    everything = psutil.process_iter(["ppid", "cmdline"])
    mine = [each for each in everything if each.info["ppid"] == server]
    return [each for each in mine if "kvconform.session.reseeded" in (each.info["cmdline"] or ())]


def has_imported(process: psutil.Process) -> bool:
    """Return whether a process has torch in its memory, and so vLLM."""
    return any("libtorch" in each.path for each in process.memory_maps())


@pytest.mark.long
def test_runs_with_another_hash_seed_share_a_process(mine: Project) -> None:
    births = mine.folder / "births"
    mine.file.write_text(
        f"""
import os
with open({str(births)!r}, "a") as file:
    print(os.getppid(), os.environ.get("PYTHONHASHSEED"), file=file)
{RIGHT}"""
    )
    settings = mine.settings.model_copy(update={"select": ["lifecycle.restart-interpreter"]})
    [process] = reseeded(mine)
    assert not has_imported(process), "there was no such run yet"
    counts, processes = [0], {process.pid}
    for _ in range(2):
        assert client.run_if_warm(settings) == 0
        [process] = reseeded(mine)
        processes.add(process.pid)
        counts.append(births.read_text().splitlines().count(f"{process.pid} None"))
    assert has_imported(process)
    assert len(processes) == 1 and counts[0] < counts[1] < counts[2]
    process.kill()
    process.wait()
    assert reseeded(mine) == []


def test_the_sockets_are_the_users_alone(mine: Project) -> None:
    path = client.path_for(mine.settings)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for each in path.parent.glob("*.sock"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600


@pytest.mark.long
def test_a_change_of_what_it_imported_and_a_death_replace_it(tmp_path: Path) -> None:
    with warm_rig.project() as project, pytest.MonkeyPatch.context() as patch:
        early = tmp_path / "early"
        early.mkdir()
        (early / "sitecustomize.py").write_text("ONE = 1\n")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(early), os.environ.get("PYTHONPATH", "")]))
        settings, path = project.settings, client.path_for(project.settings)
        notes: list[str] = []

        def judge() -> dict[str, Any]:
            return with_server(path, settings, notes.append, lambda: ask(project, tmp_path))

        assert judge() == {}
        first = warm_rig.server_of(settings)
        (early / "sitecustomize.py").write_text("ONE = 'another'\n")
        assert judge() == {}
        warm_rig.wait_for(lambda: warm_rig.has_ended(first))
        second = warm_rig.server_of(settings)
        os.kill(second, signal.SIGKILL)
        warm_rig.wait_for(lambda: warm_rig.has_ended(second))
        assert path.exists()  # nothing removed it
        assert judge() == {}
        assert [note.partition(":")[0] for note in notes] == [
            "starting the warm server",
            "replacing the warm server",
            "starting the warm server",
        ]


def test_an_idle_server_ends(tmp_path: Path) -> None:
    with warm_rig.project() as project:
        path = client.path_for(project.settings)
        path.parent.mkdir(mode=0o700)
        path.with_suffix(".log").touch()  # its output, as client.start has it
        code = (
            "import sys; from kvconform.watch import server; "
            "server.MODULES = []; sys.exit(server.main(sys.argv[1]))"
        )
        idle = {"KVCONFORM_SERVER_IDLE": "0.3"}
        done = program_rig.python("-c", code, str(path), cwd=tmp_path, env=idle, timeout=60)
        assert done.returncode == 0, done.stderr
        assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (client.Gone(), ""),
        (place.NotPrivate("it is open to others"), ""),
        (
            client.Stale("vllm/config.py"),
            "kvconform: the warm server is out of date: vllm/config.py was changed\n",
        ),
    ],
)
def test_a_run_goes_on_without_a_server_that_cannot_serve_it(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(client, "run", fails)
    settings = Settings(connector="mine:Mine", select=[RUN])
    assert client.run_if_warm(settings) is None
    assert capsys.readouterr().err == said


def test_a_run_that_cannot_be_forked_does_without(mine: Project) -> None:
    settings = mine.settings.model_copy(update={"debug": True})
    assert client.run_if_warm(settings) is None
    everything = mine.settings.model_copy(update={"select": []})
    assert client.run_if_warm(everything) is None


def test_imported_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "imported_for_this_test.py"
    module.write_text("ONE = 1\n")
    importlib.import_module(module.stem)
    try:
        known = Imported()
        assert known.changed() is None
        module.write_text("ONE = 11\n")
        assert known.changed() == str(module)
        module.write_text("ONE = 2\n")
        os.utime(module, ns=(1, 1))
        assert Imported().changed() is None
        known = Imported()
        os.utime(module, ns=(2, 1_000_000))
        assert known.changed() == str(module), "of the same size"
    finally:
        del sys.modules[module.stem]


def test_data_that_a_process_reads_once_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spec" / "cases"
    folder.mkdir(parents=True)
    (folder / "one.yaml").write_text("id: one\n")
    monkeypatch.setattr(imported.kvconform, "__path__", [str(tmp_path)])
    known = Imported()
    assert known.changed() is None
    (folder / "notes.txt").write_text("no data\n")
    assert known.changed() is None
    (folder / "two.yaml").write_text("id: two\n")
    assert known.changed() == str(folder / "two.yaml"), "a file that was added"
    known = Imported()
    (folder / "one.yaml").write_text("id: one of another size\n")
    assert known.changed() == str(folder / "one.yaml")
    known = Imported()
    (folder / "two.yaml").unlink()
    assert known.changed() == str(folder / "two.yaml")
