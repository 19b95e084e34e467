# SPDX-License-Identifier: Apache-2.0
"""The effects of a torch operator on its arguments, read from its schema."""

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
    """Facts about one operator overload."""

    metadata: bool
    """It touches no bytes, only shapes (views and the like)."""
    reads_back: bool
    """Its result, or the result's shape, depends on values, so the host has to wait."""
    returned: tuple[int | None, ...]
    """For each return value: the position of the argument that it is (in-place and out= operators),
    or None for a new tensor."""
    written: frozenset[int]
    """Positions of the arguments that it writes."""
    indexing: bool
    """Operands in host memory are moved to the device, with a wait."""
    custom: bool
    """It is not one of torch's own operators."""
    runs: bool
    """It has a CPU kernel."""


@cache
def operation(function: Any) -> Operation:
    """Return the facts about an operator overload (torch._ops.OpOverload)."""
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
    tags = set(function.tags)
    value_dependent = tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    indexing = schema.name in HOST_OPERANDS
    return Operation(
        metadata=(views and not writes)
        or torch.Tag.inplace_view in tags
        or schema.name in METADATA,
        # Indexing has these tags because of boolean masks; the call shows whether it has a mask.
        reads_back=bool(value_dependent) and not indexing,
        returned=tuple(returned),
        written=frozenset(writes),
        indexing=indexing,
        custom=function.namespace not in ("aten", "prims", "prim"),
        runs=any(
            torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key) for key in KERNELS
        ),
    )
