# SPDX-License-Identifier: Apache-2.0
"""Tests of setting `request_params`: which requests get the parameters of a connector's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvconform.config.settings import load
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError
from kvconform.refimpl.variants.peer import Peer
from kvconform.run.runner import run_variant
from kvconform.run.smoke import target_of

SPEC = load_spec()


class Notes(Peer):
    """Notes the parameters of each request, and adds to those it was given."""

    seen: ClassVar[dict[str, Any]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        params = request.kv_transfer_params
        if request.request_id not in self.seen:
            self.seen[request.request_id] = None if params is None else dict(params)
            if params is not None:
                params["noted"] = True
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


def seen(case: Case, settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return the parameters of each request of a case."""
    Notes.seen.clear()
    given = {"connector": f"{__name__}:Notes", **settings}
    run = run_variant(
        case.variants()[0], target_of(load(given, start=tmp_path)), seed=0, tmp=tmp_path
    )
    assert run.harness_error is None, run.harness_error
    return dict(Notes.seen)


def two_requests(**second: Any) -> Case:
    first = SPEC.cases["lifecycle.last-token"]
    data = {
        "id": "made.up",
        "area": "made",
        "text": "Two requests.",
        "engines": ["reference"],
        "steps": [
            {"add": {"req": "a", "prompt": 9}},
            {"add": {"req": "b", "prompt": 7, **second}},
            {"run": {}},
        ],
    }
    return type(first).model_validate(data, strict=False)


def test_each_request_gets_parameters_of_its_own(tmp_path: Path) -> None:
    params = {"ttl": 60, "tags": {"tier": ["cpu"]}}
    found = seen(two_requests(), {"request_params": params}, tmp_path)
    assert found == {"a": params, "b": params}
    assert params == {"ttl": 60, "tags": {"tier": ["cpu"]}}


def test_without_the_setting_requests_have_none(tmp_path: Path) -> None:
    assert seen(two_requests(), {}, tmp_path) == {"a": None, "b": None}


def test_a_case_that_sends_others_keeps_them(tmp_path: Path) -> None:
    case = two_requests(params={"own": 1})
    found = seen(case, {"request_params": {"ttl": 60}}, tmp_path)
    assert found == {"a": {"ttl": 60}, "b": {"own": 1}}


def test_requests_that_are_handed_over_keep_theirs(tmp_path: Path) -> None:
    case = SPEC.cases["transfer.prompt"]
    found = seen(case, {"request_params": {"ttl": 60}}, tmp_path)
    assert found and all(params and "ttl" not in params for params in found.values())


def test_a_file_has_them_in_a_table_of_values_that_clients_can_send(tmp_path: Path) -> None:
    file = tmp_path / "kvconform.toml"
    file.write_text("[request_params]\nttl = 60\ntags = {tier = ['cpu']}\n")
    assert load({}, start=tmp_path).request_params == {"ttl": 60, "tags": {"tier": ["cpu"]}}
    file.write_text("[request_params]\nsince = 2027-01-01\n")
    with pytest.raises(UsageError, match=r"request_params\.since"):
        load({}, start=tmp_path)
