# SPDX-License-Identifier: Apache-2.0
"""Sessions: requests that get more input when a turn has ended, and keep their KV until then.

A turn ends like a request. The last token was sampled and not computed: it is dropped, and what
comes next takes its place. Output that was computed becomes a part of the prompt. A session that
waits for input holds its blocks and a place among the running requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from kvconform.compat.vllm_api import AWAITING_INPUT
from kvconform.refimpl.engine import Engine

if TYPE_CHECKING:
    from vllm.v1.request import StreamingUpdate


def begin(request: Request) -> None:
    """Let a new session wait for input that comes before its turn has ended."""
    request.streaming_queue = deque()


def proceed(engine: Engine, session: Request, request: Request) -> None:
    """Give a session its next input, now or when its turn has ended; end it without one.

    `request` is the input; one that is not resumable ends the session.
    """
    from vllm.v1.request import StreamingUpdate  # older releases have no sessions

    more = StreamingUpdate.from_request(request)
    if session.status != AWAITING_INPUT:
        assert session.streaming_queue is not None
        session.streaming_queue.append(more)
    elif more is None:
        engine.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    else:
        _take(engine, session, more)
        if engine.settings.priority:  # it came later than it was queued for
            engine.leave_queues({session})
            _queue(engine, session)


def end_turn(engine: Engine, session: Request) -> bool:
    """Let a session whose turn has ended go on or wait for input; return whether it is over.

    What is in flight of it is dropped.
    """
    assert session.streaming_queue is not None
    engine.leave_queues({session})
    # Accepted drafts behind the token that ended the turn are no tokens of it.
    computed = session.num_computed_tokens - session.num_output_placeholders
    session.num_computed_tokens = min(computed, session.num_tokens - 1)
    session.num_output_placeholders = 0
    session.spec_token_ids = []
    session.drop_stale_output = True
    session.num_stale_output_tokens = session.num_in_flight_tokens
    if not session.streaming_queue:
        session.status = AWAITING_INPUT
    elif (more := session.streaming_queue.popleft()) is not None:
        _take(engine, session, more)
    else:
        return True
    _queue(engine, session)
    return False


def _queue(engine: Engine, session: Request) -> None:
    queue = engine.kv_holding_waiting if session.num_computed_tokens else engine.waiting
    queue.add_request(session)


def _take(engine: Engine, session: Request, more: StreamingUpdate) -> None:
    """Append the next input to a session, behind what it has computed."""
    # Of a session that was preempted, nothing is computed; it keeps all but its last token, too.
    kept = session.num_computed_tokens or session.num_tokens - 1
    size = engine.settings.block_size
    tokens = session._all_token_ids
    assert session.prompt_token_ids is not None
    session.prompt_token_ids.extend(tokens[session.num_prompt_tokens : kept])
    del tokens[kept:]
    del session.block_hashes[kept // size :]
    session._output_token_ids.clear()
    for item in more.mm_features or ():
        item.mm_position = replace(item.mm_position, offset=item.mm_position.offset + kept)
        session.mm_features.append(item)
    tokens.extend(more.prompt_token_ids or ())
    session.prompt_token_ids.extend(more.prompt_token_ids or ())
    session.update_block_hashes()
    session.num_prompt_tokens = len(session.prompt_token_ids)
    session.arrival_time = more.arrival_time
    session.sampling_params = more.sampling_params
    session.max_tokens = more.max_tokens
    session.status = RequestStatus.WAITING
