# SPDX-License-Identifier: Apache-2.0
"""Tests that each connector that vLLM registers is judged, or exempt for a reason."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kvconform.compat import factory, installed
from kvconform.config import catalogue
from kvconform.contract.loader import Spec
from kvconform.contract.requirement import version_key
from kvconform.dev import drift, registered
from kvconform.errors import UsageError

SOURCE = """
KVConnectorFactory.register_connector("OffloadingConnector", "a.b", "OffloadingConnector")
KVConnectorFactory.register_connector(
    "BrandNewConnector",
    "a.c",
    "BrandNewConnector",
)
"""


def _wheel(path: Path, text: str = SOURCE) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"vllm/{factory.FACTORY}", text)
    return path


def _current() -> bool:
    """Whether vLLM is installed, and no older than the oldest release with a record."""
    version = installed.vllm_version()
    if version is None or version == installed.UNKNOWN:
        return False
    return version_key(version) >= version_key(registered.recorded()[0].vllm)


def test_all_recorded_names_are_judged_or_exempt() -> None:
    assert not registered.problems()
    newest = registered.recorded()[-1]
    assert version_key(newest.vllm)[:2] >= version_key(installed.NEWEST)[:2]
    assert "OffloadingConnector" in newest.names


@pytest.mark.skipif(not _current(), reason="needs a vLLM with a record, or a newer one")
def test_all_names_of_the_installed_vllm_are_judged_or_exempt() -> None:
    names = factory.installed_names()
    assert "OffloadingConnector" in names
    assert not registered.unjudged(names), "an entry in connectors/, or in connectors/exempt.yaml"


@pytest.mark.skipif(not _current(), reason="needs a vLLM with a record, or a newer one")
def test_exemptions_are_borne_out_by_the_installed_vllm() -> None:
    assert not [found for each in registered.exempt().values() if (found := each.problem())]
    nixl = registered.exempt()["NixlPullConnector"]
    found = nixl.model_copy(update={"says": "something else"}).problem()
    assert found is not None and "no longer says 'something else'" in found


def test_a_new_name_of_a_release_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (registered.RECORD, registered.EXEMPT):
        text = (catalogue.ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text, encoding="utf-8")
    new = registered.update(_wheel(tmp_path / "vllm-99.1.0-py3-none-any.whl"), tmp_path)
    assert new.vllm == "99.1.0" and new.names == ["BrandNewConnector", "OffloadingConnector"]
    records = registered.recorded(tmp_path)
    assert [each.vllm for each in records][-1] == "99.1.0" and len(records) > 1
    monkeypatch.setattr(registered, "recorded", lambda: records)
    assert registered.main(["check"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("BrandNewConnector of vLLM 99.1.0 is neither in the catalogue nor in ")
    assert "OffloadingConnector" not in said


def test_an_exemption_without_need_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    one = registered.exempt()["MoRIIOConnector"]
    both = {"OffloadingConnector": one, "GoneConnector": one} | registered.exempt()
    monkeypatch.setattr(registered, "exempt", lambda: both)
    assert registered.problems() == [
        "connectors/exempt.yaml has OffloadingConnector, which the catalogue judges",
        "connectors/exempt.yaml has GoneConnector, which no recorded release registers",
    ]


def test_drift_reports_names_that_are_neither() -> None:
    found = drift.Drift("99.1.0", unjudged=["BrandNewConnector"])
    assert found
    words = drift.report(found, Spec())
    assert "connectors that are neither judged nor exempt (1)\n  BrandNewConnector\n" in words


def test_what_is_no_wheel_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "vllm-1.0.0.whl").write_text("no wheel")
    for path in (tmp_path / "vllm-1.0.0.whl", _wheel(tmp_path / "other-1.0.0.whl")):
        with pytest.raises(UsageError, match="is no wheel of vLLM"):
            registered.update(path, tmp_path)
    assert registered.main(["judge"]) == 2


def test_the_record_is_rendered_as_it_is_read() -> None:
    text = (catalogue.ROOT / registered.RECORD).read_text(encoding="utf-8")
    assert registered.render(reversed(registered.recorded())) == text
