# SPDX-License-Identifier: Apache-2.0
"""Tests of bad input and bad connectors against the real engine.

Each gives one sentence and the right exit code, and nothing is lost.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from places import BAD_CONNECTORS, ROOT
from program_rig import kvconform, python
from warm_rig import Warm

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


# One worker, the reference engine, sync; the store is each case's own.
OPTIONS = (
    *("--pythonpath", str(BAD_CONNECTORS), "--workers", "1"),
    *("--engine", "reference", "--scheduling", "sync", "--extra-config", '{"store": "{tmp}"}'),
)


@pytest.mark.parametrize(
    ("connector", "sentence"),
    [
        (
            "dies_on_import:C",
            "dies_on_import:C cannot be used: the process ended in import of dies_on_import:C",
        ),
        ("exits_on_import:C", "it ends the process while it is imported (sys.exit(0))"),
        ("raises:Connector", "the constructor of raises:Connector raised KeyError: 'server'"),
    ],
)
def test_cannot_be_judged(tmp_path: Path, warm: Warm, connector: str, sentence: str) -> None:
    done = warm.run(connector, *OPTIONS, "-k", "lifecycle.api", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("kvconform: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout


def test_a_class_that_vllm_refuses_is_named_for_any_selection(tmp_path: Path, warm: Warm) -> None:
    refused = "vLLM refuses to construct two_arguments:Connector (requirement api.constructor)"
    arguments = ("two_arguments:Connector", *OPTIONS, "-k", "lifecycle.hook-order")
    done = warm.run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"kvconform: {refused}")


def test_a_class_that_vllm_refuses_is_named_before_any_run(tmp_path: Path, warm: Warm) -> None:
    arguments = ("two_arguments:Connector", *OPTIONS, "-k", "lifecycle.api,lifecycle.hook-order")
    done = warm.run(*arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "vLLM refuses to construct two_arguments:Connector" in done.stdout
    assert "running" not in done.stdout
    assert "NOT CONFORMANT" in done.stdout and "api.constructor" in done.stdout


def test_a_store_of_earlier_runs_is_named_and_nothing_is_judged(tmp_path: Path, warm: Warm) -> None:
    extra = json.dumps({"store": str(tmp_path / "store")})
    connector = "kvconform.refimpl.connector:ReferenceConnector"
    arguments = (connector, *OPTIONS[:-1], extra, "-k", "lifecycle.last-token")
    first = warm.run(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    second = warm.run(*arguments, cwd=tmp_path)
    assert second.returncode == 2, second.stdout + second.stderr
    assert "kvconform: the store holds KV of an earlier run" in second.stderr
    assert """--extra-config '{"store": "{tmp}"}'""" in second.stderr
    assert "FAIL" not in second.stdout and "CONFORMANT" not in second.stdout


@pytest.mark.parametrize(
    "how",
    [
        pytest.param([], id="forked"),
        pytest.param(["--debug"], id="new", marks=pytest.mark.long),
    ],
)
def test_a_connector_may_need_a_hash_seed_if_its_settings_prescribe_one(
    tmp_path: Path, how: list[str]
) -> None:
    """Workers are forked by a process, or new interpreters with `--debug`.

    Without the seed it is the planted defect unseen-process-hash.
    """
    (tmp_path / "kvconform.toml").write_text('[env]\nPYTHONHASHSEED = "7"\n', encoding="utf-8")
    connector = "kvconform.refimpl.defects.identity:UnseenProcessHash"
    arguments = (connector, *OPTIONS, *how, "-k", "lifecycle.restart-interpreter", "--no-server")
    done = kvconform("run", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_connector_logs_is_not_kept_alive(tmp_path: Path, warm: Warm) -> None:
    """LMCache logs time-outs like this; pytest kept the records, and so the requests."""
    arguments = ("logs_errors:Connector", *OPTIONS, "-k", "lifecycle.hook-order")
    done = warm.run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("connector", "requirement", "message"),
    [
        ("on_abort:Locks", "hook.terminates", None),
        (
            "on_abort:Stuck",
            "hook.terminates",
            "request_finished did not return within 3 s and could not be interrupted",
        ),
        (
            "on_abort:Exits",
            "hook.keeps-process",
            "the process ended in request_finished (os._exit, or a fatal signal)",
        ),
        ("on_abort:Raises", "hook.no-raise", None),
    ],
)
def test_terrible_in_one_case(
    tmp_path: Path, warm: Warm, connector: str, requirement: str, message: str | None
) -> None:
    cases = "lifecycle.abort-waiting,lifecycle.abort-finished,lifecycle.hook-order"
    # Not less: on a busy machine, a constructor takes longer than a second.
    limit = ["--hook-timeout", "3"] if requirement == "hook.terminates" else []
    arguments = (connector, *OPTIONS, "-k", cases, *limit)
    # A worker that ended is replaced: once by one that imports vLLM, else by a fork.
    if connector == "on_abort:Exits":
        done = kvconform("run", *arguments, cwd=tmp_path)
    else:
        done = warm.run(*arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    assert "Traceback" not in done.stdout
    lines: list[dict[str, Any]] = [
        json.loads(line)
        for line in (tmp_path / "kvconform-report" / "report.jsonl").read_text().splitlines()
    ]
    failed = {(row["requirement"], row["case"]) for row in lines if row.get("verdict") == "FAIL"}
    assert failed == {(requirement, "lifecycle.abort-waiting")}
    found = next(row for row in lines if row.get("verdict") == "FAIL")
    assert message is None or found["message"] == message
    assert {row["case"] for row in lines if row["type"] in ("row", "run")} == set(cases.split(","))
    assert lines[-1]["type"] == "footer"
    entries = (
        ElementTree.parse(tmp_path / "kvconform-report" / "junit.xml").getroot().iter("testcase")
    )
    names = [entry.get("name") for entry in entries]
    assert None not in names and len(names) == len(set(names)), (
        "one entry per run, also where a worker was replaced"
    )


def test_the_number_of_workers_does_not_matter(tmp_path: Path, warm: Warm) -> None:
    reports = []
    for workers in ("1", "4"):
        cases = (
            "lifecycle.api,lifecycle.hook-order,preemption.twice,speculation.mixed,identity.salt"
        )
        arguments = ("-k", cases, "--workers", workers, "--engine", "all", "--scheduling", "all")
        connector = "kvconform.refimpl.connector:ReferenceConnector"
        done = warm.run(connector, *OPTIONS, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        reports.append((tmp_path / "kvconform-report" / "report.jsonl").read_bytes())
    assert reports[0] == reports[1]


def test_the_controller_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, kvconform.cli, kvconform.session.launch; "
        "print({'vllm', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = python("-P", "-c", code, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
