# SPDX-License-Identifier: Apache-2.0
"""The test that a session of `kvconform snapshot` collects, one item per case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvconform.contract.case import Case
from kvconform.errors import KvconformError
from kvconform.snapshots.plugin import JOB
from kvconform.snapshots.store import SnapshotError, StoreExtension, explain

if TYPE_CHECKING:
    from kvconform.snapshots.job import CaseResult, Job


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the test with the selected cases."""
    job: Job | None = metafunc.config.stash.get(JOB, None)
    if job is None:
        raise pytest.UsageError("load the plugin, too: -p kvconform.snapshots.plugin")
    metafunc.parametrize("case", job.cases, ids=[case.id for case in job.cases])


def test_snapshot(case: Case, snapshot: Any, pytestconfig: pytest.Config) -> None:
    """Record a case and compare it with its snapshots, or write them."""
    from kvconform.snapshots.job import CaseResult

    job = pytestconfig.stash[JOB]
    result = CaseResult(case.id, "error")  # stays if anything below raises
    job.results.append(result)
    try:
        files = job.files(case)
        if files is None:
            result.outcome = "skipped"
            result.sentences = ["the connector lacks a capability that the case needs"]
            job.looked_at |= {name for name in job.store.names() if name.startswith(f"{case.id}/")}
            pytest.skip(result.sentences[0])
        if job.updating and any(job.store.read(name) != data for name, data in files.items()):
            _same_again(job, case, files)
        outcomes = [_one(job, result, snapshot, name, data) for name, data in files.items()]
        result.outcome = next((o for o in ("changed", "missing", "new") if o in outcomes), "same")
    except KvconformError as error:
        job.error = job.error or error  # type: ignore[assignment]
        pytest.fail(error.message, pytrace=False)
    if result.outcome != "same" and not job.updating:
        pytest.fail("\n".join(result.sentences), pytrace=False)


def _same_again(job: Job, case: Case, files: dict[str, bytes]) -> None:
    """Record a case again. SnapshotError if it differs: a later check would fail."""
    again = job.files(case) or {}
    for name, data in files.items():
        if again.get(name) != data:
            first = (explain(data, again.get(name, b"")) or ["it differs"])[0]
            raise SnapshotError(
                f"{name} differs from run to run, so nothing is stored: {first}."
                " Declare a rule for it (snapshot_rules)"
            )


def _one(job: Job, result: CaseResult, snapshot: Any, name: str, data: bytes) -> str:
    """Compare or write one file of a case and return its outcome.

    SnapshotError for a file that differs from its digest or cannot be written.
    """
    job.looked_at.add(name)
    before = job.store.read(name)
    matches = data == snapshot(name=name, extension_class=StoreExtension)
    if job.updating and (not matches or job.store.read(name, exact=True) != data):
        failed = list(snapshot.executions.values())[-1].exception
        if isinstance(failed, KvconformError):
            raise failed
        raise SnapshotError(f"{name} could not be written: {failed}")
    if before is None:
        result.sentences.append(
            f"{name} {'is new' if job.updating else 'is missing: there is no such snapshot'}"
        )
        return "new" if job.updating else "missing"
    if before != data:
        result.sentences += [f"{name}: {sentence}" for sentence in explain(before, data)]
    return "same" if before == data else "changed"
