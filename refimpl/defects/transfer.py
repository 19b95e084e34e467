# SPDX-License-Identifier: Apache-2.0
"""Mistakes of connectors that hand KV from a producer engine to a consumer engine, and of connectors with a role."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.faulty import fault
from kvconform.refimpl.kv_manager import KVManager
from kvconform.refimpl.variants.peer import Offer, Peer, Pull


class OwnIds(Peer):
    """Looks for the KV under the id that the request has in its own engine."""

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        super()._pull(req, {**remote, "remote_request_id": req}, first, blocks)


class NotesOnlyLoads(Peer):
    """Tells the producer when a load is done, and only then: not when the consumer has it all."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._taken.add(request.request_id)
        return super().request_finished(request, block_ids)


class ForgetsAborted(Peer):
    """Does not tell the producer about a request that was aborted before it had memory."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._taken.add(request.request_id)
        return super().request_finished(request, block_ids)


class PromisesAgain(Peer):
    """Answers from the request's parameters alone: promises once more what it has fetched."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._taken.discard(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class ReadsWhatItIsTold(Peer):
    """Reads the block ids in the parameters, whether or not the producer still keeps them for this request."""

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        super()._pull(req, remote, first, blocks)
        self._pulls[-1] = dataclasses.replace(
            self._pulls[-1], key=f"{self._pulls[-1].key} {remote.get('remote_block_ids') or []}"
        )

    def _offer(self, pull: Pull) -> Offer | None:
        key, _, listed = pull.key.partition(" ")
        board = self.boards.get(pull.engine)
        told = [int(block) for block in listed.strip("[]").split(",") if block.strip()]
        return Offer("", told) if board is not None and told and key.count("/") else None

    def _copy(self, pull: Pull, offer: Offer) -> None:
        super()._copy(dataclasses.replace(pull, key=pull.key.partition(" ")[0]), offer)


class ExpiredIsFine(Peer):
    """Logs that the producer does not have it any more, and reports the load as finished."""

    def _failed(self, pull: Pull) -> None:
        return


class SilentFailure(Peer):
    """Forgets a pull that failed: reports neither an error nor the end."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._pulling = [
            item for item in self._pulling if item[1] > 0 or self._offer(item[2]) is not None
        ]
        self._pulling = [item for item in self._pulling if item[2].engine in self.boards]
        return super().get_finished(finished_req_ids)


class FirstChunk(Peer):
    """Keeps the blocks that the request got at first, and overlooks those of later chunks."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._firsts: dict[str, list[int]] = getattr(self, "_firsts", {})
        self._firsts |= {
            new.req_id: list(new.block_ids[0]) for new in scheduler_output.scheduled_new_reqs
        }
        self._offers = {
            key: (req, blocks[: len(self._firsts[req])])
            for key, (req, blocks) in self._offers.items()
        }
        return super().build_connector_meta(scheduler_output)


class FromTheEnd(Peer):
    """Offers the blocks of its drafts too, and pairs the two lists from their ends."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._tables: dict[str, list[int]] = getattr(self, "_tables", {})
        self._tables |= {
            new.req_id: list(new.block_ids[0]) for new in scheduler_output.scheduled_new_reqs
        }
        self._offers = {
            key: (req, self._tables.get(req, blocks)) for key, (req, blocks) in self._offers.items()
        }
        return super().build_connector_meta(scheduler_output)

    def _copy(self, pull: Pull, offer: Offer) -> None:
        super()._copy(pull, Offer(offer.req, offer.blocks[-(pull.first + len(pull.blocks)) :]))


class ClientsKey(Peer):
    """Keeps what it holds under an id that clients choose: the second of two overwrites the first."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished(request, block_ids)
        chosen = (request.kv_transfer_params or {}).get("transfer_id")
        if held and params is not None and chosen is not None:
            self._offers[chosen] = self._offers.pop(params["remote_request_id"])
            params["remote_request_id"] = chosen
        return held, params


class NumberedKeys(Peer):
    """Returns a map whose keys are numbers: they come back from JSON as text."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished(request, block_ids)
        return held, params and {**params, "blocks_of_group": {0: list(block_ids)}}


class Silent(Peer):
    """Finishes requests that were to be handed over as if nobody had asked."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        self._offers.clear()
        return False, None


class LastOfThePrompt(Peer):
    """Hands the last token of the prompt over as the first one of the output."""

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished(request, block_ids)
        return held, params and {**params, "first_token": request.prompt_token_ids[-1]}


class BestEffort(Peer):
    """Says that nobody depends on its KV."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False


class SavesAsConsumer(ReferenceConnector):
    """Saves in every role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._may_save = True


class LoadsAsProducer(ReferenceConnector):
    """Loads in every role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._may_load = True


@fault(KVManager, "allocate_slots")
def lookahead_while_loading(
    original: Any, manager: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    """Slots for drafts are allocated with those of an asynchronous load."""
    if not num_new_tokens:
        kwargs["num_lookahead_tokens"] = manager.settings.block_size
    return original(manager, request, num_new_tokens, *args, **kwargs)
