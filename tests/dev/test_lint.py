# SPDX-License-Identifier: Apache-2.0
"""Tests of lint: every rule fires on what it is for and on nothing else.

tests/contract/test_spec.py checks that the specification itself passes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvconform.compat import installed, interface
from kvconform.contract.case import OPTIONS, PROPERTIES, Config, Matrix
from kvconform.contract.loader import load_spec
from kvconform.contract.steps import STEPS
from kvconform.dev.lint import RULES, lint, lint_root, mention_unkilled, unkilled
from kvconform.dev.lint_requirements import Finding

GOOD = {
    "id": "lookup.last-token",
    "level": "MUST",
    "text": "A lookup MUST leave a token.",
    "why": "The step needs one.",
    "source": {"file": "v1/core.py", "symbol": "Scheduler.schedule"},
    "rules": ["R023"],
    "event": "lookup",
    "where": "e.tokens",
    "always": "e.local + e.tokens < e.known",
    "good": [{"kind": "lookup", "tokens": 3, "local": 4, "known": 8}],
    "bad": [{"kind": "lookup", "tokens": 4, "local": 4, "known": 8}],
}
CORE = """
LIMIT: int = 3
class Scheduler:
    name = 1
    async def land(self): ...
    def schedule(self): ...
"""
BAD = "kvconform.refimpl.defects.preemption:AppendsOnResume"
DEFECT = {
    "id": "known",
    "text": "Bad.",
    "connector": BAD,
    "cases": ["lifecycle.one"],
    "fails": ["lookup.last-token"],
}
CASE = {
    "id": "lifecycle.one",
    "area": "lifecycle",
    "text": "One.",
    "steps": [{"add": {"req": "a", "prompt": 3}}],
}


@pytest.fixture(autouse=True)
def small_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed vLLM of one file, and no cache."""
    root = tmp_path / "vllm"
    (root / "v1").mkdir(parents=True)
    (root / "v1" / "core.py").write_text(CORE)
    monkeypatch.setattr(installed, "vllm_root", lambda: root)
    monkeypatch.setattr(installed, "vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def findings(
    tmp_path: Path,
    change: dict[str, Any] | None = None,
    *,
    case: dict[str, Any] | None = None,
    **files: Any,
) -> list[Finding]:
    import json

    data = {
        "requirements/lookup.yaml": [
            {k: v for k, v in {**GOOD, **(change or {})}.items() if v is not None}
        ]
    }
    data["cases/lifecycle/lifecycle.one.yaml"] = {**CASE, **(case or {})}  # type: ignore[assignment]
    for name, content in {
        **data,
        **{name.replace("__", "."): content for name, content in files.items()},
    }.items():
        path = tmp_path / "spec" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            content if isinstance(content, str) else json.dumps(content, indent=0), encoding="utf-8"
        )
    return [finding for finding in lint_root(tmp_path / "spec") if finding.code != "L020"]


def codes(found: list[Finding]) -> set[str]:
    return {finding.code for finding in found}


def test_a_clean_specification(tmp_path: Path) -> None:
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "change", "words"),
    [
        ("L001", {"always": "e.tokns"}, "did you mean 'tokens'"),
        ("L003", {"text": "A lookup leaves a token."}, "0 RFC 2119 keywords (none)"),
        ("L003", {"text": "It MUST and SHOULD."}, "2 RFC 2119 keywords (MUST, SHOULD)"),
        ("L004", {"text": "It MUST NOT take it."}, "the text says MUST NOT, the level is MUST"),
        ("L006", {"always": True, "where": None}, "constant"),
        ("L006", {"always": None, "never": "1 > 2", "where": None}, "constant"),
        ("L007", {"bad": []}, "no bad example"),
        ("L008", {"bad": [GOOD["bad"][0], GOOD["good"][0]]}, "bad[1] is accepted"),  # type: ignore[index]
        (
            "L008",
            {"bad": [{"kind": "lookup", "tokens": 0}]},
            "bad[0] is accepted (never triggered)",
        ),
        ("L009", {"good": []}, "no good example"),
        (
            "L010",
            {"good": GOOD["bad"]},
            "good[0] is rejected: `e.local + e.tokens < e.known` is false: e.local=4",
        ),
        (
            "L011",
            {"good": [{"kind": "lookup", "tokens": 3, "local": 4, "known": 8, "M": 1}]},
            "lookup has no field 'M'",
        ),
        (
            "L011",
            {"good": [{"kind": "lookup", "tokens": "3", "local": 4, "known": 8}]},
            "good: tokens of lookup is int or null, so no run has '3'",
        ),
        ("L011", {"bad": [{"kind": "look"}]}, "unknown event 'look'"),
        ("L011", {"bad": [{"tokens": 3}]}, "is no event"),
        (
            "L012",
            {"bad": [{"kind": "lookup", "tokens": 4, "local": 4}]},
            "bad[0]: the check of lookup.last-token cannot be evaluated",
        ),
        ("L013", {"good": [{"kind": "lookup", "tokens": 0}]}, "no good example triggers"),
        ("L015", {"bugs": ["B132", "B999"]}, "there is no bug B999"),
        ("L017", {"rules": ["R230", "R231", "R001", "R000"]}, "there is no rule R231"),
        ("L018", {"source": None}, "names no source"),
        (
            "L019",
            {"source": {"file": "v1/core.py", "symbol": "Scheduler.step"}},
            "v1/core.py of vLLM 0.32.0+cpu has no Scheduler.step",
        ),
        ("L019", {"source": {"file": "v1/nope.py", "symbol": "X"}}, "has no file v1/nope.py"),
        ("L023", {"since": "0.33", "until": "0.33.0"}, "since 0.33 is not before until 0.33.0"),
        ("L024", {"rules": ["R023", "R023"]}, "R023 is named twice"),
        ("L025", {"why": None}, "says no reason"),
    ],
)
def test_requirements(tmp_path: Path, code: str, change: dict[str, Any], words: str) -> None:
    found = findings(tmp_path, change, **{"defects__yaml": [DEFECT]})
    assert code in codes(found) and words in " ".join(str(finding) for finding in found)
    assert codes(found) <= {code, "L013"}
    assert all(
        re.match(r"spec/requirements/lookup\.yaml:\d+$", str(finding.where)) for finding in found
    )


