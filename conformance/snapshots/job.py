# SPDX-License-Identifier: Apache-2.0
"""One session of `kvconform snapshot`: the cases to record, their files, and their results."""

from __future__ import annotations

import fnmatch
import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvconform.compat.installed import check_vllm
from kvconform.config.catalogue import check_servers, lacking
from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract.case import Case
from kvconform.contract.loader import Spec, load_spec
from kvconform.contract.profile import select as select_profile
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.files import scratch_root
from kvconform.process import scratch
from kvconform.process.servers import Servers
from kvconform.snapshots import normalise
from kvconform.snapshots.document import KINDS, document, dumps, tensors
from kvconform.snapshots.record import cells, record, suits
from kvconform.snapshots.store import Store, StoreExtension

PROFILE = "golden"


@dataclass
class CaseResult:
    """Result of a case: `same`, `changed`, `new`, `missing`, `skipped`, or `error`.

    `sentences`: the differences, or why the case was skipped.
    """

    case: str
    outcome: str
    sentences: list[str] = field(default_factory=list)


class Job:
    """One session: settings, store and results. `updating`: store what differs."""

    def __init__(self, settings: Settings, directory: Path, *, updating: bool) -> None:
        """Read the index. UsageError for another connector's store, an old format, unknown ids."""
        self.settings, self.updating = settings, updating
        self.vllm, self.warnings = check_vllm()
        self.warnings += lacking(settings.catalogue)
        check_servers(settings.servers)
        self.spec: Spec = load_spec()
        self.store = Store(directory, self.vllm)
        self.before = self.store.compared_with
        self.engine = "vllm" if settings.engine == "vllm" else "reference"
        self.store.set_about(
            {
                "connector": settings.connector,
                "extra_config": settings.extra_config,
                "engine": self.engine,
                "seed": settings.seed,
            }
        )
        self.rules = [
            *normalise.built_in(),
            *normalise.validated(settings.snapshot_rules, "snapshot_rules"),
        ]
        self.cases = self._chosen()
        self.results: list[CaseResult] = []
        self.looked_at: set[str] = set()
        self.error: UsageError | EnvironmentProblem | None = None
        self._numbers = itertools.count()
        self._scratch = scratch.make("snapshot", scratch_root())
        self._servers = Servers(
            settings, self._scratch / "servers", Path(settings.report_dir) / "logs"
        )
        StoreExtension.current, StoreExtension.updating = self.store, updating

    def prepare(self) -> None:
        """Start the servers, then import and construct the connector.

        UsageError or EnvironmentProblem if one of them fails.
        """
        from kvconform.run import smoke

        sys.path += [folder for folder in self.settings.pythonpath if folder not in sys.path]
        self.settings = self._servers.settle(self.settings)
        self._servers.up()
        os.environ.update(self.settings.env)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        smoke.check(smoke.target_of(self.settings), self._scratch, 120.0)

    def _chosen(self) -> list[Case]:
        if not self.settings.select:
            _, names = select_profile(self.spec.profiles, PROFILE, [], self.spec.cases.values())
        else:
            names = _matching(self.settings.select, self.spec)
        cases = [
            self.spec.cases[name] for name in names if self.spec.cases[name].in_force(self.vllm)
        ]
        chosen = [case for case in cases if suits(case) and self.engine in case.engines]
        if not chosen:
            raise UsageError(
                "none of the selected cases can have snapshots: that takes one engine, one rank and"
                " one KV cache group"
            )
        return chosen

    def files(self, case: Case) -> dict[str, bytes] | None:
        """Record a case and return its files: name in the store -> bytes. Raises as `record` does.

        None if the connector lacks a capability that the case needs.
        """
        from kvconform.run import smoke

        target: Target = smoke.target_of(self.settings)
        found = []
        for variant in cells(case, self.engine):
            tmp = self._scratch / f"{next(self._numbers)}-{variant.scheduling}"
            recording = record(variant, target, self.rules, seed=self.settings.seed, tmp=tmp)
            if recording is not None:
                found.append(recording)
        if not found:
            return None
        documents = {
            f"{case.id}/{kind}.json": dumps(document(kind, case.id, found)) for kind in KINDS
        }
        return documents | {f"{case.id}/stored.safetensors": tensors(found)}

    def unused(self) -> set[str]:
        """Return this version's snapshots that belong to no case; none if cases were selected."""
        return set() if self.settings.select else self.store.names() - self.looked_at

    def touched(self, results: Iterable[CaseResult]) -> list[str]:
        """Return the requirements that the cases of `results` exercise."""
        cases = [self.spec.cases[result.case] for result in results]
        rules = {rule for case in cases for rule in case.rules}
        bugs = {bug for case in cases for bug in case.bugs}
        return sorted(
            req.id
            for req in self.spec.requirements.values()
            if rules & set(req.rules) or bugs & set(req.bugs)
        )

    def close(self) -> None:
        """Stop the servers and remove the temporary directories of the runs."""
        self._servers.down()
        scratch.discard(self._scratch)


def _matching(entries: Iterable[str], spec: Spec) -> list[str]:
    """Return the cases that `-k` names. UsageError for an entry that names none."""
    found: set[str] = set()
    for entry in entries:
        some = {
            case.id
            for case in spec.cases.values()
            if entry == case.area or fnmatch.fnmatchcase(case.id, entry)
        }
        if not some:
            raise UsageError(
                f"there is no case {entry!r}: -k takes ids of cases, areas, and globs over ids"
            )
        found |= some
    return [name for name in spec.cases if name in found]
