# SPDX-License-Identifier: Apache-2.0
"""Tests that a requirement of a catalogue entry that is not installed is reported before a run."""

from __future__ import annotations

import pytest

from kvconform.config import catalogue
from kvconform.config.catalogue import lacking, versions


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
