# SPDX-License-Identifier: Apache-2.0
"""Planted defects: handing KV from a producer to a consumer engine, and the connector's roles."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from kvconform.compat.vllm_api import FINISHED_ERROR
from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.defects import targets
from kvconform.refimpl.plan import Save
from kvconform.refimpl.tracking import Tracked
from kvconform.refimpl.variants.converting import Converting
from kvconform.refimpl.variants.peer import Board, Offer, Peer, PeerMetadata, Pull
from kvconform.refimpl.variants.pusher import Progress, Push, Pusher
from kvconform.refimpl.variants.resharding import Resharding
from kvconform.refimpl.variants.routed import Routed

if TYPE_CHECKING:
    import torch


class OwnIds(Peer):
    """Looks up the KV under the id that the request has in the consumer engine."""

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        super()._pull(req, {**remote, "remote_request_id": req}, first, blocks)


class NotesOnlyLoads(Peer):
    """Notifies the producer only after a load, and not when the consumer needs none."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        self._taken.add(request.request_id)
        return super().request_finished(request, block_ids)


class ExpectsALoadOfWhatIsBeyond(Peer):
    """Notifies the producer without a load only of prompts that are not longer than the offer.

    A prompt with the producer's first token is longer: it takes the token for one to load.
    """

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        remote = self._remote(request)
        is_longer = remote and request.num_prompt_tokens > self._available(request, remote)
        if num_external_tokens or not is_longer:
            super().update_state_after_alloc(request, blocks, num_external_tokens)


class ForgetsAborted(Peer):
    """Does not notify the producer of a request that was aborted before it had memory."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        self._taken.add(request.request_id)
        return super().request_finished(request, block_ids)


class PromisesAgain(Peer):
    """Answers from the request's parameters alone, and promises again what it has fetched."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        self._taken.discard(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class RemembersConsumers(Peer):
    """Keeps the id of every request that it has fetched something for."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._fetched: list[str] = []

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        self._fetched.append(req)
        super()._pull(req, remote, first, blocks)


class NeverGivesUp(Peer):
    """Keeps an offer until a consumer has fetched it, and no lease ends that."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.lease = 0


class ReleasesAtOnce(Peer):
    """Releases an offer at once, as if a consumer had fetched it."""

    def _released(self) -> set[str]:
        self.board.done += list(self.board.offers)
        return super()._released()


class ReadsWhatItIsTold(Peer):
    """Reads the blocks that the parameters name, even if the producer no longer keeps them."""

    def _pull(self, req: str, remote: dict[str, Any], first: int, blocks: tuple[int, ...]) -> None:
        super()._pull(req, remote, first, blocks)
        pull = self._pulls[-1]
        listed = remote.get("remote_block_ids") or []
        self._pulls[-1] = dataclasses.replace(pull, key=f"{pull.key} {listed}")

    def _offer(self, pull: Pull) -> Offer | None:
        key, _, listed = pull.key.partition(" ")
        blocks = [int(block) for block in listed.strip("[]").split(",") if block.strip()]
        if not blocks or pull.engine not in self.boards or "/" not in key:
            return None
        return Offer("", blocks)

    def _copy(self, pull: Pull, offer: Offer) -> None:
        super()._copy(dataclasses.replace(pull, key=pull.key.partition(" ")[0]), offer)


class ExpiredIsFine(Peer):
    """Reports a load as finished although the producer no longer has the KV."""

    def _failed(self, pull: Pull) -> None:
        return


class NotesAndFails(Peer):
    """Notifies the producer when a pull begins, which then fails: what it reads is gone by then."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        meta = self._get_connector_metadata()
        assert isinstance(meta, PeerMetadata)
        for pull in meta.pulls:
            self.boards[pull.engine][self._rank].done.append(pull.key)


class SilentFailure(Peer):
    """Forgets a failed pull, and reports neither an error nor the end."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._pulling = [
            item for item in self._pulling if item[1] > 0 or self._offer(item[2]) is not None
        ]
        self._pulling = [item for item in self._pulling if item[2].engine in self.boards]
        return super().get_finished(finished_req_ids)


