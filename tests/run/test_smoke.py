# SPDX-License-Identifier: Apache-2.0
"""Tests of a connector that cannot be constructed: nonconformant, or wrongly configured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from places import BAD_CONNECTORS

pytest.importorskip("vllm")
from pydantic import BaseModel, ValidationError, field_validator
from vllm.v1.kv_offload.base import OffloadingSpec

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError, one_line
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.case import run_and_judge
from kvconform.run.smoke import check

TWO = Target("kvconform.refimpl.defects.answers:TwoArguments", {"store": "{tmp}"})


class WantsAServer(ReferenceConnector):
    """Raises an error that has a cause."""

    def __init__(self, vllm_config: object, role: object, kv_cache_config: object) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[arg-type]
        try:
            {}["server"]
        except KeyError as error:
            raise ValueError("not configured") from error


class NativePanic(BaseException):
    """As PyO3's PanicException: no `Exception`."""


class Panics(ReferenceConnector):
    """Its native code panics while it is made."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NativePanic("no cache tier is configured")


class WantsMore(ReferenceConnector):
    """Takes an argument that vLLM does not have."""

    def __init__(
        self, vllm_config: object, role: object, kv_cache_config: object, address: str
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("connector", "sentence"),
    [
        (
            "broken_import:C",
            "cannot be imported: ModuleNotFoundError: No module named 'a_package_that_nobody_has'",
        ),
        (
            "exits_on_import:C",
            "Module exits_on_import of connector exits_on_import:C cannot be imported:"
            " it ends the process while it is imported (sys.exit(0)) (exits_on_import.py:11).",
        ),
        ("no_connector:Plain", "no_connector:Plain is not a KV connector"),
        ("no_connector:Nope", "Module no_connector has no attribute 'Nope'"),
        ("NobodyKnowsThis", "vLLM knows no connector named 'NobodyKnowsThis'"),
    ],
)
def test_what_is_no_connector_is_told(
    connector: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/session/test_e2e_bad_connectors.py runs the whole program on two like these."""
    monkeypatch.syspath_prepend(str(BAD_CONNECTORS))
    with pytest.raises(UsageError, match=re.escape(sentence)):
        check(Target(connector, {}), tmp_path, 120.0)


@pytest.mark.parametrize("target", [TWO, Target(f"{__name__}:WantsMore", {"store": "{tmp}"})])
def test_a_constructor_of_the_wrong_shape_is_nonconformant(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(target, tmp_path, 120.0)
    spec = load_spec()
    variant = next(v for v in spec.cases["lifecycle.api"].variants(["reference"]))
    report = run_and_judge(variant, target, spec, seed=0, tmp=tmp_path)
    failed = {row.requirement: row.message for row in report.rows if row.verdict == "FAIL"}
    assert report.harness_error is None
    assert "lifecycle.constructs" in failed
    assert "api.constructor" in failed
    assert ("2-argument constructor" in failed["lifecycle.constructs"]) == (target is TWO)


SPECS = {
    "NotASpec": "NotASpec is no subclass of vLLM's OffloadingSpec",
    "Unfinished": "the OffloadingSpec Unfinished does not implement get_worker",
    "WantsMoreOfIt": "the OffloadingSpec WantsMoreOfIt cannot be called with (config): ",
}


class NotASpec:
    """Has nothing to do with vLLM."""


class Unfinished(OffloadingSpec):
    """Leaves a method out."""

    def get_manager(self) -> None:  # type: ignore[override]
        """Return nothing: vLLM does not get here."""


class WantsMoreOfIt(Unfinished):
    """Takes an argument that vLLM does not have."""

    def __init__(self, config: object, address: str) -> None:
        super().__init__(config)  # type: ignore[arg-type]

    def get_worker(self, kv_caches: object) -> None:  # type: ignore[override]
        """Return nothing: vLLM does not get here."""


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_that_vllm_refuses_is_nonconformant(name: str, tmp_path: Path) -> None:
    options = {"spec_name": name, "spec_module_path": __name__}
    target = Target("OffloadingConnector", options)
    refused = check(target, tmp_path, 120.0)
    assert refused is not None
    assert refused.startswith("vLLM refuses to construct OffloadingConnector")
    assert SPECS[name] in refused and "Error" in refused
    spec = load_spec()
    variant = next(v for v in spec.cases["lifecycle.api"].variants(["reference"]))
    report = run_and_judge(variant, target, spec, seed=0, tmp=tmp_path)
    failed = {row.requirement: row.message or "" for row in report.rows if row.verdict == "FAIL"}
    assert report.harness_error is None
    assert SPECS[name] in failed["api.constructor"]


def test_a_spec_that_does_not_exist_is_a_mistake_of_the_settings(tmp_path: Path) -> None:
    options = {"spec_name": "Nowhere", "spec_module_path": __name__}
    with pytest.raises(UsageError, match="has no attribute 'Nowhere'.*is its --extra-config right"):
        check(Target("OffloadingConnector", options), tmp_path, 120.0)


def test_another_error_keeps_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError,
        match=(
            r"ValueError: not configured \(from KeyError: 'server'\) \(is its "
            r"--extra-config right"
        ),
    ) as found:
        check(Target(f"{__name__}:WantsAServer", {"store": "{tmp}"}), tmp_path, 120.0)
    assert '{}["server"]' in (found.value.details or "")


@pytest.mark.parametrize(
    ("connector", "options", "said"),
    [
        ("connector:ReferenceConnector", {"store": "redys://x"}, "unknown store redys://"),
        ("connector:ReferenceConnector", {"codec": "int9"}, "codec must be one of raw"),
        ("variants.tiers:Tiered", {"evict": "fifo"}, "evict must be one of lru, lfu"),
        ("variants.tiers:Tiered", {"tiers": [{"url": "memory:"}]}, "a tier has a url and chunks"),
    ],
)
def test_a_wrong_option_of_the_suites_own_connectors_is_a_mistake_of_the_settings(
    connector: str, options: dict[str, object], said: str, tmp_path: Path
) -> None:
    target = Target(f"kvconform.refimpl.{connector}", {"store": "{tmp}", **options})
    with pytest.raises(UsageError, match=said):
        check(target, tmp_path, 300.0)


def test_what_validators_said_is_kept() -> None:
    class Settings(BaseModel):
        port: int

        @field_validator("port")
        @classmethod
        def usable(cls, port: int) -> int:
            if port < 1024:
                raise ValueError("the port must be above 1023")
            return port

    with pytest.raises(ValidationError) as found:
        Settings(port=1)
    assert one_line(found.value) == "ValidationError: Value error, the port must be above 1023"
    assert one_line(KeyError("a\nb")) == r"KeyError: 'a\nb'"
    assert len(one_line(ValueError("x" * 999))) == 300


def test_a_panic_of_native_code_is_told_like_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UsageError, match=r"Panics raised NativePanic: no cache tier is configured \(is its"
    ):
        check(Target(f"{__name__}:Panics", {"store": "{tmp}"}), tmp_path, 120.0)
