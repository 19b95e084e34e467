# SPDX-License-Identifier: Apache-2.0
"""Test of `kvconform watch`: a connector is broken, mended and deleted while it is watched."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import warm_rig
from kvconform.config.settings import Settings
from kvconform.errors import UsageError
from kvconform.report.layout import make_console
from kvconform.watch import client, loop
from kvconform.watch.sources import Changes, Source, source_of
from warm_rig import RIGHT, RUN, WRONG


@pytest.mark.e2e
def test_watching() -> None:
    with warm_rig.project() as project:
        command = [sys.executable, "-m", "kvconform", "watch", *project.options()]
        process = subprocess.Popen(
            command,
            cwd=project.folder,
            env={**os.environ, **project.environment, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            text=True,
            # A shell that runs this in the background has it ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        lines: list[str] = []
        assert process.stdout is not None
        stream = process.stdout
        reader = threading.Thread(target=lambda: lines.extend(stream), daemon=True)
        reader.start()

        def screen() -> list[str]:
            """Return the lines of the next judgement that came to its end."""
            warm_rig.wait_for(lambda: any("Ctrl-C ends" in line for line in lines), 120)
            end = next(n for n, line in enumerate(lines) if "Ctrl-C ends" in line) + 1
            found = lines[:end]
            del lines[:end]
            return found

        try:
            right = "CONFORMANT in what was selected "
            assert any(line.startswith(right) for line in screen())
            project.file.write_text(WRONG)
            shown = "".join(screen())
            assert "changed: mine.py" in shown
            assert "newly fails" in shown and "NOT CONFORMANT" in shown
            project.file.write_text(WRONG + "\n")
            shown = "".join(screen())
            assert f"fails         {RUN}: " in shown
            assert "still fails" in shown and "newly" not in shown
            project.file.write_text("def (")
            assert "cannot be imported: SyntaxError" in "".join(screen())
            project.file.unlink()
            assert "cannot be imported: ModuleNotFoundError" in "".join(screen())
            project.file.write_text(RIGHT)
            shown = "".join(screen())
            assert f"passes now    {RUN}" in shown
            assert "newly passes" in shown and "newly fails" not in shown
        finally:
            code = interrupted(process)
        reader.join(5)
        assert code == 0
        assert lines[-1:] == ["ended\n"]


def test_a_connector_that_does_not_exist_is_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "start", lambda *_: pytest.fail("a server was started"))
    notes: list[str] = []
    with pytest.raises(UsageError, match="there is no package 'nosuch'"):
        loop.once(Settings(connector="nosuch:Conn"), notes.append)
    assert notes == []


def test_it_prints_no_timeline(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kvconform watch prints no timeline; use --once"):
        loop.watch(Settings(trace="lifecycle.api"), make_console())


def interrupted(process: subprocess.Popen[str]) -> int:
    """Press Ctrl-C, and return the exit code."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(120)
    finally:
        process.kill()


def test_a_signal_just_before_waiting_for_changes_ends_the_wait(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with Changes(Source(tmp_path, deep=False), tmp_path / "reports") as changes:
            assert select.select([changes], [], [], 0)[0] == []
            os.kill(os.getpid(), signal.SIGUSR1)
            assert select.select([changes], [], [], 10)[0] == [changes]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_reports_in_the_watched_folder_are_no_change(tmp_path: Path) -> None:
    reports = tmp_path / "kvconform-report"
    reports.mkdir()
    with Changes(Source(tmp_path, deep=True), reports) as changes:
        warm_rig.wait_for(lambda: _is_seen(tmp_path / "first.py", changes), 30)
        while select.select([changes], [], [], 1.0)[0]:  # what was written may be told in parts
            changes.take()
        (reports / "summary.json").write_text("{}")
        assert select.select([changes], [], [], 0.5)[0] == []
        warm_rig.wait_for(lambda: _is_seen(tmp_path / "table.json", changes), 30)


def _is_seen(file: Path, changes: Changes) -> bool:
    """Return whether a change of a file is seen; watching begins some time after the thread."""
    file.write_text(f"{time.monotonic()}")
    return select.select([changes], [], [], 0.2)[0] == [changes]


def test_where_the_source_of_a_connector_lies(tmp_path: Path) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "alone.py").write_text("raise RuntimeError('imported')\n")

    def of(connector: str) -> tuple[str, bool]:
        found = source_of(Settings(connector=connector, pythonpath=[str(tmp_path)]))
        return found.folder.name, found.deep

    assert of("package.inner.module:Conn") == ("package", True)
    assert of("alone:Conn") == (tmp_path.name, False)
    assert of("kvconform.refimpl.connector:ReferenceConnector") == ("refimpl", False)
    with pytest.raises(UsageError, match="no source"):
        of("no_such_package:Conn")
