# SPDX-License-Identifier: Apache-2.0
"""What a torch operator does to its arguments, read from its schema once."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

METADATA = {
    "aten::set_",
    "aten::_unsafe_view",
    "aten::detach",
    "aten::alias",
    "aten::lift",
    "aten::lift_fresh",
    "aten::is_pinned",
}
HOST_OPERANDS = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}
KERNELS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


class Operation(NamedTuple):
    """`metadata`: touches no bytes, only shapes (views and the like). `reads_back`: its result, or the shape of it, depends on values, so
    the host has to wait. `returned`: for each return value the position of the argument that it is (an in-place or out= operator), or None
    for a new tensor. `written`: positions of arguments it writes. `indexing`: operands in host memory are moved to the device, with a
    wait. `custom`: not torch's own."""

    metadata: bool
    reads_back: bool
    returned: tuple[int | None, ...]
    written: frozenset[int]
    indexing: bool
    custom: bool
    runs: bool


@cache
def operation(function: Any) -> Operation:
    """Facts about an operator overload (torch._ops.OpOverload)."""
    schema = function._schema
    writes = {
        position: set(argument.alias_info.before_set)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    returned: list[int | None] = []
    views = False
    for value in schema.returns:
        alias = value.alias_info
        position = None
        if alias is not None and alias.is_write:
            position = next(
                (at for at, names in writes.items() if names & set(alias.before_set)), None
            )
        views = views or (alias is not None and not alias.is_write)
        returned.append(position)
    tags = function.tags
    return Operation(
        metadata=(views and not writes)
        or torch.Tag.inplace_view in tags
        or schema.name in METADATA,
        # Indexing is tagged as well, for its boolean masks; whether there is one is seen at the call.
        reads_back=bool(
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(tags)
        )
        and schema.name not in HOST_OPERANDS,
        returned=tuple(returned),
        written=frozenset(writes),
        indexing=schema.name in HOST_OPERANDS,
        custom=function.namespace not in ("aten", "prims", "prim"),
        runs=any(
            torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key) for key in KERNELS
        ),
    )
