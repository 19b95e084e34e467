# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: layers that share a block table. A model with several has several kinds of layers, and one pool of blocks for all.

A block belongs to one group at a time; the layers of different groups lie on the same bytes, as vLLM allocates them. Layers of kind

    full      attend to everything before them
    sliding   attend to the last `window` tokens; blocks that leave the window are freed, and null (block 0) in the table from then on
    wide      as sliding, with half the heads and twice the tokens per block: pages of all groups have one size
    latent    as full; a token has one vector, no K and V, and there is one head (MLA)
    state     recurrent (Mamba): a block holds one state, after the last token computed of those that the block is for
    private   full, but no part of the KV that is transferred (enable_kv_transfer=False): the engine makes it anew after a load
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full", "sliding", "wide", "private", "latent", "state"]
WINDOWED = ("sliding", "wide")


@dataclass(frozen=True)
class Group:
    """One group: the numbers of its layers, tokens per block, KV heads, window in tokens (None: unlimited), is it transferred?"""

    kind: GroupKind
    layers: tuple[int, ...]
    block_size: int
    heads: int
    window: int | None = None
    transfer: bool = True

    @property
    def recurrent(self) -> bool:
        """Whether a block holds a state, and not what its tokens left each."""
        return self.kind == "state"

    def first_read(self, start: int) -> int:
        """The first position that a token at `start` attends to."""
        return 0 if self.window is None else max(0, start - self.window + 1)


def groups_of(kinds: Sequence[GroupKind], *, layers: int, block_size: int, heads: int, window: int) -> tuple[Group, ...]:
    """The groups of a model with `layers` layers: one per kind, one layer each; a single kind (none: full) is of all layers. ValueError
    if there are not as many layers as kinds."""
    if len(kinds) <= 1:
        kind: GroupKind = kinds[0] if kinds else "full"
        return (Group(kind, tuple(range(layers)), block_size, 1 if kind == "latent" else heads),)
    if len(kinds) != layers:
        raise ValueError(f"{len(kinds)} groups of one layer each in a model of {layers} layers")
    return tuple(
        Group(
            kind,
            (number,),
            block_size * (2 if kind == "wide" else 1),
            1 if kind == "state" else heads // 2 if kind == "wide" else heads,
            window if kind in WINDOWED else 2 if kind == "state" else None,  # the state before is all that a token needs
            kind != "private",
        )
        for number, kind in enumerate(kinds)
    )
