# SPDX-License-Identifier: Apache-2.0
"""Measures the reference connector's codecs on the KV that a model computes.

`python -m kvconform.dev.model_kv MODEL [--text FILE] [--tokens N] [--chunk N...]` prints, by codec,
how many times smaller the KV becomes in bfloat16, and the largest error of a value as a part of the
largest value of its layer's chunk. MODEL is a folder or a GGUF file that transformers loads (GGUF
needs the packages gguf and accelerate). Without a text, the tokens are random. The exit status is 1
if a codec loses more than it declares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvconform.dev.codecs import lossy_codecs
from kvconform.refimpl.cache.codecs import Codec

DTYPE = torch.bfloat16


@dataclass
class Measured:
    """What a codec did to chunks: bytes before and after, and the largest error of each."""

    codec: Codec
    before: int = 0
    after: int = 0
    largest: float = 0.0

    @property
    def smaller(self) -> float:
        """How many times smaller the chunks became."""
        return self.before / self.after

    def add(self, rows: torch.Tensor) -> None:
        """Store and load a layer of a chunk, [tokens, values]."""
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()
        stored = self.codec.encode(data, rows.dtype, len(rows))
        loaded = torch.frombuffer(bytearray(self.codec.decode(stored, rows.dtype)), dtype=DTYPE)
        off = (loaded.view(rows.shape).float() - rows.float()).abs().max()
        self.before += len(data)
        self.after += len(stored)
        self.largest = max(self.largest, float(off / rows.float().abs().max()))


def measure(layers: list[torch.Tensor], chunk: int) -> dict[str, Measured]:
    """Measure each lossy codec on layers [tokens, values], in whole chunks of `chunk` tokens.

    Codecs whose package is missing are left out.
    """
    found = {name: Measured(codec) for name, codec in lossy_codecs().items()}
    for rows in (rows for layer in layers for rows in _chunks(layer, chunk)):
        for measured in found.values():
            measured.add(rows)
    return found


def _chunks(layer: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(layer) - chunk + 1, chunk):
        yield layer[start : start + chunk]


def kv_of(model: Path, text: str | None, tokens: int) -> list[torch.Tensor]:
    """Return the KV of each layer, [tokens, values], as a connector reads it from vLLM's cache.

    A row has the keys and the values of each head side by side.
    """
    import transformers

    file = {"gguf_file": model.name} if model.is_file() else {}
    folder = model.parent if model.is_file() else model
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **file)
    if text is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, loaded.config.vocab_size, (1, tokens), generator=generator)
    else:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **file)
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
    with torch.no_grad():
        cache = loaded(ids, use_cache=True).past_key_values
    return [
        torch.cat([layer.keys[0], layer.values[0]], dim=-1).transpose(0, 1).flatten(1).to(DTYPE)
        for layer in cache.layers
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the measurements and return the exit status."""
    parser = argparse.ArgumentParser(prog="kvconform.dev.model_kv", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: random tokens")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="default: 1024")
    parser.add_argument(
        "--chunk", type=int, nargs="+", default=[16, 256], metavar="N", help="default: 16 256"
    )
    chosen = parser.parse_args(arguments)
    text = None if chosen.text is None else chosen.text.read_text(encoding="utf-8")
    layers = kv_of(chosen.model, text, chosen.tokens)
    tokens, columns = layers[0].shape
    print(f"{len(layers)} layers, {tokens} tokens of {columns} values")
    beyond = set[str]()
    for chunk in chosen.chunk:
        if chunk > tokens:
            print(f"\nchunks of {chunk}: not measured, the text has {tokens} tokens")
            continue
        print(f"\nchunks of {chunk:<9}{'times smaller':>14}{'largest error':>15}{'declared':>10}")
        for name, one in measure(layers, chunk).items():
            declared = one.codec.tolerance
            print(f"  {name:<17}{one.smaller:14.2f}{one.largest:15.4f}{declared:10.2f}")
            if one.largest > declared:
                beyond.add(name)
    for name in sorted(beyond):
        print(f"kvconform: codec {name} loses more than it declares", file=sys.stderr)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
