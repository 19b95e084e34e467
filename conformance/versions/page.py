# SPDX-License-Identifier: Apache-2.0
"""The report of a matrix: `versions.md` for people, `versions.json` for programs, a few lines for the terminal."""

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
"""Sorts of changes that are listed under one heading; the JSON file has all."""

HEAD = """# {connector} in {count} vLLM releases

`nox -s versions` judges a connector in each of these releases (the release's Python code over the default release's dependencies, on the
CPU) and says what changed from one to the next. Made by kvconform {version}{how}.

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
    """Write both files."""
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
    """The page. It holds no times, so that the same connector and releases give the same page."""
    left = [f"engine {name}" for name in ("reference", "vllm") if name not in settings.engines]
    left += (
        []
        if all_runs
        else [
            "all but the first block size and queue depth of each case, scheduling and model runner"
        ]
    )
    left += [] if snapshots else ["snapshots (metadata and stored KV)"]
    how = f", seed {settings.seed}, engine{'s' * (len(settings.engines) > 1)} {' and '.join(settings.engines)}"
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
    for each in releases:
        found = each.found
        numbers = (
            [
                str(len(each.verdicts)),
                f"{found.exercised} of {found.total}",
                _names(found.failed),
                _names(found.engine_failed),
            ]
            if found
            else [""] * 4
        )
        out.append(
            f"| {each.release} | {each.verdict} | {' | '.join(numbers)} | {len(each.snapshots) or ''} |"
        )
    for each in releases:
        out += (
            [
                f"\n**{each.release} {'was not run' if each.found is None else 'is incomplete'}**: {each.problem}"
            ]
            if each.problem
            else []
        )
        out += (
            [
                f"\n{each.release}: the process died in {', '.join(f'`{name}`' for name in each.deaths)}"
            ]
            if each.deaths
            else []
        )
        unable = sorted(set(each.no_snapshot.values()))
        out += (
            [f"\n{each.release}: no snapshots of {len(each.no_snapshot)} runs: {unable[0]}"]
            if unable
            else []
        )
    for release in releases:
        for error, runs in release.harness.items():
            more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
            out.append(
                f"\n- {release.release}: the harness failed in `{runs[0]}`{more}: {_cut(error, 300)}"
            )
        for requirement, text in release.messages.items():
            out.append(f"\n- {release.release}, `{requirement}`: {_cut(text, 400)}")
    for change in changes:
        out += ["", f"## {change.old} → {change.new}", "", *_change(change)]
    return "\n".join(out) + "\n"


def _change(change: Change) -> list[str]:
    out: list[str] = []
    out += [f"- new hook `{name}`: `{text}`" for name, text in change.hooks_new.items()]
    out += [f"- hook `{name}` is gone" for name in change.hooks_gone]
    out += [f"- `{name}` was `{was}`, is `{now}`" for name, (was, now) in change.signatures.items()]
    out += [f"- new fields: {_names(change.fields_new)}"] if change.fields_new else []
    out += [f"- fields that are gone: {_names(change.fields_gone)}"] if change.fields_gone else []
    out += [
        f"- `{name}` was {_words(was)}, is {_words(now)}"
        for name, (was, now) in change.flipped.items()
    ]
    out += [f"- in force from here: {_names(change.begin)}"] if change.begin else []
    out += [f"- no longer in force: {_names(change.cease)}"] if change.cease else []
    rest = {
        name: count for name, count in change.runs_flipped.items() if name not in change.flipped
    }
    if rest:
        most = sorted(rest.items(), key=lambda item: -item[1])[:LISTED]
        more = f" and {len(rest) - len(most)} more" if len(rest) > len(most) else ""
        out.append(
            f"- verdicts of single runs changed, the requirement's did not: {', '.join(f'`{n}` ({c})' for n, c in most)}{more}"
        )
    out = (
        ["The interface and the requirements:", "", *out, ""]
        if out
        else ["The interface and the requirements: nothing changed.", ""]
    )
    out += _section(
        f"Hooks of {change.order_compared} runs with the connector (those in which the engine does the same)",
        change.order,
    )
    for title, groups in (
        ("Metadata and answers", change.metadata),
        ("Answers of other hooks", change.answers),
        ("Stored KV", change.stored),
    ):
        out += _section(f"{title} of {change.snapshots} runs", groups) if change.snapshots else []
    if change.engine_compared:
        same = f"{change.engine_same} of {change.engine_compared} runs are the same"
        out += [f"The engine without a connector: {same}{'.' if not change.engine else ':'}", ""]
        for aspect, groups in change.engine.items():
            runs = len({name for group in groups for name in group.where})
            out += [
                f"- {ASPECTS[aspect]}: {runs} runs",
                *(f"    {line}" for line in _groups(groups)[: LISTED // 2]),
            ]
        out += [""] if change.engine else []
    return out[:-1]


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
    """The names, or the first of them and how many more."""
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
    """One line about a release, when it is done."""
    if release.found is None:
        return f"{release.release:<8} NOT RUN  {release.problem or 'nothing was judged'}"
    failed = f": {', '.join(release.found.failed)}" if release.found.failed else ""
    more = f"  ({release.problem})" if release.problem else ""
    return f"{release.release:<8} {release.verdict}{failed}  {len(release.verdicts)} runs, {release.seconds:.0f} s{more}"


def line(change: Change) -> str:
    """One line about a change, for the terminal."""
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
