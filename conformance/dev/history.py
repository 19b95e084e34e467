# SPDX-License-Identifier: Apache-2.0
"""Real bugs in the original code: released connectors and engines that the suite must still find wrong.

`spec/history.yaml` lists them with the vLLM releases that have them; `nox -s history` installs those releases one after the other and runs
this module in each. It judges the entries of the installed release, and fails when one of them passes.


docs/history.md and docs/engine-findings.md, from what `nox -s history -- --json FILE` has found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconform.compat.installed import vllm_version
from kvconform.contract.loader import Spec, entries, load_spec
from kvconform.contract.references import Entry
from kvconform.contract.requirement import version_key


def of_release(known: list[Entry], version: str) -> list[Entry]:
    """The entries that name a release (`0.26.0+cpu` is 0.26.0)."""
    return [entry for entry in known if version_key(version) in map(version_key, entry.releases)]


def as_of(entry: Entry, spec: Spec, release: str) -> Spec:
    """What `release` is judged by: what is in force there, and what `entry` names. What was mended later was as wrong before."""
    chosen = {
        name: req
        for name, req in spec.requirements.items()
        if name in entry.fails or req.in_force(release)
    }
    return dataclasses.replace(spec, requirements=chosen)


def examine(entry: Entry, spec: Spec, release: str, tmp: Path) -> dict[str, str]:
    """Requirement id -> what its first FAIL says, over all runs of the entry. Changes nothing outside `tmp`."""
    from kvconform.config.target import Target
    from kvconform.run.case import run_and_judge

    target = Target(entry.connector, dict(entry.extra_config), half=entry.half)
    found: dict[str, str] = {}
    for number, variant in enumerate(_variants(entry, spec)):
        report = run_and_judge(
            variant, target, as_of(entry, spec, release), seed=0, tmp=tmp / str(number)
        )
        if report.harness_error is not None:
            found.setdefault(
                "harness", f"{variant.id}: {report.harness_error.strip().splitlines()[-1]}"
            )
        for row in report.rows:
            if row["verdict"] == "FAIL":
                found.setdefault(
                    row["requirement"],
                    f"{variant.id}, step {row.get('step')}: {row.get('message')}",
                )
    return found


def _variants(entry: Entry, spec: Spec) -> Iterator[Any]:
    for name in entry.cases:
        variants = spec.cases[name].variants(["vllm"], entry.scheduling)
        yield from (variant for variant in variants if variant.runner == entry.runner)


_HISTORY = """\
# Real bugs, found in the releases that have them

`nox -s history` installs each of these vLLM releases (without a GPU: its Python code over the default release's dependencies) and runs the
cases named here against the connector and the scheduler as they were shipped. It fails when one of the bugs is not found. Releases that are
older than what `kvconform run` supports run well enough for the cases named. A release that is not named was not tried. This page
is made from such a run: `nox -s history -- --json FILE`, then `python -m kvconform.dev.history --pages FILE`.

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
    by_release = {
        line["release"]: line["found"] for line in lines if line["id"] == entry.id and line["found"]
    }
    return [
        {"release": release, "name": name, "said": " ".join(said.split())}
        for release in sorted(by_release, key=version_key)
        for name, said in by_release[release].items()
    ]


def history_page(known: Sequence[Entry], lines: Sequence[dict[str, Any]]) -> str:
    """Every entry of which something was found."""
    found = [(entry, rows) for entry in known if (rows := found_in(entry, lines))]
    releases = sorted({row["release"] for _, rows in found for row in rows}, key=version_key)
    return _render(
        _HISTORY, found=found, releases=releases, count=len({entry.bug for entry, _ in found})
    )


def findings_page(
    known: Sequence[Entry], lines: Sequence[dict[str, Any]], spec: Spec, folder: Path
) -> str:
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
    return (
        Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        .from_string(template)
        .render(values)
        .rstrip()
        + "\n"
    )


def write_pages(results: Path) -> None:
    """Write docs/history.md and docs/engine-findings.md from a file that `--json` made. The current directory is the checkout."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    spec = load_spec()
    known = entries(spec)
    Path("docs/history.md").write_text(history_page(known, lines), encoding="utf-8")
    Path("docs/engine-findings.md").write_text(
        findings_page(known, lines, spec, Path("spec/cases/findings")), encoding="utf-8"
    )


def main(arguments: list[str] | None = None) -> int:
    """Examine the entries of the installed release; 0 if each is found, else 1."""
    parser = argparse.ArgumentParser(prog="python -m kvconform.dev.history", description=__doc__)
    parser.add_argument(
        "id", nargs="*", help="entries to examine (default: all of the installed release)"
    )
    parser.add_argument(
        "--releases",
        action="store_true",
        help="print the releases that spec/history.yaml names, and do nothing",
    )
    parser.add_argument("--json", type=Path, help="append the results to this file, one line each")
    parser.add_argument(
        "--pages",
        metavar="FILE",
        type=Path,
        help="write docs/history.md and docs/engine-findings.md from that file",
    )
    options = parser.parse_args(arguments)
    if options.pages:
        write_pages(options.pages)
        return 0
    spec = load_spec()
    known = entries(spec)
    if options.releases:
        print(
            "\n".join(
                sorted({release for entry in known for release in entry.releases}, key=version_key)
            )
        )
        return 0
    release = (vllm_version() or "0").partition("+")[0]
    mine = [
        entry for entry in of_release(known, release) if not options.id or entry.id in options.id
    ]
    table, missed = Table("bug", "entry", "requirement", "what it says", title=f"vLLM {release}"), 0
    for entry in mine:
        with tempfile.TemporaryDirectory(prefix="kvconform-history-") as tmp:
            found = examine(entry, spec, release, Path(tmp))
        absent = [name for name in entry.fails if name not in found]
        missed += bool(absent)
        shown = [*entry.fails, *(["harness"] if absent and "harness" in found else [])]
        for name in shown:
            table.add_row(
                entry.bug,
                entry.id,
                name,
                escape(found[name]) if name in found else "[red]not found[/]",
            )
        if options.json:
            line = {
                "release": release,
                "id": entry.id,
                "found": {name: found[name] for name in entry.fails if name in found},
            }
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
    console = Console(width=160)
    console.print(table)
    console.print(f"{len(mine) - missed} of {len(mine)} bugs found in vLLM {release}")
    return 1 if missed or not mine else 0


if __name__ == "__main__":
    sys.exit(main())