class FirstChunk(Peer):
    """Offers the blocks that the request got first, without those of later chunks."""

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
    """Offers the blocks of drafts too, and pairs the two block lists from their ends."""

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


class OwnBlockSize(Converting):
    """Finds the producer's tokens with the consumer's block size."""

    def _size_of(self, board: Board) -> int:
        return self._size


class UnscaledPeer(Peer):
    """Counts blocks of the size of one rank's share, where ranks split the tokens of a block."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size


class OneBoard(Peer):
    """Shows the KV of the rank that registered last as that of all ranks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank = 0


class FirstStagesLayers(Peer):
    """Pulls from the first rank of the producer on all ranks, and pairs layers by their place."""

    def _board(self, engine: str) -> Board | None:
        return self.boards.get(engine, {}).get(0)

    def _form(self, board: Board) -> tuple[Any, ...]:  # type: ignore[override]
        return (board.block_size,)

    def _copy(self, pull: Pull, offer: Offer) -> None:
        board = self.boards[pull.engine][0]
        source = offer.blocks[pull.first : pull.first + len(pull.blocks)]
        for pages, theirs in zip(self.board.pages.values(), board.pages.values(), strict=False):
            for at, other in zip(pull.blocks, source, strict=False):
                pages[at] = theirs[other]


class OwnRoom(Peer):
    """Finds the blocks of the second layer by its own number of blocks, not by the producer's."""

    def _copy(self, pull: Pull, offer: Offer) -> None:
        board = self.boards[pull.engine][self._rank]
        names = list(self.board.pages)
        source = offer.blocks[pull.first : pull.first + len(pull.blocks)]
        for number, pages in enumerate(self.board.pages.values()):
            for mine, theirs in zip(pull.blocks, source, strict=False):
                which, block = divmod(number * len(pages) + theirs, len(board.pages[names[0]]))
                pages[mine] = board.pages[names[which]][block]
        board.done.append(pull.key)


class KernelsBlocks(Peer):
    """Takes the blocks of the attention kernel for those of the scheduler."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.board.pages = kv_caches


class NotesBeforeItPulls(Peer):
    """Tells the producer that its KV is not needed when a thread is to copy it, and not after."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._pool = ThreadPoolExecutor(1) if role == KVConnectorRole.WORKER else None
        self._copying: list[tuple[str, Future[None]]] = []

    def _copy(self, pull: Pull, offer: Offer) -> None:
        assert self._pool is not None
        self.boards[pull.engine][self._rank].done.append(pull.key)
        self._copying.append((pull.req, self._pool.submit(super()._copy, pull, offer)))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        busy = {req for req, copied in self._copying if not copied.done()}
        copied = {req for req, _ in self._copying} - busy
        self._copying = [each for each in self._copying if each[0] in busy]
        return sent, ((received or set()) | copied) - busy or None

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        super().shutdown()


class ClientsKey(Peer):
    """Files its offers under an id that clients choose: the second of two overwrites the first."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        held, params = super().request_finished(request, block_ids)
        chosen = (request.kv_transfer_params or {}).get("transfer_id")
        if held and params is not None and chosen is not None:
            self._offers[chosen] = self._offers.pop(params["remote_request_id"])
            params["remote_request_id"] = chosen
        return held, params


class NumberedKeys(Peer):
    """Returns a map with integer keys, which JSON turns into text."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        held, params = super().request_finished(request, block_ids)
        return held, params and {**params, "blocks_of_group": {0: list(block_ids)}}


class Silent(Peer):
    """Finishes a request without handing it over, although its parameters ask for that."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        super().request_finished(request, block_ids)
        self._offers.clear()
        return False, None


class LastOfThePrompt(Peer):
    """Hands over the last token of the prompt as the first token of the output."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        held, params = super().request_finished(request, block_ids)
        return held, params and {**params, "first_token": request.prompt_token_ids[-1]}


