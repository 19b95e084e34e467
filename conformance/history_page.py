# SPDX-License-Identifier: Apache-2.0
"""docs/history.md and docs/engine-findings.md, from what `nox -s history -- --json FILE` has found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from kvconform.history import Entry, entries
from kvconform.load import Spec, load_spec
from kvconform.requirement import version_key

_HISTORY = """\
# Real bugs, found in the releases that have them

`nox -s history` installs each of these vLLM releases (without a GPU: its Python code over the default release's dependencies) and runs the
cases named here against the connector and the scheduler as they were shipped. It fails when one of the bugs is not found. Releases that are
older than what `kvconform run` supports run well enough for the cases named. A release that is not named was not tried. This page
is made from such a run: `nox -s history -- --json FILE`, then `python -m kvconform.history_page FILE`.

{{ count }} bugs over {{ releases | length }} releases: {{ releases | join(", ") }}.
{% for entry, rows in found %}
## {{ entry.id }} ({{ entry.bug }})

{{ entry.text }}

Judged: {{ "`" + entry.connector + "`" }}, {{ entry.scheduling | join(" and ") }} scheduling, cases {{ entry.cases | join(", ") }}.
{% for row in rows %}
- vLLM {{ row.release }}: **{{ row.name }}** in {{ row.said }}
{%- endfor %}
{% endfor %}"""

_FINDINGS = """\
# What vLLM itself does wrong

Guarantees that connectors rely on and that vLLM {{ newest }} was seen to break. Where vLLM promises nothing, or declares a limit, the
finding says so. They say nothing about a connector and do not change its
verdict: the cases run only when they are named, or with `kvconform run CONNECTOR --profile findings`. A release
that is not named was not tried. This page is made like [history.md](history.md).
{% for entry, rows, requirements, case in found %}
## {{ entry.id }}

{{ entry.text }}
{%- if entry.note %}

{{ entry.note }}
{%- endif %}

| | |
|---|---|
{% for req in requirements -%}
| guarantee | `{{ req.id }}`: {{ req.text }} {{ req.why }} |
| evidence | `{{ req.source.file }}`, `{{ req.source.symbol }}` |
{% endfor -%}
{% if entry.also -%}
| breaks, too | {{ "`" + entry.also | join("`, `") + "`" }} |
{% endif -%}
| known as | {{ entry.bug }} |
| seen in | {{ rows | map(attribute="release") | unique | join(", ") }} |

```yaml
{{ case }}```

{{ rows[-1].said }}

    kvconform run {{ entry.connector }} -k {{ entry.cases[0] }}
{% endfor %}"""


def found_in(entry: Entry, lines: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """What was found of an entry: release, requirement and the sentence, by release; the newest line of a release counts."""
    by_release = {line["release"]: line["found"] for line in lines if line["id"] == entry.id and line["found"]}
    return [
        {"release": release, "name": name, "said": " ".join(said.split())}
        for release in sorted(by_release, key=version_key)
        for name, said in by_release[release].items()
    ]


def history_page(known: Sequence[Entry], lines: Sequence[dict[str, Any]]) -> str:
    """Every entry of which something was found."""
    found = [(entry, rows) for entry in known if (rows := found_in(entry, lines))]
    releases = sorted({row["release"] for _, rows in found for row in rows}, key=version_key)
    return _render(_HISTORY, found=found, releases=releases, count=len({entry.bug for entry, _ in found}))


def findings_page(known: Sequence[Entry], lines: Sequence[dict[str, Any]], spec: Spec, folder: Path) -> str:
    """The entries whose case belongs to the findings, with the case's text from `folder` (spec/cases/findings)."""
    found = [
        (
            entry,
            rows,
            [spec.requirements[name] for name in entry.fails if name.startswith("engine.")],
            (folder / f"{entry.cases[0]}.yaml").read_text(),
        )
        for entry in known
        if spec.cases[entry.cases[0]].area == "findings" and (rows := found_in(entry, lines))
    ]
    newest = max((rows[-1]["release"] for _, rows, _, _ in found), key=version_key, default="")
    return _render(_FINDINGS, found=found, newest=newest)


def _render(template: str, **values: Any) -> str:
    return Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(template).render(values).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write both pages into docs/ of the checkout that is the current directory."""
    parser = argparse.ArgumentParser(prog="python -m kvconform.history_page", description=__doc__)
    parser.add_argument("file", type=Path, help="what `python -m kvconform.history --json` wrote")
    options = parser.parse_args(arguments)
    lines = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    spec = load_spec()
    known = entries(spec)
    Path("docs/history.md").write_text(history_page(known, lines), encoding="utf-8")
    Path("docs/engine-findings.md").write_text(findings_page(known, lines, spec, Path("spec/cases/findings")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
