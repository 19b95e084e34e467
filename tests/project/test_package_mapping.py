# SPDX-License-Identifier: Apache-2.0
"""Tests that `src/kvconform` is the package and that every tool finds it there.

A folder called `kvconform` must not get in its way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvconform
from places import ROOT

BESIDE = ("refimpl", "kernels", "connectors", "fixtures", "spec")


def test_the_links_lead_to_the_folders() -> None:
    assert (ROOT / "src" / "kvconform").resolve() == ROOT / "conformance"
    assert {name: (ROOT / "src" / "kvconform" / name).resolve() for name in BESIDE} == {
        name: ROOT / name for name in BESIDE
    }
    assert Path(kvconform.__file__).resolve().parent == ROOT / "conformance"


def test_it_runs_in_the_parent_folder_of_a_checkout_called_kvconform(tmp_path: Path) -> None:
    (tmp_path / "kvconform").symlink_to(ROOT)
    # the folder is on the path, and first
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "kvconform", "list", "profiles"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "core" in done.stdout