class BestEffort(Peer):
    """Declares that its KV need not be delivered."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False


class OffersWhatItComputed(Peer):
    """Offers the blocks that it computed, and not those that it found in its own cache (B144)."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        found = num_computed_tokens // self._size
        self._found: dict[str, int] = {**getattr(self, "_found", {}), request.request_id: found}
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._offers = {
            key: (req, blocks[self._found.get(req, 0) :])
            for key, (req, blocks) in self._offers.items()
        }
        return super().build_connector_meta(scheduler_output)


class OneMessageOfBlocks(Peer):
    """Copies as many blocks as one message names, 64, and takes the load for done."""

    def _copy(self, pull: Pull, offer: Offer) -> None:
        super()._copy(dataclasses.replace(pull, blocks=pull.blocks[:64]), offer)


class AsksForOneBlock(Peer):
    """Loads the first block of what is handed over; the rest is computed again."""

    def _available(self, request: Any, remote: dict[str, Any]) -> int:
        return min(super()._available(request, remote), self._size)


class DropsEarlyNotices(Peer):
    """Drops the notice that KV is not needed if its worker does not know the offer yet (B140)."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._pulling = [
            item for item in self._pulling if item[2].blocks or self._offer(item[2]) is not None
        ]
        return super().get_finished(finished_req_ids)


class ExpectsOneNotice(Peer):
    """Expects one notice per offer; n > 1 makes siblings, each of which sends one (B140)."""

    def _released(self) -> set[str]:
        return {self.board.offers.pop(self.board.done.pop()).req for _ in list(self.board.done)}


class ClaimsTheFirstToken(Peer):
    """Takes all of its prompt for pulled, although the producer has sampled the last token only."""

    def _available(self, request: Any, remote: dict[str, Any]) -> int:
        return int(request.num_prompt_tokens)


class KeepsNothingOfStopped(Peer):
    """Keeps blocks only of requests that end at their length, and hands over the others, too."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        held, params = super().request_finished(request, block_ids)
        return held and request.status == RequestStatus.FINISHED_LENGTH_CAPPED, params


class ForgetsShortPrompts(Peer):
    """Neither loads a prompt that is shorter than a block, nor tells the producer."""

    def _remote(self, request: Any) -> dict[str, Any] | None:
        return None if request.num_prompt_tokens < self._size else super()._remote(request)


class KnowsTheConsumersRole(Peer):
    """Takes an engine for a consumer only if that is its only role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.consumes = self._kv_transfer_config.kv_role == "kv_consumer"


class ServesTheFirstConsumer(Peer):
    """A producer serves only the consumer engine that has come first."""

    first: ClassVar[dict[str, str]] = {}

    def _offer(self, pull: Pull) -> Offer | None:
        if self.first.setdefault(pull.engine, self.engine_id) != self.engine_id:
            return None
        return super()._offer(pull)


class SameTokensSameKV(Peer):
    """Takes the KV of any offer with the same tokens, whatever its adapter, salt or images."""

    def _key(self, request: Any) -> str:
        return f"{super()._key(request)}#{request.prompt_token_ids}"

    def _copy(self, pull: Pull, offer: Offer) -> None:
        tokens = pull.key.partition("#")[2]
        offers = self.boards[pull.engine][self._rank].offers
        super()._copy(pull, [each for key, each in offers.items() if key.endswith(tokens)][-1])


class ReadsAnOldOffer(Peer):
    """Looks for the offer when a pull begins, and reads it when it gets to it, withdrawn or not."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._known: dict[str, Offer] = {}

    def _offer(self, pull: Pull) -> Offer | None:
        if pull.req not in self._known and (offer := super()._offer(pull)) is not None:
            self._known[pull.req] = offer
        return self._known.get(pull.req)

    def _copy(self, pull: Pull, offer: Offer) -> None:
        del self._known[pull.req]
        super()._copy(pull, offer)


