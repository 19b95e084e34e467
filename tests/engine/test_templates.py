# SPDX-License-Identifier: Apache-2.0
"""Tests that a copied configuration equals a new one and shares nothing that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core_rig import ROUND_TRIP, run_case, select
from kvconform.compat import vllm_api
from kvconform.compat.vllm_api import SupportsHMA
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import load_spec
from kvconform.engine import configs
from kvconform.refimpl import faulty
from kvconform.refimpl.connector import Finish, ReferenceConnector

SIZES: dict[str, Any] = dict(block_size=4, num_blocks=8, spec_tokens=2)


def transfer(store: str) -> Any:
    return vllm_api.transfer_config(
        "ReferenceConnector",
        "kv_both",
        {"store": store},
        "kvconform.refimpl.connector",
        "recompute",
        engine_id=store,
    )


def differences(one: Any, other: Any, where: str = "", depth: int = 0) -> list[str]:
    if type(one) is not type(other):
        return [where]
    if isinstance(one, dict):
        return [
            each
            for key in one | other
            for each in differences(one.get(key), other.get(key), f"{where}[{key}]", depth + 1)
        ]
    if (
        depth < 7
        and hasattr(one, "__dict__")
        and type(one).__module__.startswith(("vllm.config", "transformers"))
    ):
        there = vars(other)
        return [
            each
            for key in vars(one)
            for each in differences(vars(one)[key], there.get(key), f"{where}.{key}", depth + 1)
        ]
    return [] if one == other else [where]


def test_a_copy_is_equal_and_shares_nothing_that_changes() -> None:
    def make() -> Any:
        return vllm_api.build_config(**SIZES, transfer=first)

    first, second = transfer("a"), transfer("b")
    made = configs.cached_config(("test", 1), first, make)
    copied = configs.cached_config(("test", 1), second, lambda: pytest.fail("made again"))
    assert copied.kv_transfer_config is second and made.kv_transfer_config is first
    second.engine_id, second.kv_connector_extra_config = (
        first.engine_id,
        first.kv_connector_extra_config,
    )
    assert differences(made, copied) == [".instance_id"]
    copied.scheduler_config.max_num_seqs = 77
    copied.compilation_config.static_forward_context["layer"] = object()
    copied.model_config.hf_text_config.head_dim = 99
    copied.additional_config["mine"] = 1
    third = configs.cached_config(("test", 1), first, lambda: pytest.fail("made again"))
    assert differences(made, third) == [".instance_id"]
    assert configs.cached_config(("test", 2), first, make) is not made


def test_a_copied_transfer_configuration_has_the_options_and_the_id_of_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, "_transfers", {})
    for name in ("a", "b", "c"):
        options = {"store": name}
        made = configs.cached_transfer_config(
            ("key",), options, name, lambda name=name: transfer(name)
        )  # type: ignore[misc]
        assert differences(made, transfer(name)) == []
        made.kv_connector_extra_config["store"] = made.engine_id = "mine"
        assert options == {"store": name}
    other = configs.cached_transfer_config(
        ("another key",),
        {},
        "d",
        lambda: vllm_api.transfer_config("X", "kv_consumer", {}, None, "fail", "d"),
    )
    assert other.kv_role == "kv_consumer" and len(configs._transfers) == 2


def test_no_transfer_configuration_is_kept_while_a_fault_is_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, "_transfers", {})
    monkeypatch.setattr(faulty, "in_force", lambda: True)
    assert (
        configs.cached_transfer_config(("key",), {}, "a", lambda: "made") == "made"
        and not configs._transfers
    )


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "MOST", 2)
    monkeypatch.setattr(configs, "_configs", {})
    for number in range(3):
        configs.cached_config(number, None, dict)
    assert list(configs._configs) == [1, 2]


class Hybrid(ReferenceConnector, SupportsHMA):
    """A connector that supports several groups.

    vLLM keeps the hybrid cache manager on for it, and not for its siblings.
    """

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Finish:
        return self.request_finished(request, block_ids[0])


def test_a_connector_among_siblings_has_a_configuration_of_its_own(tmp_path: Path) -> None:
    for number, config in enumerate(({}, {"multi": ["idle", "self"]}, {})):
        run = run_case(f"{__name__}:Hybrid", ROUND_TRIP, tmp_path / str(number), config=config)
        assert not select(run.trace, "engine.crash") and run.harness_error is None


def test_nothing_is_taken_or_kept_while_a_fault_is_planted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    def make() -> Any:
        made.append(vllm_api.build_config(**SIZES, transfer=transfer("a")))
        return made[-1]

    key = ("test", "fault")
    monkeypatch.setattr(faulty, "in_force", lambda: True)
    assert configs.cached_config(key, transfer("a"), make) is made[0]
    monkeypatch.setattr(faulty, "in_force", lambda: False)
    assert configs.cached_config(key, transfer("a"), make) is made[1], (
        "what the fault made was not kept"
    )
    monkeypatch.setattr(faulty, "in_force", lambda: True)
    assert configs.cached_config(key, transfer("a"), make) is made[2], (
        "and what was kept is not the fault's"
    )


def test_a_drafter_of_one_layer_counts_beside_the_layers_of_the_model(tmp_path: Path) -> None:
    case = load_spec().cases["speculation.drafter"]
    variant = Variant(case, "vllm", "sync", "v1", 1, case.config.block_size)
    config = configs.build_config(variant, Target(None), tmp_path, with_connector=False)
    speculative = config.speculative_config
    models = (config.model_config, speculative.draft_model_config)
    layers = [model.get_num_layers(config.parallel_config) for model in models]
    assert speculative.use_eagle() and layers == [2, 1]
