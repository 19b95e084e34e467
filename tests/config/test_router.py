# SPDX-License-Identifier: Apache-2.0
"""Tests of routers: which parameters the requests of a producer and a consumer get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.router import Checked
from kvconform.config.settings import load
from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError
from kvconform.refimpl.variants.peer import Peer
from kvconform.run.runner import run_variant

SAME_ID = "kvconform.config.router:SameId"
SPEC = load_spec()


def test_without_a_router_the_producers_answer_is_passed_on() -> None:
    router = Checked(None)
    sent = router.prefill("r", "engine-p")
    assert sent is not None
    assert sent["do_remote_decode"] is True
    assert router.decode("r", "engine-p", sent, {"remote_host": "h"}) == {"remote_host": "h"}
    assert router.decode("r", "engine-p", sent, None) is None


class Raises:
    def prefill(self, request: str, producer: str) -> Any:
        raise KeyError(request)

    def decode(self, *arguments: Any) -> Any:
        return "text"


def test_a_router_that_fails_is_named_in_one_sentence() -> None:
    router = Checked(f"{__name__}:Raises")
    with pytest.raises(UsageError, match=r"router .*:Raises: prefill raised KeyError: 'r'"):
        router.prefill("r", "p")
    with pytest.raises(UsageError, match=r"decode returned str, not a dict or None"):
        router.decode("r", "p", None, None)


@pytest.mark.parametrize("name", ["no_such_module:Router", f"{__name__}:NoSuchClass"])
def test_a_router_that_cannot_be_made_says_how_to_name_one(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be made: .*; name a class .*package.module"):
        Checked(name)


def test_a_setting_names_the_router(tmp_path: Path) -> None:
    assert load({"router": SAME_ID}, start=tmp_path).router == SAME_ID
    with pytest.raises(UsageError, match="router"):
        load({"router": "no colon"}, start=tmp_path)


def ids(router: str | None, tmp_path: Path) -> dict[str, set[str]]:
    """Return the ids of the requests of each engine."""
    variant = SPEC.cases["transfer.prompt"].variants(["vllm"])[0]
    target = Target(f"{Peer.__module__}:Peer", {}, router=router)
    run = run_variant(variant, target, seed=0, tmp=tmp_path)
    assert run.harness_error is None, run.harness_error
    found: dict[str, set[str]] = {"p": set(), "d": set()}
    for event in run.trace:
        if event["kind"] == "req.finished":
            found[event["on"]].add(event["req"])
    return found


def test_a_router_that_shares_the_id_gives_both_engines_one_with_other_suffixes(
    tmp_path: Path,
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

    found = ids(SAME_ID, tmp_path)
    assert not found["p"] & found["d"]
    bases = {on: {get_base_request_id(req) for req in reqs} for on, reqs in found.items()}
    assert bases["p"] == bases["d"] == {"p1", "p2"}


def test_without_one_the_ids_have_nothing_in_common(tmp_path: Path) -> None:
    assert ids(None, tmp_path) == {"p": {"p1", "p2"}, "d": {"d1", "d2"}}
