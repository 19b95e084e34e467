# SPDX-License-Identifier: Apache-2.0
"""Tests of the import of mutated modules, of the recorder of lines, and of changed reports."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconform.dev.mutants import timing
from kvconform.dev.mutants.loading import forget, install_everywhere
from kvconform.run.lines import Recorder

SOURCE = "def value():\n    return 1\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `grown` with a module `leaf`; the process is as before afterwards."""
    folder = tmp_path / "grown"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "leaf.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("KVCONFORM_MUTANT", "")
    yield folder
    forget(["grown.leaf", "grown"])


def test_a_mutant_is_imported_here_and_in_processes_and_no_file_changes(package: Path) -> None:
    leaf = package / "leaf.py"
    assert importlib.import_module("grown.leaf").value() == 1
    forget(["grown.leaf"])
    mutated = SOURCE.replace("1", "2").encode()
    install_everywhere("grown.leaf", str(leaf), mutated, package.parent / "site")
    module = importlib.import_module("grown.leaf")
    from grown import leaf as attribute  # type: ignore[import-not-found]

    assert (module.value(), attribute.value(), module.__file__) == (2, 2, str(leaf))
    command = [sys.executable, "-c", "import grown.leaf; print(grown.leaf.value())"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2\n"
    assert leaf.read_text() == SOURCE


def test_lines_are_recorded_in_all_threads_and_in_the_named_files_only(package: Path) -> None:
    leaf = importlib.import_module("grown.leaf")
    recorder = Recorder([str(package / "leaf.py")])
    with recorder.recording():
        thread = threading.Thread(target=leaf.value)
        thread.start()
        thread.join()
    assert recorder.taken() == {(str(package / "leaf.py"), 1), (str(package / "leaf.py"), 2)}
    leaf.value()
    assert recorder.taken() == set()


class Reporter:
    """Reports each value of a list once."""

    def __init__(self, values: list[Any]) -> None:
        self.values = iter(values)

    def get_finished(self, finished: set[str]) -> Any:
        return next(self.values)


@pytest.mark.parametrize(
    "change, expected",
    [
        (timing.never, [(None, None), (None, None), (None, None)]),
        (timing.late, [(None, None), ({"a"}, None), (None, {"b"})]),
        (timing.twice, [({"a"}, None), ({"a"}, {"b"}), (None, {"b"})]),
        (timing.early, [({"a", "x"}, None), ({"x"}, {"b"}), ({"x"}, None)]),
    ],
)
def test_reports_are_changed(change: Callable[[Any], Any], expected: list[Any]) -> None:
    reporter = Reporter([({"a"}, None), (None, {"b"}), (None, None)])
    hook = change(Reporter.get_finished)
    assert [hook(reporter, {"x"}) for _ in range(3)] == expected


def test_a_generator_is_reported_late_as_a_list() -> None:
    class Events:
        def take_events(self) -> Iterator[int]:
            yield 1

    hook = timing.late(Events.take_events)
    one = Events()
    assert [hook(one), hook(one)] == [[], [1]]
