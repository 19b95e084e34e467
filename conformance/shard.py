# SPDX-License-Identifier: Apache-2.0
"""Shards: `--shard 2/4` makes the second of four parts of the selected runs, for machines that share the work.

Which run is in which part depends on the selection alone, so that it is the same on every machine and with any number of workers.
`kvconform merge` (kvconform.merge) joins their reports, and gives the answer.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from kvconform.case import Variant
from kvconform.errors import UsageError

ELSEWHERE = {"hash-seed": 8000, "second-process": 500}
"""Milliseconds that a related run in another process takes."""


@dataclass(frozen=True, order=True)
class Shard:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse(text: str) -> Shard:
    """`2/4`. ValueError in one sentence for anything else."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.count:
        raise ValueError("a shard is i/n with 1 <= i <= n, such as 2/4")
    return shard


def cost(variant: Variant) -> int:
    """About how many milliseconds a run takes, those included that it is compared with. Only ratios matter."""
    case = variant.case
    return 25 + 6 * len(case.steps) * (1 + len(case.relations)) + sum(ELSEWHERE.get(name, 0) for name in case.relations)


def part(variants: Sequence[Variant], shard: Shard) -> list[Variant]:
    """The runs of `shard`, in their order: the costliest first, each goes to the part that has least to do so far.

    UsageError where there are fewer runs than parts.
    """
    if len(variants) < shard.count:
        runs = "1 run is" if len(variants) == 1 else f"{len(variants)} runs are"
        raise UsageError(f"--shard {shard}: only {runs} selected, which is too few for {shard.count} shards")
    loads = [0] * shard.count
    mine = set()
    for variant in sorted(variants, key=lambda variant: (-cost(variant), variant.id)):
        lightest = loads.index(min(loads))
        loads[lightest] += cost(variant)
        if lightest == shard.number - 1:
            mine.add(variant.id)
    return [variant for variant in variants if variant.id in mine]


def suite_digest() -> str:
    """12 hexadecimal digits of this kvconform: its specification and the code that drives and judges. The version alone does not change
    from commit to commit."""
    found = hashlib.sha256()
    packages = {"": ".py", ".spec": ".yaml", ".refimpl": ".py", ".kernels": ".py", ".connectors": ".toml"}
    for package, suffix in ((f"kvconform{name}", suffix) for name, suffix in packages.items()):
        _digest(importlib.resources.files(package), suffix, package, found)
    return found.hexdigest()[:12]


def _digest(folder: Traversable, suffix: str, name: str, found: hashlib._Hash) -> None:
    """Take in the files under `folder`, sorted by name. What installers and interpreters leave there does not count."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name not in ("__pycache__", "spec", "refimpl", "kernels", "connectors", "fixtures"):
            _digest(entry, suffix, f"{name}/{entry.name}", found)
        elif entry.name.endswith(suffix) and entry.is_file():
            found.update(f"{name}/{entry.name}\0".encode())
            found.update(entry.read_bytes().replace(b"\r\n", b"\n"))
