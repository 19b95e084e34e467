# SPDX-License-Identifier: Apache-2.0
"""Tests of the loader: strict YAML, checks of the models, places in error messages, the cache."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconform.contract import yaml12
from kvconform.contract.case import Case, Config
from kvconform.contract.loader import SpecError, load_spec, place_and_sentence
from kvconform.contract.profile import in_range, select
from kvconform.contract.requirement import Requirement, version_key
from kvconform.contract.steps import Continue, Embeds
from kvconform.errors import UsageError

REQUIREMENT = """\
- id: lookup.non-negative
  level: MUST NOT
  text: A lookup MUST NOT answer a negative number.
  event: lookup
  never: e.tokens < 0
"""
CASE = """\
id: lifecycle.one
area: lifecycle
text: One request.
steps:
  - add: {req: a, prompt: 13}
  - run: {}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(root: Path, requirements: str = REQUIREMENT, case: str = CASE, **others: str) -> Path:
    for name, text in {
        "requirements/lookup.yaml": requirements,
        "cases/lifecycle/lifecycle.one.yaml": case,
        **others,
    }.items():
        path = root / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def problems(root: Path) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(root)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("on: yes\noff: no", {"on": "yes", "off": "no"}),
        ("a: 010\nb: 0o10\nc: 0x1F\nd: 1_000", {"a": 10, "b": 8, "c": 31, "d": "1_000"}),
        ("a: 0.30\nb: '0.30'\nc: -.5e3\nd: 1e3", {"a": 0.3, "b": "0.30", "c": -500.0, "d": 1000.0}),
        (
            "[true, False, null, ~, 'null', +7, -7, 0.9.2, 2026-01-01, 12:30:45]",
            [True, False, None, None, "null", 7, -7, "0.9.2", "2026-01-01", "12:30:45"],
        ),
        (
            "a:\nb: ''\nc: |\n  x\n  y\nd: >\n  x\n  y\n",
            {"a": None, "b": "", "c": "x\ny\n", "d": "x y\n"},
        ),
        ("", None),
        ("%YAML 1.2\n---\na: 1", {"a": 1}),
    ],
)
def test_scalars_are_yaml_1_2(text: str, data: object) -> None:
    assert yaml12.parse(text, "f.yaml") == data


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: the key 'a' appears twice"),
        ("x:\n  - {b: 1, b: 2}", "f.yaml:2: the key 'b' appears twice"),
        ("1: x", "f.yaml:1: the key 1 is not text"),
        ("true: x", "f.yaml:1: the key true is not text"),
        ("? [a]\n: x", "f.yaml:1: a key must be plain text"),
        ("a: !!str 3", "f.yaml:1: tags and anchors"),
        ("a: !x [1]", "f.yaml:1: the tag"),
        ("a: &x 1\nb: *x", "f.yaml:1: anchors and aliases"),
        ("a: 1\n---\nb: 2", "f.yaml:2: a file holds one document"),
        ("%YAML 1.1\n---\na: 1", "the file must be YAML 1.2"),
        ("a: .inf", "f.yaml:1: .inf is not a finite number"),
        ("a: -.NAN", "f.yaml:1: -.NAN is not a finite number"),
        ("a: [1,\nb: 2", "f.yaml:"),
        ("a: 'x", "f.yaml:"),
        ("\ta: 1", "f.yaml:1:"),
    ],
)
def test_what_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match="^f.yaml:") as caught:
        yaml12.parse(text, "f.yaml")
    assert sentence in caught.value.message and "\n" not in caught.value.message


# A YAML key has at most 1024 characters, and escaping makes it up to twelve times as long.
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=60), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(json_values)
def test_json_is_yaml(value: Any) -> None:
    """JSON is a subset of YAML 1.2, so what json.dumps says must come back."""
    text = json.dumps(value)
    if "\\ud" not in text:  # surrogate escapes are JSON's own
        assert yaml12.parse(text, "f") == value


