# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform explain`, the JSON Schemas, and the benchmark of the monitors.

They run over the whole specification.
"""

from __future__ import annotations

import importlib.resources
import json
import pickle
import re

import jsonschema
import pytest

from kvconform.contract import yaml12
from kvconform.contract.loader import Spec, load_spec
from kvconform.dev import schema
from kvconform.errors import UsageError
from kvconform.report.explain import explain


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec()


def test_everything_can_be_explained(spec: Spec) -> None:
    for name, req in spec.requirements.items():
        text = explain(spec, name)
        assert (
            text.startswith(f"{name} (")
            and " ".join(req.text.split())[:40] in text
            and "Check" in text
        )
        assert re.search(r"(?m)^ *[\w ]+:? +None$", text) is None, (
            "a fact that is missing is left out"
        )
    for name, case in spec.cases.items():
        text = explain(spec, name)
        assert all(
            f"  {step.op}: " in text for step in case.steps
        ) and "reference-sync" in text.replace("vllm-", "reference-").replace("async", "sync")


def test_a_requirement_names_its_defects_and_they_can_be_explained(spec: Spec) -> None:
    assert "Planted defects that it finds\n" in explain(spec, "load.only-grant")
    assert "  loads-over-local-prefix: " in explain(spec, "load.only-grant")
    for name, entry in spec.defects.items():
        text = explain(spec, name)
        assert text.startswith(f"{name} (planted defect)\n") and all(
            f"\n  {wanted}: " in text for wanted in entry["fails"]
        )
        assert "defined       spec/defects.yaml:" in text


def test_what_a_run_showed_is_preferred(spec: Spec) -> None:
    name = next(iter(spec.requirements))
    assert "Exercised by\n  case.x, case.y\n" in explain(spec, name, {name: ["case.x", "case.y"]})
    assert "Exercised by" not in explain(spec, name)


def test_unknown_ids_get_a_suggestion(spec: Spec) -> None:
    name = next(iter(spec.requirements))
    with pytest.raises(UsageError, match=f"did you mean .*{name}"):
        explain(spec, name[:-1])


def test_the_schemas_are_current() -> None:
    assert schema.stale() == [], "run python -m kvconform.dev.schema"


@pytest.mark.parametrize(
    ("name", "folder"),
    [("case", "cases"), ("requirement", "requirements"), ("profiles", None), ("waivers", None)],
)
def test_the_specification_satisfies_the_schemas(name: str, folder: str | None) -> None:
    root = importlib.resources.files("kvconform.spec")
    validator = jsonschema.Draft202012Validator(json.loads(schema.generate(name)))
    validator.check_schema(validator.schema)
    pattern = f"{folder}/**/*.yaml" if folder else f"{name}.yaml"
    files = sorted(root.glob(pattern))  # type: ignore[attr-defined]
    assert files
    for path in files[:: 1 if folder != "cases" else 6]:  # the models check them all
        data = yaml12.parse(path.read_text(encoding="utf-8"), path.name)
        assert [error.message for error in validator.iter_errors(data)] == [], path


def test_the_specification_can_be_sent_to_a_worker(spec: Spec) -> None:
    for req in spec.requirements.values():
        _ = req.expressions, req.capability_expr
    copy = pickle.loads(pickle.dumps(spec))
    assert copy.requirements == spec.requirements and copy.cases == spec.cases


def test_rules_and_bugs_are_explained() -> None:
    spec = load_spec()
    rule = explain(spec, "R035")
    assert rule.startswith("R035 (rule; connector MUST)") and spec.rules["R035"].title in rule
    assert "  load.position (MUST): " in rule and "  identity.branch: " in rule
    bug = explain(spec, "B040")
    assert bug.startswith("B040 (bug; ") and "Cause" in bug and "  load.position (MUST): " in bug
    assert "https://github.com/" in bug.split("Threads")[1]
    for number, title in (("R", "Not covered"), ("B", "Not covered")):
        waivers = spec.rule_waivers if number == "R" else spec.bug_waivers
        name = next(iter(waivers))
        assert title in explain(spec, name) and waivers[name].reason.split()[0] in explain(
            spec, name
        )
    with pytest.raises(UsageError, match="no requirement, case, defect, rule or bug 'R999'"):
        explain(spec, "R999")
    with pytest.raises(UsageError, match="'B999'"):
        explain(spec, "B999")
