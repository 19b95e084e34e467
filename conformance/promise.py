# SPDX-License-Identifier: Apache-2.0
"""What a connector promises to bring back: declared, or learned from the plainest run there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconform.crowd import NOBODY, Crowd
from kvconform.plain import Plain


class Promises:
    """Promised reloadable tokens. Declared capabilities give a formula; inferred ones are calibrated: a prompt that was chunked, preempted
    or speculated on must come back as far as the same number of tokens does when nothing of that happened. What comes back then may depend
    on the crowd, on what else there was to save and to load: who may decline a small load, or saves so much per step and no more, does.

    `calibrate(plain, block_size)` runs that plain workload and returns how many tokens came back.
    """

    def __init__(self, caps: dict[str, Any], declared: bool, calibrate: Callable[[Plain, int], int]) -> None:
        self.caps, self.declared, self.calibrate = caps, declared, calibrate

    def promised(
        self, source: Any, prompt: list[int], request: Any, block_size: int, final: int | None, crowd: Crowd = NOBODY,
        groups: tuple[str, ...] = (), window: int = 8, caching: bool = True, room: int = 3,
    ) -> int:  # fmt: skip
        """Tokens of `request` that must be loadable or local, given that `source` computed `final` positions. Reads only.

        `groups`: several KV cache groups, with that `window`. What a connector does with one says nothing about several. `caching`: whether
        the engine has a prefix cache; a connector may want one. `room`: how many times as many blocks as are needed there are; a connector
        may save only what is about to be evicted.
        """
        saves = self.caps["saves"]
        if final is None or saves == "none" or not self.caps["store"]:
            return 0
        known, wanted = source.all_token_ids, request.all_token_ids
        common = 0
        while common < min(len(known), len(wanted)) and known[common] == wanted[common]:
            common += 1
        limit = min(final, len(known) - 1, common, len(wanted) - 1)  # the last token's KV may be in flight at the finish (R141)
        if saves == "prompt":
            limit = min(limit, len(prompt))
        if self.declared:
            chunk = max(1, int(self.caps["chunk_tokens"]))
            return limit // chunk * chunk
        # What was not final is not shared in the plain run either: a connector that keeps whole chunks has none of a chunk cut short.
        shared = common if limit >= min(common, len(wanted) - 1) else limit
        plain = Plain(len(prompt), len(known) - len(prompt), shared, len(wanted), crowd, groups, window, caching, room)
        return min(limit, self.calibrate(plain, block_size)) if limit > 0 else 0
