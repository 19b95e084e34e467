# SPDX-License-Identifier: Apache-2.0
"""What a session of snapshots collects: one item per case."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.case import Case
from kvconform.errors import KvconformError
from kvconform.snapshots.extension import StoreExtension, explain
from kvconform.snapshots.job import CaseResult, Job
from kvconform.snapshots.plugin import JOB


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise by the selected cases."""
    job: Job | None = metafunc.config.stash.get(JOB, None)
    if job is None:
        raise pytest.UsageError("load the plugin, too: -p kvconform.snapshots.plugin")
    metafunc.parametrize("case", job.cases, ids=[case.id for case in job.cases])


def test_snapshot(case: Case, snapshot: Any, pytestconfig: pytest.Config) -> None:
    """Record a case and compare it with its snapshots, or write them."""
    job = pytestconfig.stash[JOB]
    result = CaseResult(case.id, "same")
    job.results.append(result)
    try:
        files = job.files(case)
        if files is None:
            result.outcome, result.sentences = "skipped", ["the connector cannot do what the case needs"]
            job.looked_at |= {name for name in job.store.names() if name.startswith(f"{case.id}/")}
            pytest.skip(result.sentences[0])
        for name, data in files.items():
            _one(job, result, snapshot, name, data)
    except KvconformError as error:
        job.error = job.error or error  # type: ignore[assignment]
        pytest.fail(error.message, pytrace=False)
    if result.outcome != "same" and not job.updating:
        pytest.fail("\n".join(result.sentences), pytrace=False)


def _one(job: Job, result: CaseResult, snapshot: Any, name: str, data: bytes) -> None:
    """One file of a case. Raises SnapshotError for a file that is not what was written."""
    job.looked_at.add(name)
    before = job.store.read(name)
    matches = data == snapshot(name=name, extension_class=StoreExtension)
    if job.updating:
        after = job.store.read(name)
        assert matches and after == data, f"{name} was not written"
    if before is None:
        result.outcome = "new" if job.updating else "missing"
        result.sentences.append(f"{name} {'is new' if job.updating else 'is missing: there is no such snapshot'}")
    elif before != data:
        result.outcome = "changed"
        result.sentences += [f"{name}: {sentence}" for sentence in explain(before, data)]
