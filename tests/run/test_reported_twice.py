# SPDX-License-Identifier: Apache-2.0
"""Tests of one request whose load and send are both reported.

The engine may not yet have processed the first report when the second is made.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from core_rig import REFERENCE, ROUND_TRIP, Event, run_case, select


def reports(tmp_path: Path, connector: str, steps: int) -> list[Event]:
    """Return the reports of request b.

    It is aborted after `steps` steps that were scheduled and not waited for.
    """
    case = [
        {"add": {"req": "a", "prompt": 18, "max_tokens": 1}},
        {"run": {}},
        {"drop-local": {}},
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 5}},
        {"schedule": steps},
        {"abort": "b"},
        {"run": {}},
    ]
    run = run_case(
        connector,
        case,
        tmp_path,
        engine="vllm",
        scheduling="async",
        extra={"store": "{tmp}", "load": "async"},
    )
    return [
        event
        for event in run.trace
        if event["kind"] in ("hold", "release", "transfer.reported") and event["req"] == "b"
    ]


@pytest.mark.parametrize(
    ("steps", "order"),
    [
        (
            1,
            [
                ("hold", "recv"),
                ("hold", "send"),
                ("transfer.reported", "send"),
                ("transfer.reported", "recv"),
            ],
        ),
        (
            2,
            [
                ("hold", "recv"),
                ("transfer.reported", "recv"),
                ("hold", "send"),
                ("transfer.reported", "send"),
            ],
        ),
    ],
)
def test_the_second_report_is_one_too_many_whoever_comes_first(
    tmp_path: Path, steps: int, order: list[tuple[str, str]]
) -> None:
    """With two steps, both reports were waited for.

    The load was reported, but not yet processed by the engine, when the client aborted.
    """
    found = reports(tmp_path, "reported_twice_rig:ReportsSendToo", steps)
    assert [(event["kind"], event["direction"]) for event in found][:4] == order
    assert [event["second"] for event in found if event["kind"] == "transfer.reported"] == [
        False,
        True,
    ]
    assert all(event["held"] for event in found if event["kind"] == "transfer.reported")


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_connector_that_leaves_it_at_the_load_reports_once(tmp_path: Path, steps: int) -> None:
    found = reports(tmp_path, REFERENCE, steps)
    assert [event["second"] for event in found if event["kind"] == "transfer.reported"] == [False]


def test_a_request_that_was_loaded_and_is_sent_afterwards_is_another_matter(tmp_path: Path) -> None:
    extra = {"store": "{tmp}", "load": "async", "async_saves": True, "save_delay": 3}
    case = [
        *ROUND_TRIP[:3],
        {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 12}},
        {"run": {}},
    ]
    run = run_case(REFERENCE, case, tmp_path, engine="vllm", scheduling="async", extra=extra)
    found = select(run.trace, "transfer.reported", req="b")
    assert {event["direction"] for event in found} == {"send", "recv"} and not any(
        event["second"] for event in found
    )