@pytest.mark.parametrize(
    "change",
    [
        {"source": {"file": "v1/core.py", "symbol": symbol}}
        for symbol in ("LIMIT", "Scheduler", "Scheduler.name", "Scheduler.land")
    ]
    + [
        # not in force in the installed vLLM
        {"source": {"file": "v1/gone.py", "symbol": "X"}, "since": "0.33"},
        {"source": {"file": "v1/gone.py", "symbol": "X"}, "until": "0.32"},
        {
            "always": None,
            "never": True,
            "where": "e.tokens is None",
            "good": [],
            "bad": [{"kind": "lookup", "tokens": None}],
        },
    ],
)
def test_what_is_no_breach(tmp_path: Path, change: dict[str, Any]) -> None:
    assert findings(tmp_path, change) == []


def test_rules_that_nothing_covers(tmp_path: Path) -> None:
    rules = [{"rule": "R023", "who": "connector MUST", "title": "one"}]
    assert findings(tmp_path, **{"rules__yaml": rules}) == []
    (found,) = findings(
        tmp_path, **{"rules__yaml": [*rules, {"rule": "R024", "who": "engine", "title": "two"}]}
    )
    assert (
        found.code == "L029"
        and "no requirement or guarantee covers rule R024 (two)" in found.message
    )


def test_sources_without_digest_and_digests_without_source(tmp_path: Path) -> None:
    read = {"file": "v1/core.py", "version": "0.32.0", "line": 3, "digest": "0123456789abcdef"}
    assert findings(tmp_path, **{"sources__yaml": [{**read, "symbol": "Scheduler.schedule"}]}) == []
    (lacking, unused) = findings(
        tmp_path, **{"sources__yaml": [{**read, "symbol": "Scheduler.land"}]}
    )
    assert lacking.code == unused.code == "L030"
    assert "v1/core.py: Scheduler.schedule has no digest" in lacking.message
    assert "no requirement and no situation rests on v1/core.py: Scheduler.land" in unused.message


def test_two_requirements_with_one_text(tmp_path: Path) -> None:
    other = {**GOOD, "id": "lookup.other"}
    assert codes(findings(tmp_path, **{"requirements/other__yaml": [other]})) == {"L024"}


def test_relations_and_keyed_examples(tmp_path: Path) -> None:
    sample = {"kind": "sample", "req": "a", "index": 0}
    relate = {"runs": ["connector", "no-connector"], "event": "sample", "project": "e.token"}
    change = {"event": None, "where": None, "always": None, "relate": relate}
    pair = [[{**sample, "token": 1}], [{**sample, "token": 1}]]
    wrong = [[{**sample, "token": 1}], [{**sample, "token": 2}]]
    assert findings(tmp_path, {**change, "good": pair, "bad": wrong}) == []
    assert findings(tmp_path, {**change, "good": [pair, pair], "bad": [wrong]}) == []
    assert codes(findings(tmp_path, {**change, "good": wrong, "bad": pair})) == {"L008", "L010"}
    assert codes(
        findings(tmp_path, {**change, "good": pair, "bad": [[{**sample, "tok": 1}], []]})
    ) == {"L011"}


