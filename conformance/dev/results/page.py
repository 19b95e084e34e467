# SPDX-License-Identifier: Apache-2.0
"""docs/results/README.md and one page per family of connectors, from digests, findings and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvconform.config import catalogue
from kvconform.contract.loader import Spec
from kvconform.contract.requirement import Source
from kvconform.dev.results.digest import Area, Digest
from kvconform.dev.results.finding import Finding
from kvconform.judge.aggregate import called
from kvconform.live.random import PAIR_REQUESTS

ENGINES = ("reference", "vllm", "live")
MADE = "<!-- Made by `python -m kvconform.dev.results pages`: change the findings, the notes or the reports, not this page. -->\n"

HEAD = """# Real connectors, judged

{made}
What other people wrote and ship, run by this suite. `nox -s conformance -- --connector catalogue:NAME` (and `--engine live`) repeats
each line from nothing. A connector's page has its areas and its findings.

A finding is *confirmed* when its minimal case reproduces it in a fresh environment with stock code, when adapter and emulation are ruled
out, and when vLLM's source supports the requirement. Everything else is an *open question*: not more than that. NOT CONFORMANT says that
a requirement failed, and nothing yet about how much that matters to anybody. `python -m kvconform.dev.results reproduce` runs the findings'
cases with what is installed, and says which still fail as they say.

"""

COUNTS = """
*loads*: how many loads were judged when the engine relied on what they had brought. In brackets, of runs from before that was counted: how
often anything about loads was judged, calls that load nothing among them. *saves*: how often anything about saved KV was judged.
"""

LEGEND = """In each cell: engine reference, vllm, live. `✓` all that was exercised holds · `✗` a requirement that counts failed · `!` only
advice (SHOULD, MAY) was not met · `b` what failed is explained by another failure · `·` nothing was exercised, or can be seen · `u` not
what this connector sets out to do · ` ` not run.

"""

GUARANTEES = """
## On vLLM's side

Guarantees that were broken in these runs; no failures of the connector's. Most are [known](../engine-findings.md);
`engine.survives` may also be a client that reuses the id of a request that vLLM still has, and `case.expected` a count in a case that a
connector which takes its time does not meet.

"""


def family(entry: str) -> str:
    """The family of a catalogue entry; the entry's own name if the catalogue no longer has it."""
    return catalogue.named(entry).group(entry) if entry in catalogue.names() else entry


def pages(
    digests: Sequence[Digest], findings: Sequence[Finding], spec: Spec, root: Path
) -> dict[str, str]:
    """File name -> text. Reads the notes below `root`, changes nothing."""
    campaigns = [digest for digest in digests if digest.seeds]
    digests = [digest for digest in digests if not digest.seeds]
    families = sorted(
        {family(digest.entry) for digest in (*digests, *campaigns)}
        | {finding.family for finding in findings}
    )
    found = {"README.md": _overview(digests, campaigns, findings, families)}
    if text := _notes(root, "README"):  # what was tried, and belongs to no family that was judged
        found["README.md"] += f"\n{text}\n"
    for name in families:
        mine = [digest for digest in digests if family(digest.entry) == name]
        drawn = [digest for digest in campaigns if family(digest.entry) == name]
        found[f"{name}.md"] = _family(
            name,
            mine,
            drawn,
            [each for each in findings if each.family == name],
            spec,
            _notes(root, name),
        )
    return found


def _notes(root: Path, name: str) -> str:
    notes = root / "notes" / f"{name}.md"
    return notes.read_text(encoding="utf-8").strip() if notes.is_file() else ""


def _overview(
    digests: Sequence[Digest],
    campaigns: Sequence[Digest],
    findings: Sequence[Finding],
    families: Sequence[str],
) -> str:
    text = HEAD.format(made=MADE)
    text += _table(
        ("connector", "engine", "answer", "runs", "loads", "saves", "what failed", "with", "date"),
        [
            (
                f"[{digest.entry}]({family(digest.entry)}.md)",
                *_measures(digest),
                ", ".join(name for area in digest.areas.values() for name in area.failed),
                _with(digest),
                digest.date,
            )
            for digest in digests
        ],
    )
    text += COUNTS
    text += _campaigns(campaigns)
    rows = [
        (
            f"[{each.id}]({each.family}.md#{each.id})",
            each.title,
            each.status,
            "yes" if each.wrong_tokens else "no",
            ", ".join(each.versions.affected),
            _links(each) or each.upstream.status,
        )
        for each in findings
    ]
    if rows:
        text += "\n## Findings\n\n" + _table(
            ("finding", "", "status", "silently wrong tokens", "seen in", "upstream"), rows
        )
    text += "\n## By area\n\n" + LEGEND.rstrip() + "\n"
    for name in families:
        mine = [digest for digest in digests if family(digest.entry) == name]
        if mine:
            text += f"\n### {name}\n\n{_areas(mine)}"
    return text


def _campaigns(campaigns: Sequence[Digest]) -> str:
    """Random workloads on all of vLLM; empty without any."""
    if not campaigns:
        return ""
    rows = [
        (
            f"[{each.entry}]({family(each.entry)}.md)",
            f"{each.seed} to {each.seed + each.seeds - 1}",
            _answer(each),
            _loads(each),
            str(each.saves),
            ", ".join(name for area in each.areas.values() for name in area.failed),
            each.date,
        )
        for each in campaigns
    ]
    command = "`--engine live --seeds 20 -k '*.random-*'` (docs/live.md)"
    each = f"a hundred requests each ({PAIR_REQUESTS} from a producer to a consumer, for connectors that transfer)"
    text = f"\n## Random workloads\n\nOn all of vLLM, {each}: {command}.\n\n"
    return text + _table(
        ("connector", "seeds", "answer", "loads", "saves", "what failed", "date"), rows
    )


