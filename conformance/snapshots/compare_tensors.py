# SPDX-License-Identifier: Apache-2.0
"""What differs between two files of stored KV, in sentences: which elements of which tokens and heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import safetensors.numpy


def tensor_differences(old: bytes, new: bytes) -> list[str]:
    """Sentences about two safetensors files; empty if they are equal."""
    if old == new:
        return []
    try:
        before, after = safetensors.numpy.load(old), safetensors.numpy.load(new)
    except Exception as error:  # the library's own error type is not exported by all of its versions
        return [f"the file with the stored KV cannot be read: {error}"]
    out = [f"{name}: is not stored any more" for name in before if name not in after]
    out += [f"{name}: is stored now" for name in after if name not in before]
    for name in sorted(before):
        if name in after:
            out += [f"{name}: {text}" for text in _arrays(before[name], after[name])]
    return out or ["the files with the stored KV differ in their form only"]


def _arrays(old: np.ndarray, new: np.ndarray) -> Iterator[str]:
    if old.dtype != new.dtype and old.shape == new.shape:  # whole numbers became others
        yield f"was {old.dtype}, is {new.dtype}"
    elif old.shape != new.shape:
        yield f"was {old.dtype} {list(old.shape)}, is {new.dtype} {list(new.shape)}"
        return
    places = np.argwhere(old != new)
    if not len(places):
        return
    token, head, lane = map(int, places[0])
    side = "K" if lane < old.shape[2] // 2 else "V"
    heads = sorted(set(places[:, 1].tolist()))
    yield (
        f"{len(places)} of {old.size} elements differ, in tokens {spans(sorted(set(places[:, 0].tolist())))}, head"
        f"{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}; the first: token {token}, head {head}, {side} element"
        f" {lane % (old.shape[2] // 2)}: {old[token, head, lane]:g} -> {new[token, head, lane]:g}"
    )


def spans(numbers: Sequence[int]) -> str:
    """`1 to 3, 5` of [1, 2, 3, 5]."""
    out: list[list[int]] = []
    for number in numbers:
        if out and out[-1][1] == number - 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in out)