class BelievesLateNotices(Peer):
    """Reports an offer that was withdrawn once more when its consumer needs nothing of it."""

    def _failed(self, pull: Pull) -> None:
        if not pull.blocks and pull.engine in self.boards:
            self.boards[pull.engine][self._rank].done.append(pull.key)
        super()._failed(pull)

    def _released(self) -> set[str]:
        late = {key for key in self.board.done if key not in self.board.offers}
        return super()._released() | {key.rpartition("/")[0] for key in late}


class LeasesFromTheArrival(Peer):
    """Counts the time of a lease from the arrival of the request, and not from its end."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._began: dict[str, float] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        meta = self._get_connector_metadata()
        assert isinstance(meta, SinceMetadata)
        for key, began in meta.began.items():
            self.board.offers[key].until = began + self.lease_seconds

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        self._began.setdefault(request.request_id, time.monotonic())
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        began = {key: self._began.pop(req) for key, (req, _) in meta.offers.items()}
        return SinceMetadata(meta.offers, meta.pulls, began)


@dataclass
class SinceMetadata(PeerMetadata):
    """Also when the requests of the offers arrived, by key."""

    began: dict[str, float] = field(default_factory=dict)


class FirstRankNotices(Peer):
    """Of several ranks, only the first one sends a notice without a load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._rank:
            self._pulling = [item for item in self._pulling if item[2].blocks]


class FirstRankFails(SilentFailure):
    """Of several ranks, only the first one reports a failed pull, and its end."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        base = SilentFailure if self._rank else Peer
        return base.get_finished(self, finished_req_ids)


class FirstReaderFrees(ReadsAnOldOffer, Resharding):
    """A producer's rank frees its blocks when one reader has what it needs; others read on."""

    def _note(self, pull: Pull, rank: int, board: Board) -> None:
        board.done.append(pull.key)


class OwnOffsetOfAHit(Converting):
    """Skips, after a local hit, as many of the producer's blocks as it has itself."""

    def _start(self, pull: Pull, size: int) -> int:
        return pull.first * size


class OffersAtOnce(Routed):
    """Offers blocks to a consumer that is there already as soon as the request has them."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.produces and (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._offers[self._key(request)] = (request.request_id, blocks.get_block_ids()[0])


class DropsUnknownPulls(Routed):
    """A producer drops the consumer's request for what it does not have yet, which is not repeated.

    So the consumer waits for ever.
    """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._pulling = [item for item in self._pulling if self._offer(item[2]) is not None]


class TakesBytesForNumbers(Peer):
    """Copies the bytes of a block, whatever type the numbers have in the producer."""

    @staticmethod
    def _form(board: Board) -> tuple[Any, ...]:
        return board.block_size, board.ranks, board.slices

    def _copy(self, pull: Pull, offer: Offer) -> None:
        super()._copy(pull, offer)
        board = self.boards[pull.engine][self._rank]
        source = offer.blocks[pull.first : pull.first + len(pull.blocks)]
        for name, pages in self.board.pages.items():
            for mine, theirs in zip(pull.blocks, source, strict=False):
                page = pages[mine]
                read = board.pages[name][theirs].contiguous().flatten().view(page.dtype)
                page[:] = read[: page.numel()].view(page.shape)


class PushesTheLastChunk(Pusher):
    """Hands over what its last step has filled, and not what was pushed before."""

    def _deliver(self, push: Push) -> None:
        self.mailboxes.pop((self.engine_id, self._rank, push.key), None)
        super()._deliver(push)


class PushesTooEarly(Pusher):
    """Pushes when the step begins, before its blocks are filled."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        super().wait_for_save()

    def wait_for_save(self) -> None:
        return