def _guarantees(digests: Sequence[Digest]) -> str:
    """What was broken on vLLM's side; empty if nothing was."""
    where: dict[str, list[str]] = {}
    for each in digests:
        for name in each.guarantees:
            where.setdefault(name, []).append(
                f"{each.entry} on {each.engine}{' (random workloads)' if each.seeds else ''}"
            )
    if not where:
        return ""
    return GUARANTEES + "".join(f"- `{name}`: {', '.join(where[name])}\n" for name in sorted(where))


def _family(
    name: str,
    digests: Sequence[Digest],
    campaigns: Sequence[Digest],
    findings: Sequence[Finding],
    spec: Spec,
    notes: str,
) -> str:
    text = f"# {name}\n\n{MADE}\n"
    for entry in dict.fromkeys(each.entry for each in (*digests, *campaigns)):
        if entry in catalogue.names():
            text += f"- `catalogue:{entry}`: {catalogue.named(entry).text}\n"
    text += "\n"
    if digests:
        rows = [
            (
                each.entry,
                each.engine,
                _answer(each),
                str(each.runs),
                _loads(each),
                str(each.saves),
                _with(each),
                each.date,
            )
            for each in digests
        ]
        text += _table(
            ("connector", "engine", "answer", "runs", "loads", "saves", "with", "date"), rows
        )
    if adapters := sorted({title for each in (*digests, *campaigns) for title in each.adapters}):
        text += f"\nStand-ins in force (docs/adapters.md): {'; '.join(adapters)}.\n"
    text += _campaigns(campaigns) + _guarantees([*digests, *campaigns])
    for status, heading in (("confirmed", "Findings"), ("open question", "Open questions")):
        if some := [each for each in findings if each.status == status]:
            text += f"\n## {heading}\n" + "".join(_finding(each, spec) for each in some)
    if digests:
        text += f"\n## By area\n\n{LEGEND}{_areas(digests)}"
    return text + (f"\n{notes}\n" if notes else "")


def _finding(finding: Finding, spec: Spec) -> str:
    rules = "; ".join(
        f"`{name}`: {found.text} ({_source(found.source)})"
        for name in finding.requirements
        if (found := spec.requirements.get(name))
    )
    rows = [
        ("requirement", rules),
        ("case", f"`{finding.case}`"),
        ("seen on", ", ".join(f"{engine}: {what}" for engine, what in finding.engines.items())),
        ("silently wrong tokens", "yes" if finding.wrong_tokens else "no"),
        ("affected", ", ".join(finding.versions.affected)),
        ("not affected", ", ".join(finding.versions.fine) or "nothing that was tried"),
        ("not the suite's fault", finding.adapter),
        ("upstream", f"{finding.upstream.status}: {finding.upstream.note} {_links(finding)}"),
    ]
    text = f'\n<a id="{finding.id}"></a>\n\n### {finding.title}\n\n`{finding.id}`\n\n{finding.what.strip()}\n\n{finding.diagnosis.strip()}\n\n'
    where = "From the root of a checkout:\n\n" if "--case docs/" in finding.reproduce else ""
    text += _table(("", ""), rows) + f"\n{where}    {finding.reproduce.strip()}\n"
    if finding.report:
        quoted = "\n".join(f"> {line}".rstrip() for line in finding.report.strip().splitlines())
        text += f"\n<details><summary>Draft of a bug report</summary>\n\n{quoted}\n\n</details>\n"
    return text


def _source(source: Source | None) -> str:
    """The place in vLLM's source that a requirement rests on."""
    return f"{source.file}: {source.symbol}" if source else "no single place"


def _areas(digests: Sequence[Digest]) -> str:
    entries = list(dict.fromkeys(digest.entry for digest in digests))
    names = sorted({area for digest in digests for area in digest.areas})
    at = {(digest.entry, digest.engine): digest for digest in digests}
    rows = []
    for area in names:
        cells = (
            "".join(_mark(at.get((entry, engine)), area) for engine in ENGINES) for entry in entries
        )
        rows.append((area, *(f"`{cell}`" for cell in cells)))
    return _table(("area", *entries), rows)


def _mark(digest: Digest | None, name: str) -> str:
    if digest is None:
        return " "
    area = digest.areas.get(name, Area())
    if area.failed:
        return "✗"
    if area.advice:
        return "!"
    if area.blocked:
        return "b"
    if area.passed:
        return "✓"
    return "u" if area.unsupported and not area.not_shown else "·"


def _measures(digest: Digest) -> tuple[str, ...]:
    return (digest.engine, _answer(digest), str(digest.runs), _loads(digest), str(digest.saves))


def _loads(digest: Digest) -> str:
    return f"({digest.loads})" if digest.transfers is None else str(digest.transfers)


def _answer(digest: Digest) -> str:
    exercised = bool(digest.guarantees) or any(
        area.passed or area.failed or area.advice or area.blocked for area in digest.areas.values()
    )
    return called(digest.verdict, exercised) + ("" if digest.complete else " (cut short)")


def _with(digest: Digest) -> str:
    return ", ".join(
        [
            f"vllm {digest.vllm}",
            *(f"{name} {version}" for name, version in sorted(digest.packages.items())),
        ]
    )


def _links(finding: Finding) -> str:
    return ", ".join(
        f"[{link.rstrip('/').rsplit('/', 1)[-1]}]({link})" for link in finding.upstream.links
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| "
        + " | ".join(
            " ".join(cell.replace("|", "\\|").split()) if cell.strip() else cell for cell in line
        )
        + " |\n"
        for line in lines
    )
