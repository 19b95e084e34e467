# SPDX-License-Identifier: Apache-2.0
"""Tests of the table of hooks and fields: it lists all, and reports those without a requirement."""

from __future__ import annotations

import pytest

from kvconform.compat import installed, interface
from kvconform.contract.loader import load_spec
from kvconform.dev import coverage


@pytest.mark.skipif(installed.vllm_root() is None, reason="needs vLLM's source")
def test_every_hook_and_field_is_listed() -> None:
    listed = set(interface.items())
    assert {
        "get_num_new_matched_tokens",
        "request_finished_all_groups",
        "role",
        "reset_cache",
    } <= listed
    assert {
        "SchedulerOutput.preempted_req_ids",
        "NewRequestData.block_ids",
        "KVConnectorOutput.finished_sending",
    } <= listed
    assert not any(item.startswith("_") or "__" in item for item in listed)


@pytest.mark.skipif(installed.vllm_root() is None, reason="needs vLLM's source")
def test_what_nothing_is_about_is_found() -> None:
    spec = load_spec()
    rows = {row.item: row for row in coverage.table(spec)}
    only = next(row for row in rows.values() if len(row.requirements) == 1)
    name = only.requirements[0]
    spec.requirements[name] = spec.requirements[name].model_copy(update={"touches": []})
    assert f"no requirement touches {only.item}" in coverage.problems(spec)
    unread = next(item for item in coverage.NOT_READ if item in rows)
    spec.requirements[name] = spec.requirements[name].model_copy(update={"touches": [unread]})
    assert any(sentence.startswith(f"{unread} is ") for sentence in coverage.problems(spec))
    assert f"| `{unread}` | `{name}` |" in coverage.render(spec)