class PushesBlocksOnce(Pusher):
    """Counts a block as pushed when its first tokens were, and never pushes the others."""

    def _push(self, req: str, progress: Progress, end: int) -> Push:
        progress.tokens = -(-progress.tokens // self._size) * self._size
        return super()._push(req, progress, end)


class SavesAsConsumer(ReferenceConnector):
    """Saves in every role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._may_save = True


class SavesOutputAsConsumer(ReferenceConnector):
    """Looks at its role for prompts only: a consumer stores what it decodes."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        decodes = end > tracked.request.num_prompt_tokens
        self._may_save = self._kv_transfer_config.is_kv_producer or decodes
        return super()._plan_save(tracked, end, scheduled, final)


class LoadsAsProducer(ReferenceConnector):
    """Loads in every role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._may_load = True


@targets.ALLOCATE_SLOTS.replaced_by
def lookahead_while_loading(
    allocate: Any, manager: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    """Allocate slots for drafts together with those of an asynchronous load."""
    if not num_new_tokens:
        kwargs["num_lookahead_tokens"] = manager.settings.block_size
    return allocate(manager, request, num_new_tokens, *args, **kwargs)


class MatchesTheEnds(Peer):
    """Takes the last of the producer's blocks, as if it lacked only a local hit at the beginning.

    That is right as long as the producer has no more blocks than the consumer wants.
    """

    def _copy(self, pull: Pull, offer: Offer) -> None:
        blocks = offer.blocks[-len(pull.blocks) :] if pull.blocks else []
        super()._copy(dataclasses.replace(pull, first=0), dataclasses.replace(offer, blocks=blocks))


class OneConnection(Peer):
    """Keeps the connection to its first producer, and uses it for every other one."""

    _first: str | None = None

    def _board(self, engine: str) -> Board | None:
        if engine in self.boards and self._first not in self.boards:
            self._first = engine
        return super()._board(self._first or engine)


class ReadsTheFirstRank(Peer):
    """Reads from the first rank of a producer with more ranks than it has itself."""

    def _reads(self, board: Board) -> bool:
        return board.ranks > self.board.ranks or super()._reads(board)

    def _copy(self, pull: Pull, offer: Offer) -> None:
        board = self._board(pull.engine)
        if board is None or board.ranks <= self.board.ranks:
            super()._copy(pull, offer)
            return
        for name, pages in self.board.pages.items():
            theirs = board.pages[name]
            shared = tuple(slice(0, size) for size in theirs.shape[1:])
            for block, source in zip(pull.blocks, offer.blocks[pull.first :], strict=False):
                pages[(block, *shared)] = theirs[source]
        board.done.append(pull.key)


class ExtendsTheOldTable(Pusher):
    """Goes on pushing a request that was preempted as if it had kept its blocks."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id not in self._progress:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _scheduled(self, scheduler_output: Any) -> Iterator[Any]:
        for req, computed, blocks, replaces in super()._scheduled(scheduler_output):
            known = req in self._progress and self._progress[req].tokens > 0
            yield req, computed, blocks, replaces and not known


class PushesInLayerHooks(Pusher):
    """Pushes the layers whose hook was called; a step that replays a graph calls none."""

    def clear_connector_metadata(self) -> None:
        self.__dict__["called"] = set()
        super().clear_connector_metadata()

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault("called", set()).add(layer_name)

    def _deliver(self, push: Push) -> None:
        super()._deliver(push)
        called = self.__dict__.get("called", ())
        mailbox = self.mailboxes[self.engine_id, self._rank, push.key]
        for number in range(push.first, push.first + len(push.blocks)):
            for name, page in mailbox.pages[number].items():
                if name not in called:
                    page.zero_()


class LeavesTheDrafterOut(Peer):
    """Copies the layers below num_hidden_layers: a drafter's has the next number."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._layers = vllm_config.model_config.hf_config.num_hidden_layers

    def _copy(self, pull: Pull, offer: Offer) -> None:
        pages = self.board.pages
        numbers = {name: int(name.split(".")[2]) for name in pages}
        self.board.pages = {name: pages[name] for name in pages if numbers[name] < self._layers}
        super()._copy(pull, offer)
        self.board.pages = pages


class ForgetsErrors(Peer):
    """Knows of requests that end by themselves or are aborted, and raises for a failed load."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        assert request.status != FINISHED_ERROR
        return super().request_finished(request, block_ids)
