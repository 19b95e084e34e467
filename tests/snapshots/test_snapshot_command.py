# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform snapshot` from a user's view: what it writes and prints, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from program_rig import forked, python

CASES = ("-k", "placeholders.prompt-boundary,chunked.partial-tail")


def snapshot(action: str, *more: str, cwd: Path) -> tuple[int | None, str]:
    code, said = forked("snapshot", action, "--dir", "kept", *more, cwd=cwd)
    return code, " ".join(said.split())


@pytest.mark.e2e
def test_snapshots_from_the_first_to_the_last(tmp_path: Path) -> None:
    code, said = snapshot("update", *CASES, cwd=tmp_path)
    assert (
        code == 0
        and "2 new" in said
        and "requirements that this concerns: " in said
        and "engine.chunks-keep-tokens" in said
    )
    code, said = snapshot("check", *CASES, cwd=tmp_path)
    assert code == 0 and said.count("2 same") == 1

    index = tmp_path / "kept" / "index.json"
    data = json.loads(index.read_text())
    [version] = data["versions"]
    del data["versions"][version]["chunked.partial-tail/metadata.json"]
    (tmp_path / "kept" / version / "chunked.partial-tail" / "metadata.json").unlink()
    data["versions"][version]["lifecycle.nothing/metadata.json"] = data["versions"][version][
        "chunked.partial-tail/hooks.json"
    ]
    index.write_text(json.dumps(data))
    code, said = snapshot("check", *CASES, cwd=tmp_path)
    assert (
        code == 1
        and "chunked.partial-tail/metadata.json is missing: there is no such snapshot" in said
        and "1 same" in said
    )

    edited = tmp_path / "kept" / version / "placeholders.prompt-boundary" / "stored.json"
    edited.write_text(edited.read_text().replace("a[0, 4)", "a[0, 3)"))
    for action in ("check", "update"):
        code, said = snapshot(action, *CASES, cwd=tmp_path)
        assert (
            code == 2
            and "stored.json is not what was written there" in said
            and "Traceback" not in said
        )
    assert "a[0, 3)" in edited.read_text()


@pytest.mark.e2e
def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "index.json").write_text('{"about": {"connector": "other:Conn"}}')
    code, said = snapshot("check", *CASES, cwd=tmp_path)
    assert (
        code == 2
        and "has snapshots of connector 'other:Conn', not 'kvconform.refimpl.connector:" in said
    )
    (tmp_path / "kept" / "index.json").write_text('{"format": 1}')
    code, said = snapshot("check", *CASES, cwd=tmp_path)
    assert code == 2 and "record them again with `kvconform snapshot update`" in said
    code, said = snapshot("check", "-k", "chunked.nothing", cwd=tmp_path / "..")
    assert code == 2 and "there is no case 'chunked.nothing'" in said


@pytest.mark.e2e
def test_an_update_by_several_processes_is_refused(tmp_path: Path) -> None:
    plugin = (
        "-m",
        "pytest",
        "-p",
        "kvconform.snapshots.plugin",
        "--pyargs",
        "kvconform.snapshots",
        "--kv-snapshots",
        "kept",
    )
    done = python(*plugin, "--snapshot-update", "-n", "2", cwd=tmp_path)
    assert done.returncode == 4 and "snapshots are updated by one process" in done.stderr
    assert not (tmp_path / "kept").exists()
