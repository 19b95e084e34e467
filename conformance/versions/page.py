# SPDX-License-Identifier: Apache-2.0
"""The report of a matrix: `versions.md`, `versions.json`, and a few lines for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvconform import __version__
from kvconform.config.settings import Settings
from kvconform.versions.changes import ASPECTS, Change, Group, as_data
from kvconform.versions.matrix import Release

LISTED = 10
"""Sorts of changes that the page lists under one heading; the JSON file has all."""

HEAD = """# {connector} in {count} vLLM releases

`nox -s versions` judges a connector in several releases and reports what changed between them.
Each release is its Python code over the default release's dependencies, on the CPU.
Made by kvconform {version}{how}.

{scope}
"""

SCOPE = """Left out: {left_out}.
`nox -s conformance -- --vllm RELEASE` runs everything in one release."""


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
    engines = f"engine{'s' * (len(settings.engines) > 1)} {' and '.join(settings.engines)}"
    how = f", seed {settings.seed}, {engines}"
    how += f", profile {settings.profile}" if settings.profile != "core" else ""
    how += f", only {', '.join(settings.select)}" if settings.select else ""
    scope = SCOPE.format(left_out="; ".join(left)) if left else ""
    name = settings.connector.rpartition(":")[2]
    out = [
        HEAD.format(connector=name, count=len(releases), version=__version__, how=how, scope=scope)
    ]
    out += [
        "| release | verdict | runs | exercised | failed | guarantees broken | snapshots |",
        "|---|---|---|---|---|---|---|",
    ]
    out += [_row(each) for each in releases]
    out += [f"\n{line}" for each in releases for line in _trouble(each)]
    out += [f"\n- {line}" for each in releases for line in _failures(each)]
    for change in changes:
        out += ["", f"## {change.old} → {change.new}", "", *_change(change)]
    return "\n".join(out) + "\n"


def _row(release: Release) -> str:
    found = release.found
    numbers = [""] * 4
    if found is not None:
        numbers = [
            str(len(release.verdicts)),
            f"{found.exercised} of {found.total}",
            _names(found.failed),
            _names(found.engine_failed),
        ]
    cells = [release.release, release.verdict, *numbers, str(len(release.snapshots) or "")]
    return f"| {' | '.join(cells)} |"


def _trouble(release: Release) -> list[str]:
    """Return why runs of a release are missing, and which ones ended the process."""
    out = []
    if release.problem:
        state = "was not run" if release.found is None else "is incomplete"
        out.append(f"**{release.release} {state}**: {release.problem}")
    if release.deaths:
        names = ", ".join(f"`{name}`" for name in release.deaths)
        out.append(f"{release.release}: the process died in {names}")
    if release.no_snapshot:
        first = min(release.no_snapshot.values())
        count = len(release.no_snapshot)
        out.append(f"{release.release}: no snapshots of {count} runs: {first}")
    return out


def _failures(release: Release) -> list[str]:
    out = []
    for error, runs in release.harness.items():
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        where = f"`{runs[0]}`{more}"
        out.append(f"{release.release}: the harness failed in {where}: {_cut(error, 300)}")
    for requirement, text in release.messages.items():
        out.append(f"{release.release}, `{requirement}`: {_cut(text, 400)}")
    return out


def _change(change: Change) -> list[str]:
    out = _interface(change)
    if out:
        out = ["The interface and the requirements:", "", *out, ""]
    else:
        out = ["The interface and the requirements: nothing changed.", ""]
    which = "with the connector (those in which the engine does the same)"
    out += _section(f"Hooks of {change.order_compared} runs {which}", change.order)
    if change.snapshots:
        runs = f"of {change.snapshots} runs"
        out += _section(f"Metadata and answers {runs}", change.metadata)
        out += _section(f"Answers of other hooks {runs}", change.answers)
        out += _section(f"Stored KV {runs}", change.stored)
    if change.engine_compared:
        same = f"{change.engine_same} of {change.engine_compared} runs are the same"
        out += [f"The engine without a connector: {same}{':' if change.engine else '.'}", ""]
        for aspect, groups in change.engine.items():
            count = len({name for group in groups for name in group.where})
            out.append(f"- {ASPECTS[aspect]}: {count} runs")
            out += [f"    {line}" for line in _groups(groups)[: LISTED // 2]]
        out += [""] if change.engine else []
    return out[:-1]


def _interface(change: Change) -> list[str]:
    out = [f"- new hook `{name}`: `{text}`" for name, text in change.hooks_new.items()]
    out += [f"- hook `{name}` is gone" for name in change.hooks_gone]
    out += [f"- `{name}` was `{was}`, is `{now}`" for name, (was, now) in change.signatures.items()]
    if change.fields_new:
        out.append(f"- new fields: {_names(change.fields_new)}")
    if change.fields_gone:
        out.append(f"- fields that are gone: {_names(change.fields_gone)}")
    for name, (before, after) in change.flipped.items():
        out.append(f"- `{name}` was {_words(before)}, is {_words(after)}")
    if change.begin:
        out.append(f"- in force from here: {_names(change.begin)}")
    if change.cease:
        out.append(f"- no longer in force: {_names(change.cease)}")
    rest = [item for item in change.runs_flipped.items() if item[0] not in change.flipped]
    if rest:
        most = sorted(rest, key=lambda item: -item[1])[:LISTED]
        names = ", ".join(f"`{name}` ({count})" for name, count in most)
        more = f" and {len(rest) - len(most)} more" if len(rest) > len(most) else ""
        out.append(f"- verdicts of single runs changed, the requirement's did not: {names}{more}")
    return out


def _section(title: str, groups: Sequence[Group]) -> list[str]:
    if not groups:
        return [f"{title}: the same.", ""]
    return [f"{title}:", "", *_groups(groups), ""]


def _groups(groups: Sequence[Group]) -> list[str]:
    out = []
    for group in groups[:LISTED]:
        more = f" and {len(group.where) - 1} more" if len(group.where) > 1 else ""
        out.append(f"- {_cut(group.what, 300)} (`{group.where[0]}`{more})")
    rest = groups[LISTED:]
    return [*out, f"- and {len(rest)} more sorts of changes, in versions.json"] if rest else out


def _names(names: Iterable[str]) -> str:
    """Return the names, or the first of them and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - 2 * LISTED} more" if len(listed) > 2 * LISTED else ""
    return ", ".join(f"`{name}`" for name in listed[: 2 * LISTED]) + more


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
