# SPDX-License-Identifier: Apache-2.0
"""Tests of spec/history.yaml: it loads, its names exist, and a wrong entry gets a clear message.

`nox -s history` runs the entries.
"""

from __future__ import annotations

import re

import pytest

from kvconform.contract import loader
from kvconform.contract.loader import Spec, SpecError, load_spec
from kvconform.dev import history


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec()


def test_at_least_twelve_bugs_over_five_releases(spec: Spec) -> None:
    known = loader.entries(spec)
    assert len({entry.bug for entry in known if entry.bug.startswith("B")}) >= 12
    assert len({release for entry in known for release in entry.releases}) >= 5
    assert len({entry.id for entry in known}) == len(known)


def test_entries_of_a_release_ignore_the_local_version(spec: Spec) -> None:
    known = loader.entries(spec)
    assert history.of_release(known, "0.23.0+cpu") == history.of_release(known, "0.23.0") != []
    assert history.of_release(known, "0.1.0") == []


def test_an_entry_that_names_what_does_not_exist(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {
        "id": "x",
        "bug": "B001",
        "text": "t",
        "releases": ["0.26.0"],
        "connector": "a:B",
        "cases": ["no.case"],
        "fails": ["hook.no-raise"],
    }
    monkeypatch.setattr(loader, "parse", lambda text, place: [entry])
    with pytest.raises(SpecError, match=re.escape("x names no.case, which does not exist")):
        loader.entries(spec)


def test_what_an_entry_names_is_judged_in_every_release(spec: Spec) -> None:
    entry = next(entry for entry in loader.entries(spec) if "engine.finish-blocks" in entry.fails)
    assert not spec.requirements["engine.finish-blocks"].in_force("0.23.0")
    judged = history.as_of(entry, spec, "0.23.0").requirements
    assert "engine.finish-blocks" in judged
    assert "engine.removed" not in judged, "only what the entry names, and what is in force"
    assert "hook.no-raise" in judged