def test_examples_can_set_constants(tmp_path: Path) -> None:
    event = {"kind": "lookup", "tokens": 1}
    change = {
        "always": "cap.store and cfg.depth == 3",
        "good": [[{"cap": {"store": True}}, {"kind": "run.start", "depth": 3}, event]],
    }
    assert (
        findings(
            tmp_path,
            {
                **change,
                "bad": [
                    [{"cap": {"store": False}}, {"kind": "run.start", "depth": 3}, event],
                    event,
                ],
            },
        )
        == []
    )
    assert (
        findings(
            tmp_path,
            {
                "capability": "!store",
                "always": "not cap.store",
                "good": [event],
                "bad": [[{"cap": {"store": True}}, event]],
            },
        )
        == []
    )


def test_cases(tmp_path: Path) -> None:
    assert codes(findings(tmp_path, case={"area": "chunked"})) == {"L002"}
    assert codes(findings(tmp_path, case={"rules": ["R999"], "bugs": ["B000"]})) == {"L015", "L017"}
    long = (
        "\n".join(f"#{n}" for n in range(30))
        + "\nid: lifecycle.two\narea: lifecycle\ntext: x\nsteps:\n  - add: {req: a, prompt: 3}\n"
    )
    file = "cases/lifecycle/lifecycle.two__yaml"
    assert findings(tmp_path, **{file: long + "  - run: {}\n" * 5}) == []
    found = findings(tmp_path, **{file: long + "  - run: {}\n" * 6})
    assert [(finding.code, str(finding.where)) for finding in found] == [
        ("L014", "spec/cases/lifecycle/lifecycle.two.yaml:1")
    ]


def test_profiles_waivers_and_defects(tmp_path: Path) -> None:
    core = {"id": "core", "text": "x", "areas": ["*"], "case_areas": ["*"]}
    assert findings(tmp_path, **{"profiles__yaml": [core]}) == []
    for change in (
        {"includes": ["nope"]},
        {"areas": ["nope"]},
        {"case_areas": ["nope"]},
        {"exclude": ["nope.*"]},
    ):
        assert codes(findings(tmp_path, **{"profiles__yaml": [{**core, **change}]})) == {"L021"}
    waiver = {"requirement": "lookup.last-token", "reason": "known"}
    plain: dict[str, Any] = {"profiles__yaml": [core], "waivers__yaml": [waiver]}
    assert codes(findings(tmp_path, **plain)) == {"L022"}  # a requirement cannot be waived
    assert findings(tmp_path, {"kind": "guarantee"}, **plain) == []
    assert codes(
        findings(tmp_path, {"kind": "guarantee"}, **{"waivers__yaml": [{**waiver, "case": "nope"}]})
    ) == {"L022"}
    empty: dict[str, Any] = {"profiles__yaml": [], "waivers__yaml": []}
    assert codes(
        findings(tmp_path, **empty, **{"defects__yaml": [DEFECT | {"fails": ["nope"]}]})
    ) == {"L026", "L028"}  # the one requirement is violated by nothing


def test_defects(tmp_path: Path) -> None:
    assert findings(tmp_path, **{"defects__yaml": [DEFECT]}) == []
    for change in (
        {"requirements": ["lookup.last-token"]},
        {"connector": "no colon"},
        {"cases": ["lifecycle.two"]},
    ):
        assert codes(findings(tmp_path, **{"defects__yaml": [DEFECT | change]})) == {"L027"}
    no_failure = findings(tmp_path, **{"defects__yaml": [DEFECT | {"fails": []}]})
    assert codes(no_failure) == {"L027", "L028"}
    assert codes(
        findings(
            tmp_path, **{"defects__yaml": [{k: v for k, v in DEFECT.items() if k != "connector"}]}
        )
    ) == {"L027"}
    for entries, expected in (([DEFECT], set()), ([], {"L028"})):
        findings(tmp_path, **{"defects__yaml": entries})
        assert codes(lint(load_spec(tmp_path / "spec"), strict=True)) & {"L028"} == expected