def test_a_good_specification(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path))
    assert spec.requirements["lookup.non-negative"].area == "lookup"
    assert str(spec.places["requirement:lookup.non-negative"]) == "spec/requirements/lookup.yaml:1"
    assert spec.line_counts["spec/cases/lifecycle/lifecycle.one.yaml"] == 6
    assert pickle.loads(pickle.dumps(spec)).cases == spec.cases


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("never: e.tokens < 0", "never: e.token < 0"),
            "spec/requirements/lookup.yaml:1: event lookup has no field 'token'",
        ),
        (
            ("  event: lookup\n", "  event: look\n"),
            "spec/requirements/lookup.yaml:4: event: unknown event 'look'",
        ),
        (("level: MUST NOT", "level: SHALL"), "spec/requirements/lookup.yaml:2: "),
        (
            ("  never:", "  since: 0.30\n  never:"),
            "spec/requirements/lookup.yaml:5: since must be text",
        ),
        (("  never:", "  since: v1\n  never:"), "spec/requirements/lookup.yaml:5: since: "),
        (
            ("  never:", "  nope: 1\n  never:"),
            "spec/requirements/lookup.yaml:5: nope: there is no such field",
        ),
        (("  never:", "  always: e.tokens\n  never:"), "exactly one of always, never"),
        (("  event: lookup\n", "  event: lokup\n"), "unknown event 'lokup'; did you mean lookup"),
        (
            ("  never:", "  whre: e.tokens\n  never:"),
            "spec/requirements/lookup.yaml:5: whre: there is no such field; did you mean where?",
        ),
        (
            ("  never: e.tokens < 0", ""),
            "exactly one of always, never, count, precede, respond, relate is needed, found none",
        ),
        (("  event: lookup\n", ""), "`event` is missing"),
        (("  never:", "  rules: [R25]\n  never:"), "spec/requirements/lookup.yaml:5: "),
        (("  never:", "  capability: shop\n  never:"), "unknown name `shop`"),
        (("  never:", "  needs: [memory]\n  never:"), "spec/requirements/lookup.yaml:5: "),
        (("  never: e.tokens < 0", "  count: {per: e.req}"), "count needs min or max"),
        (("id: lookup.non-negative", "id: Lookup"), "spec/requirements/lookup.yaml:1: "),
        (("never: e.tokens < 0", "never: e.tokens < t.tokens"), "`t` has no meaning here"),
        (("- id", "- [x]\n- id"), "spec/requirements/lookup.yaml:1: "),
    ],
)
def test_broken_requirements_are_placed(
    tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    assert change[0] in REQUIREMENT
    found = problems(write(tmp_path, REQUIREMENT.replace(*change)))
    assert any(sentence in problem for problem in found), found


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("run: {}", "runn: {}"),
            (
                "spec/cases/lifecycle/lifecycle.one.yaml:6: step 2: there is no step 'runn'; "
                "did you mean run?"
            ),
        ),
        (("run: {}", "quux: {}"), "there is no step 'quux'; the steps are add, on, step, run,"),
        (("run: {}", "run"), "a step is a map: write `run: {...}`, or `run: {}`"),
        (("run: {}", "{run: {}, step: 1}"), "a step is a map with one key, one of: add, on, step"),
        (
            ("prompt: 13", "prompt: nine"),
            "lifecycle.one.yaml:5: step 1 (add): prompt must be a whole number",
        ),
        (
            ("run: {}", "step: two"),
            "spec/cases/lifecycle/lifecycle.one.yaml:6: step 2 (step) must be a whole number",
        ),
        (
            ("run: {}", "run: {}\nexpect:\n  - outputs: {req: a, count: 8, clean: maybe}"),
            "8: expectation 1 (outputs): clean must be true or false, or a map",
        ),
        (
            ("text: One request.", "text: One: request."),
            "lifecycle.one.yaml:3: not valid YAML: a second colon in one value",
        ),
        (
            ("  - run: {}", " - run: {}"),
            "6: not valid YAML: this line is indented differently from those that it belongs to",
        ),
        (
            ("  - add", "\t- add"),
            "spec/cases/lifecycle/lifecycle.one.yaml:5: not valid YAML: a tab; indent with spaces",
        ),
        (
            ("run: {}", "abort: b"),
            (
                "spec/cases/lifecycle/lifecycle.one.yaml:6: step 2: `abort` names request 'b', "
                "which no earlier step adds"
            ),
        ),
        (
            ("run: {}", "add: {req: a, prompt: 3}"),
            "spec/cases/lifecycle/lifecycle.one.yaml:6: step 2: adds request 'a' again",
        ),
        (
            ("run: {}", "add: {req: b, prompt: 256}"),
            "spec/cases/lifecycle/lifecycle.one.yaml:6: step 2: adds a prompt of 256 tokens",
        ),
        (
            ("run: {}", "on: p"),
            (
                "spec/cases/lifecycle/lifecycle.one.yaml:6: step 2: `on` names engine 'p'; "
                "config.engines has none"
            ),
        ),
        (
            (
                "{req: a, prompt: 13}",
                "{req: a, prompt: 13, count: 3}\n  -\n    # a comment\n    abort: b",
            ),
            "spec/cases/lifecycle/lifecycle.one.yaml:8: step 2: `abort` names",
        ),
        (("run: {}", "expect: {stat: 1}"), "there is no expectation 'stat'; did you mean state?"),
        (("run: {}", "expect: {}"), "an expectation is a map with one key"),
        (
            ("run: {}", "expect: {rows: {req: a, fields: [computed, scheduled], values: [[1]]}}"),
            "every row of values needs 2 numbers",
        ),
        (
            ("run: {}", "expect: {external: {req: a, at_least: 1, equal: 2}}"),
            "at_least and equal exclude each other",
        ),
        (
            ("run: {}", "expect: {loads: 1, when: cap.sotre}"),
            "the list of capabilities has no field 'sotre'",
        ),
        (("prompt: 13", "prompt: -1"), "spec/cases/lifecycle/lifecycle.one.yaml:5: "),
        (
            ("prompt: 13", "prompt: {same: b}"),
            "spec/cases/lifecycle/lifecycle.one.yaml:5: step 1: `add` names request 'b'",
        ),
        (("run: {}", "step: 0"), "spec/cases/lifecycle/lifecycle.one.yaml:6: "),
        (
            ("steps:", "config: {block: 4}\nsteps:"),
            (
                "spec/cases/lifecycle/lifecycle.one.yaml:4: config.block: there is no such field; "
                "did you mean num_blocks?"
            ),
        ),
        (
            ("steps:", "matrix: {scheduling: [slow]}\nsteps:"),
            "spec/cases/lifecycle/lifecycle.one.yaml:4: ",
        ),
        (
            ("steps:", "provokes: [{loads: {req: b}}]\nsteps:"),
            (
                "spec/cases/lifecycle/lifecycle.one.yaml:4: provokes 1: loads names request 'b', "
                "which no step adds"
            ),
        ),
        (
            ("run: {}\n", "run: {}\nexpect:\n  - loads: 0\n  - loads: {req: b}\n"),
            "spec/cases/lifecycle/lifecycle.one.yaml:9: expectation 2: loads names request 'b'",
        ),
    ],
)
def test_broken_cases_are_placed(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    assert change[0] in CASE
    found = problems(write(tmp_path, case=CASE.replace(*change)))
    assert any(sentence in problem for problem in found), found


def test_a_misspelt_field_is_not_said_to_be_missing_too(tmp_path: Path) -> None:
    [found] = problems(write(tmp_path, case=CASE.replace("prompt:", "promt:")))
    assert found.endswith(": step 1 (add): promt: there is no such field; did you mean prompt?")
    found, _ = problems(write(tmp_path, case=CASE.replace("prompt:", "colour:")))
    assert found.endswith("prompt is missing")


@pytest.mark.parametrize("prompt", ["{like: a, tokens: 4}", "[4, 5]", "{}"])
def test_an_unknown_form_of_a_prompt_is_one_sentence(tmp_path: Path, prompt: str) -> None:
    [found] = problems(write(tmp_path, case=CASE.replace("prompt: 13", f"prompt: {prompt}")))
    sentence = "prompt must be a number of tokens, or a map with same, of or parts"
    assert found.endswith(f": step 1 (add): {sentence}")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    found = problems(
        write(
            tmp_path,
            REQUIREMENT.replace("never", "nevr"),
            CASE.replace("run", "rum"),
            **{"profiles__yaml": "a: 1"},
        )
    )
    assert {problem.split(":")[0] for problem in found} == {
        "spec/requirements/lookup.yaml",
        "spec/cases/lifecycle/lifecycle.one.yaml",
        "spec/profiles.yaml",
    }


def test_ids_are_unique_over_files(tmp_path: Path) -> None:
    found = problems(
        write(tmp_path, **{"requirements/other.yaml": "# two lines\n\n" + REQUIREMENT})
    )
    assert found == [
        (
            "spec/requirements/other.yaml:3: requirement lookup.non-negative is defined at "
            "spec/requirements/lookup.yaml:1 already"
        )
    ]


def test_the_second_of_two_is_named(tmp_path: Path) -> None:
    place = "spec/requirements/lookup.yaml"
    again = f"{place}:6: requirement lookup.non-negative is defined at {place}:1 already"
    assert problems(write(tmp_path, REQUIREMENT + REQUIREMENT)) == [again]
    defects = "- id: d\n  text: one\n- text: two\n  id: d\n- text: three\n"
    assert problems(write(tmp_path, **{"defects__yaml": defects})) == [
        "spec/defects.yaml:3: defect d is defined at spec/defects.yaml:1 already",
        "spec/defects.yaml:5: a defect needs an id",
    ]


def test_a_case_without_content_is_no_case(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "{}"):
        assert problems(write(tmp_path, case=text)) == [
            "spec/cases/lifecycle/lifecycle.one.yaml:1: the file is empty: it must hold a case"
        ]
    assert len(problems(write(tmp_path, case="[]"))) == 1


def test_the_cache_changes_nothing_but_the_time(tmp_path: Path) -> None:
    root = write(tmp_path / "spec")
    first = load_spec(root)
    cached = list((tmp_path / "cache").rglob("spec.json"))
    assert len(cached) == 1 and load_spec(root) == first == load_spec(root, cache=False)
    for rubbish in ("", "[]", '{"format": 1}', "{"):
        cached[0].write_text(rubbish, encoding="utf-8")
        assert load_spec(root) == first
    write(tmp_path / "spec", REQUIREMENT.replace("negative number", "negative count"))
    assert "count" in load_spec(root).requirements["lookup.non-negative"].text


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_spec(write(tmp_path / "spec")).requirements


def case(**changes: Any) -> Case:
    return Case.model_validate({**yaml12.parse(CASE, "case"), **changes})


def test_variants() -> None:
    assert [variant.id for variant in case().variants()] == [
        "lifecycle.one[reference-sync-v1-d1-b4]",
        "lifecycle.one[reference-async-v1-d2-b4]",
        "lifecycle.one[vllm-sync-v1-d1-b4]",
        "lifecycle.one[vllm-async-v1-d2-b4]",
    ]
    wide = case(
        matrix={"depth": [2, 3], "runner": ["v1", "v2"], "block_size": [4, 16]},
        config={"block_size": 8},
    )
    found = wide.variants(["vllm"], ["async"])
    assert len(found) == len(set(found)) == 8 and {variant.block_size for variant in found} == {
        4,
        16,
    }
    assert {variant.depth for variant in wide.variants(schedulings=["sync"])} == {1}
    assert case(config={"block_size": 8}).variants()[0].block_size == 8
    assert case(engines=["vllm"]).variants(["reference"]) == []


def test_what_a_case_needs_is_computed_from_its_steps() -> None:
    steps = [{"add": {"req": "a", "prompt": 3}}, {"fail-load": {"req": "a"}}]
    found = case(steps=steps, needs="store")
    assert found.unmet({"store": True, "fault_injection": True}) is None
    needs = "(store) and (fault_injection) and (store or synthesises_kv)"
    assert found.unmet({"store": True, "fault_injection": False}) == needs
    assert case().unmet({}) is None


def test_many_requests_at_once() -> None:
    found = case(
        steps=[
            {"add": {"req": "r", "count": 3, "prompt": [7, 12], "max_tokens": 5}},
            {"abort": "r2"},
        ]
    )
    assert [(step.arg.req, step.arg.prompt) for step in found.steps[:-1]] == [
        ("r0", 7),
        ("r1", 12),
        ("r2", 7),
    ]


def test_expectations_per_scheduling_and_guards() -> None:
    found = case(
        expect=[
            {"state": {"req": "a", "computed": {"sync": 1, "async": 2}, "status": "running"}},
            {"external": {"req": "a", "equal": 4, "when": "cap.store and cfg.depth == 2"}},
        ],
        provokes=[{"preempted": "a"}, {"loads": 2}, {"resumed": {"req": "a"}}],
    )
    state, external = found.expect
    assert (state.at("sync").computed, state.at("async").computed, state.at("async").status) == (
        1,
        2,
        "running",
    )
    assert external.applies({"store": True}, {"depth": 2}) and not external.applies(
        {"store": False}, {"depth": 2}
    )
    assert [(item.what, item.arg.req, item.arg.at_least) for item in found.provokes] == [
        ("preempted", "a", 1),
        ("loads", None, 2),
        ("resumed", "a", 1),
    ]


def test_versions() -> None:
    req = Requirement.model_validate(
        {**yaml12.parse(REQUIREMENT, "r")[0], "since": "0.11", "until": "0.33"}
    )
    assert [req.in_force(v) for v in ("0.9.2", "0.11.0", "0.32.1rc2+cpu", "0.33.0", "1.0")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert version_key("v0.32.0.dev1") == version_key("0.32") < version_key("0.32.1")
    assert (
        in_range("0.32.0", ">=0.31,<0.33")
        and not in_range("0.33.0", ">=0.31,<0.33")
        and in_range("9", None)
    )
    assert (
        in_range("0.32.0", "==0.32")
        and in_range("0.32.0", "<=0.32")
        and not in_range("0.32.0", ">0.32")
    )


def test_profiles_select_by_globs_and_include_each_other(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "- {id: core, text: x, areas: [lookup], case_areas: [lifecycle]}",
            "- {id: more, text: x, includes: [core], cases: ['*'], exclude: ['lookup.*']}",
            "- {id: none, text: x, areas: ['*'], exclude: ['lookup.*']}",
        ]
    )
    spec = load_spec(write(tmp_path, **{"profiles__yaml": text}))

    def chosen(name: str) -> tuple[list[str], list[str]]:
        return select(spec.profiles, name, spec.requirements.values(), spec.cases.values())

    assert chosen("core") == (["lookup.non-negative"], ["lifecycle.one"]) == chosen("more")
    assert chosen("none") == ([], [])
    with pytest.raises(KeyError):
        chosen("nope")


def test_a_prompt_for_which_there_are_not_enough_blocks_is_told() -> None:
    case = {"id": "lifecycle.one", "area": "lifecycle", "text": "A.", "config": {"num_blocks": 4}}
    Case.model_validate({**case, "steps": [{"add": {"req": "a", "prompt": 12}}]}, strict=False)
    with pytest.raises(
        ValueError,
        match="a prompt of 13 tokens, too many for num_blocks 4: there is room for 12",
    ):
        Case.model_validate({**case, "steps": [{"add": {"req": "a", "prompt": 13}}]}, strict=False)


def test_a_prompt_must_fit_into_the_blocks_of_its_engine() -> None:
    engines = {"p": "kv_both", "s": {"role": "kv_both", "block_size": 2}}
    case = {
        "id": "lifecycle.one",
        "area": "lifecycle",
        "text": "A.",
        "config": {"num_blocks": 8, "engines": engines},
    }
    long: dict[str, Any] = {"add": {"req": "a", "prompt": 20}}
    Case.model_validate({**case, "steps": [long]}, strict=False)
    with pytest.raises(ValueError, match="there is room for 14"):
        Case.model_validate({**case, "steps": [{"on": "s"}, long]}, strict=False)


def test_the_block_size_of_the_axes_is_that_of_all_engines() -> None:
    case: dict[str, Any] = {
        "id": "lifecycle.one",
        "area": "lifecycle",
        "text": "A.",
        "matrix": {"block_size": [8]},
        "steps": [{"add": {"req": "a", "prompt": 9}}, {"run": {}}],
    }
    engines: dict[str, Any] = {"p": "kv_both", "d": {"role": "kv_both", "dtype": "float16"}}
    Case.model_validate({**case, "config": {"engines": engines}}, strict=False)
    engines["d"] = {"role": "kv_both", "block_size": 4}
    with pytest.raises(ValueError, match="none may have a block_size of its own"):
        Case.model_validate({**case, "config": {"engines": engines}}, strict=False)


def test_an_engine_that_repeats_the_configuration_does_not_differ() -> None:
    engines = {"p": "kv_both", "d": {"role": "kv_both", "block_size": 4, "dtype": "float16"}}
    config = Config.model_validate({"block_size": 4, "engines": engines}, strict=False)
    assert config.own == {"d": {"dtype": "float16"}}


def test_a_local_chunk_has_whole_blocks_of_every_engine() -> None:
    case = {
        "id": "groups.one",
        "area": "groups",
        "text": "A.",
        "engines": ["vllm"],
        "config": {"groups": ["full", "local"], "window": 12},
    }
    steps: list[Any] = [{"add": {"req": "a", "prompt": 9}}, {"run": {}}]
    Case.model_validate({**case, "steps": steps}, strict=False)
    with pytest.raises(ValueError, match="a window of whole blocks"):
        Case.model_validate(
            {**case, "steps": [*steps, {"restart": {"block_size": 8}}]}, strict=False
        )


@pytest.mark.parametrize(("rank", "fits"), [(1, True), (2, False)])
def test_the_rank_whose_share_is_lost_exists(rank: int, fits: bool) -> None:
    failing = {"fail-load": {"req": "a", "rank": rank}}
    case = {
        "id": "ranks.one",
        "area": "ranks",
        "text": "t",
        "config": {"tensor_parallel": 2},
        "steps": [{"add": {"req": "a", "prompt": 9}}, failing, {"run": {}}],
    }
    with nullcontext() if fits else pytest.raises(ValueError, match="there is no rank 2"):
        Case.model_validate(case)


@pytest.mark.parametrize(("at", "fits"), [(1, True), (2, False)])
def test_an_image_lies_within_the_new_tokens_of_a_session(at: int, fits: bool) -> None:
    data = {"req": "a", "then": 4, "mm": [{"at": at, "length": 3, "id": "x"}]}
    with nullcontext() if fits else pytest.raises(ValueError, match="make `then` larger"):
        Continue.model_validate(data)


RESTARTED = [{"add": {"req": "a", "prompt": 9}}, {"run": {}}]


@pytest.mark.parametrize(
    ("how", "config", "engines", "problem"),
    [
        ({"dtype": "float16"}, {}, ["reference"], None),
        ({"tensor_parallel": 1, "pipeline_parallel": 2}, {"tensor_parallel": 2}, ["vllm"], None),
        ({"pipeline_parallel": 2}, {}, ["vllm"], None),
        ({"tensor_parallel": 2}, {"layers": [1, 4]}, ["reference"], None),
        ({"pipeline_parallel": 2}, {"layers": [1, 4]}, ["vllm"], None),
        (
            {"pipeline_parallel": 2},
            {"drafter": True, "spec_tokens": 2},
            ["vllm"],
            "needs one pipeline stage",
        ),
        (
            {"tensor_parallel": 1},
            {"groups": ["latent"], "tensor_parallel": 2, "context_parallel": 2},
            ["reference"],
            "must divide tensor_parallel",
        ),
        (
            {"tensor_parallel": 1, "pipeline_parallel": 2},
            {"tensor_parallel": 2},
            ["reference"],
            "engines must be .vllm.",
        ),
        ({"tensor_parallel": 2}, {"groups": ["full", "sliding"]}, ["vllm"], None),
        ({"tensor_parallel": 2}, {"groups": ["full", "sliding"]}, ["reference"], None),
        (
            {"tensor_parallel": 2},
            {"groups": ["full", "state"]},
            ["reference"],
            "groups: state: engines",
        ),
        ({"tensor_parallel": 2}, {"groups": ["full", "wide"]}, ["vllm"], "half of the heads"),
        ({"pipeline_parallel": 2}, {"groups": ["full", "sliding"]}, ["vllm"], "one group"),
        ({}, {}, ["reference"], "say what the new engine has otherwise"),
        ({"layout": "LBNHC"}, {"layout": "LBHNC"}, ["reference"], None),
        ({"layout": "NHD"}, {}, ["reference"], "LBHNC"),
        ({"block_size": 8}, {"kernel_block_size": 2}, ["vllm"], None),
        ({"block_size": 6}, {"kernel_block_size": 4}, ["vllm"], "must divide the blocks"),
        ({"kernel_block_size": 3}, {}, ["reference"], "must divide the blocks"),
        ({"layout": "BLHNC"}, {"kernel_block_size": 2}, ["reference"], "LBHNC or LBNHC"),
    ],
)
def test_what_a_restart_may_change(
    how: dict[str, Any], config: dict[str, Any], engines: list[str], problem: str | None
) -> None:
    fields = {"steps": [*RESTARTED, {"restart": how}], "config": config, "engines": engines}
    if problem is not None:
        with pytest.raises(ValueError, match=problem):
            case(**fields)
        return
    made = case(**fields)
    stages = how.get("pipeline_parallel", 1)
    assert made.stages == stages
    assert ("pipeline_parallel" in made.needs_expr.source) == (stages > 1)


def test_a_prompt_has_to_fit_the_blocks_after_a_restart() -> None:
    fields: dict[str, Any] = {"config": {"num_blocks": 4, "block_size": 8}}
    more = {"add": {"req": "b", "prompt": 13}}
    case(steps=[*RESTARTED, {"restart": {"layout": "LBNHC"}}, more], **fields)
    with pytest.raises(ValueError, match="there is room for 12"):
        case(steps=[*RESTARTED, {"restart": {"block_size": 4}}, more], **fields)


def test_a_case_has_one_restart_in_another_process() -> None:
    steps = [*RESTARTED, {"restart": "process"}, {"restart": "engine"}]
    case(steps=steps)
    with pytest.raises(ValueError, match="at most one restart of a case"):
        case(steps=[*steps, {"restart": {"revision": "later"}}])


def test_embeddings_in_parts() -> None:
    plain, joined = Embeds(of="x"), Embeds(of="x", until=5, then="y")
    assert plain.parts(9) == [("x", 0, 9)] == Embeds(of="x", until=9, then="y").parts(9)
    assert joined.parts(9) == [("x", 0, 5), ("y", 5, 9)]
    with pytest.raises(ValueError, match="belong together"):
        Embeds(of="x", until=5)
    made = case(steps=[{"add": {"req": "a", "prompt": 9, "embeds": "x"}}, {"run": {}}])
    assert made.steps[0].arg.embeds == plain


def test_a_field_in_the_wrong_place_is_told_in_the_words_of_a_case() -> None:
    def said(*loc: str | int, kind: str = "extra_forbidden") -> tuple[str, str]:
        return place_and_sentence(Case, loc, kind, "is missing")

    assert said("config", "priority") == ("config.priority", "there is no such field here")
    path = ("steps", 0, "add", "add", "one", "prompt", "of")
    assert said(*path, "of", kind="missing") == ("step 1 (add): prompt.of", "is missing")
    place, sentence = said("steps", 0, "add", "add", "one", "max_token")
    assert place == "step 1 (add): max_token" and sentence.endswith("did you mean max_tokens?")


def test_every_profile_of_a_connector_counts_the_same_requirements() -> None:
    """A narrower one has fewer cases. What fails in every vLLM is left to profile findings."""
    spec = load_spec()

    def judged(name: str) -> list[str]:
        return select(spec.profiles, name, spec.requirements.values(), ())[0]

    core = judged("core")
    for name, profile in spec.profiles.items():
        if name != "findings" and profile.areas == ["*"]:
            assert judged(name) == core, name
    assert set(judged("findings")) - set(core) == {"engine.reset-returns"}
