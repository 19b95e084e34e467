# SPDX-License-Identifier: Apache-2.0
"""report.jsonl: written line by line while the run goes on, and replaced by a sorted one at its end.

The lines hold no times, so the same connector, settings and seed give the same bytes, however many workers there were.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from kvconform import __version__
from kvconform.adapters.registry import titles
from kvconform.config.selection import suite_digest
from kvconform.judge.aggregate import unasked
from kvconform.judge.verdict import Row
from kvconform.report.collector import CaseNotes, Collector
from kvconform.report.models import CaseLine, FooterLine, HeaderLine

NAME = "report.jsonl"
NOT_JUDGED_BY = {
    "workers",
    "report_dir",
    "trace",
    "debug",
    "setup",
    "teardown",
    "setup_timeout",
    "env",
    "pythonpath",
    "file",
    "shard",
}
"""Settings that concern the machine and not the answer; the environment may hold secrets."""


class Stream:
    """The growing file. Every line is flushed, so that whatever happens next, what was judged is there."""

    def __init__(self, folder: Path, header: HeaderLine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._file: IO[str] = self.path.open("w", encoding="utf-8")
        self.write([line_of(header)])

    def write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def header_of(collector: Collector, warnings: list[str]) -> HeaderLine:
    """The report's first line, as far as it is known now. A shard's says all that `kvconform merge` has to know."""
    settings, selection = collector.settings, collector.selection
    extra: dict[str, Any] = {
        "extra_config": settings.extra_config,
        "strict": settings.strict,
        "select": settings.select,
    }
    if collector.places:
        extra["places"] = dict(
            sorted(collector.places.items())
        )  # hook -> path:line in the connector's own source
    if selection.shard is not None:
        judged_by = settings.model_dump(mode="json", exclude=NOT_JUDGED_BY)
        extra |= {"shard": str(selection.shard), "digest": suite_digest(), "settings": judged_by}
    return HeaderLine(
        suite=__version__,
        vllm=collector.vllm,
        connector=settings.connector,
        engines=settings.engines,
        scheduling=settings.schedulings,
        device=settings.target_device,
        adapters=titles(settings.adapters),
        seed=settings.seed,
        profile=settings.profile,
        capabilities=collector.capabilities,
        capability_sources=collector.sources,
        cases=len(selection.order()),
        requirements=len(selection.shown),
        warnings=list(
            dict.fromkeys([*warnings, *unasked(collector.capabilities, collector.sources)])
        ),
        extra=extra,
    )


def line_of(model: HeaderLine | CaseLine | FooterLine) -> str:
    """One line; what is None or empty is left out."""
    data = {
        key: value
        for key, value in model.model_dump(mode="json").items()
        if value not in (None, [], {})
    }
    return _text(data)


def row_line(row: Row) -> str:
    return _text({"type": "row", **row.to_dict()})


def note_line(note: CaseNotes) -> str | None:
    """The line about a run, or None if there is nothing to say."""
    if not (note.unmet or note.timelines or note.harness_error):
        return None
    line = CaseLine(
        variant=note.variant,
        provoked=note.unmet,
        timeline=note.timelines,
        story=note.story,
        harness_error=note.harness_error,
    )
    return line_of(line)


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False)


def rewrite(
    path: Path,
    header: HeaderLine,
    rows: Iterable[Row],
    notes: Iterable[CaseNotes],
    footer: FooterLine,
) -> None:
    """Replace the file by the complete, sorted one; readers see the old or the new one, never half of it."""
    by_variant = {note.variant: note for note in notes}
    lines = [line_of(header)]
    current = None
    for row in rows:
        variant = row.run
        if variant != current:
            _about(lines, by_variant.pop(current, None) if current else None)
            current = variant
        lines.append(row_line(row))
    _about(lines, by_variant.pop(current, None) if current else None)
    for note in by_variant.values():
        _about(lines, note)
    lines.append(line_of(footer))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".report-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    os.chmod(name, 0o644)
    os.replace(name, path)


def _about(lines: list[str], note: CaseNotes | None) -> None:
    line = note_line(note) if note is not None else None
    if line is not None:
        lines.append(line)
