# SPDX-License-Identifier: Apache-2.0
"""Tests of connectors by name: catalogue entries, their settings, messages for unknown names."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from kvconform.config import catalogue
from kvconform.config.settings import load
from kvconform.errors import UsageError
from kvconform.judge.records import Row, Verdict
from kvconform.report.causes import command
from places import ROOT


@pytest.mark.parametrize("name", catalogue.names())
def test_every_entry_is_a_configuration(name: str, tmp_path: Path) -> None:
    settings = load({"connector": f"catalogue:{name}"}, start=tmp_path)
    assert (
        settings.catalogue == f"catalogue:{name}"
        and settings.connector == catalogue.named(name).connector
    )
    assert catalogue.named(name).text.endswith(".")


def test_the_command_line_has_the_last_word_and_other_settings_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "kvconform.toml").write_text('connector = "mine:Conn"\nextra_config = {mine = 1}\n')
    settings = load(
        {"connector": "catalogue:offloading", "extra_config": {"cpu_bytes_to_use": 7}, "seed": 3},
        start=tmp_path,
    )
    assert (settings.connector, settings.extra_config, settings.seed) == (
        "OffloadingConnector",
        {"cpu_bytes_to_use": 7},
        3,
    )
    assert settings.emulate_cuda and settings.file is None
    assert load({}, start=tmp_path).connector == "mine:Conn"


def test_a_run_is_repeated_by_the_same_name() -> None:
    settings = load({"connector": "catalogue:offloading"})
    row = Row(
        "save.owned", "chunked.abort", "vllm", "sync", "v1", 1, 4, Verdict.FAIL, slow="compute"
    )
    assert shlex.join(command(settings, row, alone=False)) == (
        "kvconform run catalogue:offloading -k "
        "'chunked.abort[vllm-sync-v1-d1-b4-slow-compute]' --seed 0"
    )


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(
        UsageError, match="the catalogue has no connector 'offloding'; did you mean offloading"
    ):
        load({"connector": "catalogue:offloding"})


@pytest.mark.parametrize(
    "text",
    [
        "text = ",
        'text = "It."',
        'text = ""\nconnector = "A"',
        'text = "It."\nconnector = "A"\nrequires = "b"',
    ],
)
def test_a_broken_entry_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(UsageError, match="odd.toml of the catalogue is broken: "):
        catalogue.named("catalogue:odd", tmp_path)


def test_an_unknown_setting_of_an_entry_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "odd.toml").write_text('text = "It."\nconnector = "A"\nextra-konfig = {}\n')
    entry = catalogue.named("odd", tmp_path)
    monkeypatch.setattr(catalogue, "named", lambda name: entry)
    with pytest.raises(
        UsageError, match="unknown setting 'extra-konfig'; did you mean 'extra_config'"
    ):
        load({"connector": "catalogue:odd"})


def test_what_is_installed_comes_from_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noxenv = pytest.importorskip("nox") and __import__("importlib.util", fromlist=["util"])
    spec = noxenv.spec_from_file_location("noxenv_named", ROOT / "noxenv.py")
    module = noxenv.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(ROOT))  # noxpip, which nox loads first
    spec.loader.exec_module(module)
    (tmp_path / "connectors").mkdir()
    (tmp_path / "connectors" / "some.toml").write_text(
        'text = "It."\nconnector = "A"\nrequires = ["b==1", "c"]\n'
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.catalogued(["--connector", "catalogue:some", "--seed", "3"]) == ["b==1", "c"]
    assert module.catalogued(["--connector=catalogue:some"]) == ["b==1", "c"]
    assert (
        module.catalogued(["--connector", "mine:Conn"])
        == module.catalogued(["--connector", "catalogue:none"])
        == []
    )


def test_entries_need_nothing_that_is_not_a_requirement() -> None:
    for name in catalogue.names():
        raw = tomllib.loads((catalogue.ROOT / f"{name}.toml").read_text(encoding="utf-8"))
        assert [key for key in raw if key != "family"][:2] == ["text", "connector"]
