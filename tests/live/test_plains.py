# SPDX-License-Identifier: Apache-2.0
"""Tests of the directory that caches baseline runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvconform.config.settings import Settings
from kvconform.live.baseline import FOLDER
from kvconform.live.random import REDUCED
from kvconform.session.worker import Worker

pytest.importorskip("vllm")


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.delenv(REDUCED, raising=False)
    # A worker moves the directory for temporary files to its own, which ends with this test.
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    return Worker(
        Settings(select=["chunked"], report_dir=str(tmp_path / "report")),
        "0.32.0",
        tmp_path,
        "main",
        None,
    )


def test_a_program_keeps_them_with_its_own_files_and_forgets_them(
    begun: Worker, tmp_path: Path
) -> None:
    assert os.environ[FOLDER] == str(tmp_path / "live")
    begun.pytest_sessionfinish()
    assert FOLDER not in os.environ and REDUCED not in os.environ


@pytest.mark.parametrize("shrink", [True, False])
def test_workloads_are_made_small_only_if_the_settings_say_so(
    shrink: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REDUCED, raising=False)
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    settings = Settings(select=["chunked"], report_dir=str(tmp_path), shrink=shrink)
    worker = Worker(settings, "0.32.0", tmp_path, "main", None)
    assert (os.environ.get(REDUCED) == str(tmp_path / "cases")) is shrink
    worker.pytest_sessionfinish()


class TestNamedByTheCaller:
    @pytest.fixture(autouse=True)
    def named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(FOLDER, "/elsewhere")

    def test_they_are_kept_there(self, begun: Worker) -> None:
        assert os.environ[FOLDER] == "/elsewhere"
        begun.pytest_sessionfinish()
        assert os.environ[FOLDER] == "/elsewhere"
