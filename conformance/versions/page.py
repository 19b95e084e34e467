# SPDX-License-Identifier: Apache-2.0
"""The report of a matrix: `versions.md`, `versions.json`, and a few lines for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kvconform import __version__
from kvconform.config.settings import Settings
from kvconform.report.pages import render
from kvconform.versions.changes import ASPECTS, Change, as_data
from kvconform.versions.matrix import Release
from kvconform.words import listed

LISTED = 10
"""Sorts of changes that the page lists under one heading; the JSON file has all."""


def write(
    folder: Path,
    releases: Sequence[Release],
    changes: Sequence[Change],
    settings: Settings,
    *,
    snapshots: bool,
    all_runs: bool,
) -> None:
    """Write both files into `folder`."""
    about = {
        "connector": settings.connector,
        "suite": __version__,
        "seed": settings.seed,
        "engines": settings.engines,
        "profile": settings.profile,
    }
    data = {**about, "snapshots": snapshots, "all_runs": all_runs}
    data |= {
        "releases": [_release(each) for each in releases],
        "changes": [as_data(change) for change in changes],
    }
    (folder / "versions.json").write_text(
        json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (folder / "versions.md").write_text(
        markdown(releases, changes, settings, snapshots=snapshots, all_runs=all_runs),
        encoding="utf-8",
    )


def _release(release: Release) -> dict[str, Any]:
    found = release.found
    return {
        "release": release.release,
        "vllm": release.vllm,
        "verdict": release.verdict,
        "problem": release.problem,
        "reasons": found.reasons if found else [],
        "failed": found.failed if found else [],
        "guarantees_broken": found.engine_failed if found else [],
        "messages": release.messages,
        "harness_errors": release.harness,
        "status": {name: verdict.value for name, verdict in found.status.items()} if found else {},
        "counts": found.counts if found else {},
        "runs": len(release.verdicts),
        "deaths": release.deaths,
        "snapshots": len(release.snapshots),
        "no_snapshot": release.no_snapshot,
        "warnings": release.warnings,
        "seconds": release.seconds,
        "signatures": release.signatures,
    }


def markdown(
    releases: Sequence[Release],
    changes: Sequence[Change],
    settings: Settings,
    *,
    snapshots: bool,
    all_runs: bool,
) -> str:
    """Return the page. It holds no times, so the same connector and releases give the same page."""
    left = [f"engine {name}" for name in ("reference", "vllm") if name not in settings.engines]
    if not all_runs:
        left.append(
            "all but the first block size and queue depth of each case, scheduling and model runner"
        )
    if not snapshots:
        left.append("snapshots (metadata and stored KV)")
    return render(
        resources.files("kvconform.versions") / "assets",
        "versions.md.jinja",
        {"cut": _cut, "names": _names, "words": _words},
        releases=releases,
        changes=changes,
        settings=settings,
        version=__version__,
        left_out=left,
        aspects=ASPECTS,
        most=LISTED,
    )


def _names(names: Iterable[str]) -> str:
    """Return the names, or the first of them and how many more there are."""
    return listed([f"`{name}`" for name in names], 2 * LISTED)


def _words(verdict: str) -> str:
    return (
        verdict
        if verdict in ("PASS", "FAIL", "ERROR", "XFAIL", "XPASS")
        else verdict.lower().replace("_", " ")
    )


def _cut(text: str, length: int) -> str:
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= length else flat[: length - 3] + "..."


def summary(release: Release) -> str:
    """Return one line about a release, for the terminal."""
    if release.found is None:
        return f"{release.release:<8} NOT RUN  {release.problem or 'nothing was judged'}"
    failed = f": {', '.join(release.found.failed)}" if release.found.failed else ""
    more = f"  ({release.problem})" if release.problem else ""
    size = f"{len(release.verdicts)} runs, {release.seconds:.0f} s"
    return f"{release.release:<8} {release.verdict}{failed}  {size}{more}"


def line(change: Change) -> str:
    """Return one line about a change, for the terminal."""
    counts = {
        "hooks new or gone": len(change.hooks_new) + len(change.hooks_gone),
        "signatures": len(change.signatures),
        "requirements flipped": len(change.flipped),
        "changes of hook order": len(change.order),
        "sorts of metadata changes": len(change.metadata),
        "of stored KV": len(change.stored),
        "engine traces": change.engine_compared - change.engine_same,
    }
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{change.old} -> {change.new}: {said or 'nothing changed'}"