def test_what_no_defect_violates_is_mentioned_without_strict() -> None:
    spec = load_spec()
    assert list(mention_unkilled(spec)) == []
    silent = list(spec.requirements)[:5]
    for raw in spec.defects.values():
        raw["fails"] = [name for name in raw["fails"] if name not in silent]
    (found,) = mention_unkilled(spec)
    assert found.warning and found.code == "L028"
    assert found.message == (
        f"no defect violates 5 requirements: {', '.join(silent[:3])} and 2 more"
        " (--strict names all)"
    )
    assert [each.warning for each in unkilled(spec)] == 5 * [False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"case": ["lifecycle.one"]},
            "defect known: case: there is no such field; did you mean cases?",
        ),
        (
            {"connector": "kvconform.refimpl.defects.preemption:AppendOnResume"},
            "has no AppendOnResume; did you mean AppendsOnResume",
        ),
        (
            {"connector": "kvconform.refimpl.defects.nowhere:Bad"},
            "there is no module kvconform.refimpl.defects.nowhere",
        ),
        ({"connector": "nowhere.at.all:Bad"}, "there is no module nowhere.at.all"),
        (
            {"engine_fault": "kvconform.refimpl.defects.engine_hooks:nope"},
            "kvconform.refimpl.defects.engine_hooks has no nope",
        ),
    ],
)
def test_a_defect_that_is_nowhere(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (found,) = findings(tmp_path, **{"defects__yaml": [DEFECT | change]})
    assert found.code == "L027" and words in found.message


def test_what_is_touched_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        interface, "items", lambda: iter(["start_load_kv", "NewRequestData.block_ids"])
    )
    read = {
        "file": "v1/core.py",
        "symbol": "Scheduler.schedule",
        "version": "0.32.0",
        "line": 3,
        "digest": "0123456789abcdef",
    }
    touches = {"touches": ["start_load_kv", "NewRequestData.block_ids", "restore_kv_caches"]}
    assert findings(tmp_path, touches, **{"sources__yaml": [read]}) == []
    for name in ("start_load_k", "NewRequestData.blocks"):
        (found,) = findings(tmp_path, {"touches": [name]}, **{"sources__yaml": [read]})
        assert found.code == "L031" and f"touches {name}, which is no hook" in found.message
    assert (
        findings(
            tmp_path, {"touches": ["nope"]}, **{"sources__yaml": [read | {"version": "0.30.0"}]}
        )
        == []
    )


def test_waivers_that_end(tmp_path: Path) -> None:
    from datetime import date, timedelta

    def found(*days: int) -> list[Finding]:
        ends = [(date.today() + timedelta(days=each)).isoformat() for each in days]
        waivers = [
            {"requirement": "lookup.last-token", "reason": "known", "expires": each}
            for each in ends
        ]
        return findings(tmp_path, {"kind": "guarantee"}, **{"waivers__yaml": waivers})

    assert found(31) == []
    assert [(each.code, each.warning, str(each.where)) for each in found(90, 29)] == [
        ("L032", True, "spec/waivers.yaml:7")
    ]
    assert [(each.code, each.warning, str(each.where)) for each in found(90, 90, -1)] == [
        ("L032", False, "spec/waivers.yaml:12")
    ]


def test_what_no_case_exercises(tmp_path: Path) -> None:
    assert findings(tmp_path) == []
    spec = load_spec(tmp_path / "spec")
    assert codes(lint(spec, {"lookup.last-token": 3})) <= {"L020"}
    for exercised in ({}, {"lookup.last-token": 0}):
        assert "L005" in codes(lint(spec, exercised))


def test_what_the_engines_do_needs_a_situation(tmp_path: Path) -> None:
    source = {"file": "v1/core.py", "symbol": "Scheduler.schedule"}
    entry = {"text": "It does.", "vllm": True, "why": "So does vLLM.", "source": source}
    fields = Config.model_fields.keys() - OPTIONS.keys() - Matrix.model_fields.keys()
    wanted = {"step": STEPS, "axis": Matrix.model_fields, "config": fields, "case": PROPERTIES}
    known = [
        {"id": name, "of": kind, **entry}
        for kind, names in wanted.items()
        for name in sorted(names)
        if name not in ("add", "on", "step", "run", "expect")
    ]

    def found(entries: list[dict[str, Any]]) -> list[str]:
        return [
            f"{each.code} {each.message}"
            for each in findings(tmp_path, **{"situations__yaml": entries})
        ]

    assert found(known) == []
    assert found([each for each in known if each["id"] != "preempt"]) == [
        "L033 no situation says whether vLLM does this: step preempt"
    ]
    assert found([*known, {"id": "prempt", "of": "step", **entry}]) == [
        "L033 situation prempt: there is no such step; did you mean preempt?"
    ]
    assert found([each for each in known if each["id"] != "layout"]) == [
        "L033 no situation says whether vLLM does this: config field layout"
    ]
    assert found([each for each in known if each["id"] != "reused-id"]) == [
        "L033 no situation says whether vLLM does this: property of a case reused-id"
    ]
    option = {"id": "num_blocks", "of": "config", **entry}
    (wrong,) = found([*known, option])
    assert wrong.startswith("L033 situation num_blocks: there is no such config field")
    unknown = {"id": "reused-ids", "of": "case", **entry}
    assert found([*known, unknown]) == [
        "L033 situation reused-ids: there is no such property of a case; did you mean reused-id?"
    ]
    nowhere = {**source, "symbol": "Scheduler.shedule"}
    (wrong,) = found([*known, {"id": "odd", "of": "policy", **entry, "source": nowhere}])
    assert wrong.startswith("L019 situation odd: ")


def test_every_rule_is_tested() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert {code for code in RULES if f'"{code}' not in text} == set()
