# SPDX-License-Identifier: Apache-2.0
"""Tests of tensors under the modes: where they are, what is queued, what makes the host wait."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from kvconform.emulation.emulate import emulate
from kvconform.emulation.note import NotEmulated

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda():
    """Nothing on the compute stream runs before it must."""
    with emulate("compute") as emulation:
        yield emulation


def held(cuda, tensor):
    """The bytes of a tensor as they are now."""
    with cuda.raw():
        return tensor.clone()


def test_marked_memory_says_that_it_is_the_devices(cuda):
    kv = cuda.to_device(torch.zeros(4, 3))
    for tensor in (
        kv,
        kv[1:],
        kv.view(torch.int32),
        kv.t(),
        torch.empty(0, dtype=torch.int8, device=kv.device).set_(kv.untyped_storage()),
    ):
        assert (
            tensor.is_cuda
            and not tensor.is_cpu
            and tensor.device == DEVICE
            and tensor.get_device() == 0
            and not tensor.is_pinned()
        )
    host = torch.zeros(2)
    assert (
        host.is_cpu and not host.is_cuda and host.device.type == "cpu" and host.get_device() == -1
    )
    with cuda.raw():
        assert kv.device.type == "cpu" and not kv.is_cuda


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.full((3,), 0.0, device=0),
        lambda: torch.empty(3, device=DEVICE).zero_(),
        lambda: torch.arange(3, device="cuda:0") * 0,
        lambda: torch.tensor([0, 0, 0], device="cuda"),
        lambda: torch.as_tensor(np.zeros(3), device="cuda"),
        lambda: torch.zeros(3).to("cuda"),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros_like(torch.empty(3), device="cuda"),
        lambda: torch.zeros_like(torch.empty(3, device="cuda")),
        lambda: torch.empty(1, device="cuda").new_zeros(3),
        lambda: torch.empty(1, device="cuda").new_tensor([0, 0, 0]),
        lambda: torch.empty(1).new_tensor([0, 0, 0], device="cuda"),
        lambda: torch.empty(1, device="cuda").new_tensor(torch.zeros(3, dtype=torch.int8)),
        lambda: copy.copy(torch.zeros(3, device="cuda")),
        lambda: copy.deepcopy(torch.zeros(3, device="cuda")),
        lambda: copy.deepcopy(torch.nn.Parameter(torch.zeros(3, device="cuda"))),
        lambda: torch.zeros(1, device="cuda").expand(3).contiguous(),
        lambda: torch.nn.functional.pad(torch.zeros(2, device="cuda"), (0, 1)),
    ],
)
def test_ways_to_make_device_tensors(cuda, make):
    tensor = make()
    assert tensor.is_cuda and tensor.tolist() == [0, 0, 0]


def test_a_default_device_is_understood(cuda):
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda and not torch.ones(2, device="cpu").is_cuda


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, pin_memory=True),
        lambda: torch.zeros(3).pin_memory(),
        lambda: torch.empty_like(
            torch.zeros(3, device="cuda"), device="cpu", pin_memory=True
        ).zero_(),
        lambda: torch.tensor([0, 0, 0], pin_memory=True),
        lambda: torch.zeros(6, pin_memory=True)[2:5],
    ],
)
def test_ways_to_make_pinned_tensors(cuda, make):
    tensor = make()
    assert tensor.is_pinned() and tensor.is_cpu and tensor.numpy().tolist() == [0, 0, 0]
    assert (
        tensor.to("cpu") is tensor
        and tensor.pin_memory() is tensor
        and not tensor.clone().is_pinned()
    )


def test_what_is_pinned_by_address(cuda):
    buffer = torch.zeros(4, 8)
    row = buffer[1]
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(row.data_ptr(), row.nbytes, 0).value == 0
    assert (
        row.is_pinned()
        and buffer[1].is_pinned()
        and not buffer[0].is_pinned()
        and not buffer[2].is_pinned()
    )
    assert (
        runtime.cudaHostUnregister(row.data_ptr())
        == 0
        != runtime.cudaHostUnregister(row.data_ptr())
    )
    assert not row.is_pinned()


def test_operations_on_device_tensors_wait_for_their_turn(cuda):
    x = cuda.to_device(torch.ones(3))
    x.add_(1)
    y = x * 10
    z = torch.stack([x, y])
    high, where = z.max(dim=0)
    out = torch.empty(3, device="cuda")
    torch.add(x, y, out=out)
    assert (
        held(cuda, x).tolist() == [1, 1, 1]
        and z.shape == (2, 3)
        and z.dtype == torch.float32
        and where.dtype == torch.int64
    )
    cuda.finish_compute()
    assert held(cuda, z).tolist() == [[2, 2, 2], [20, 20, 20]] and held(cuda, high).tolist() == [
        20,
        20,
        20,
    ]
    assert held(cuda, where).tolist() == [1, 1, 1] and held(cuda, out).tolist() == [22, 22, 22]
    assert cuda.notes == []


def test_results_have_the_type_that_numbers_give_them(cuda):
    x = torch.ones(2, dtype=torch.int64, device="cuda")
    assert [(x * number).dtype for number in (1, 1.0, True)] == [
        torch.int64,
        torch.float32,
        torch.int64,
    ]
    flags = x > 0
    assert [(flags * number).dtype for number in (True, 1, 1.0)] == [
        torch.bool,
        torch.int64,
        torch.float32,
    ]
    assert (x[:1] * 1).shape == (1,) and (x.to(torch.int8) * 1).dtype == torch.int8


def test_host_operations_run_at_once(cuda):
    pinned = torch.ones(3, pin_memory=True)
    pinned.add_(1)
    assert pinned.tolist() == [2, 2, 2] and torch.ones(2).sum().item() == 2 and cuda.notes == []


def test_new_device_memory_holds_garbage(cuda):
    assert torch.empty(2, dtype=torch.uint8, device="cuda").tolist() == [0xCB, 0xCB]


def test_pageable_operands_are_read_at_the_call_and_pinned_ones_when_the_work_runs(cuda):
    pageable, pinned = torch.ones(2), torch.ones(2, pin_memory=True)
    x, y = torch.empty(2, device="cuda"), torch.empty(2, device="cuda")
    x.copy_(pageable, non_blocking=True)
    y.copy_(pinned, non_blocking=True)
    pageable.fill_(2)
    pinned.fill_(2)
    cuda.finish_compute()
    assert (
        held(cuda, x).tolist() == [1, 1] and held(cuda, y).tolist() == [2, 2] and cuda.notes == []
    )


def test_a_strided_pinned_operand_goes_through_staging(cuda):
    pinned = torch.ones(4, pin_memory=True)
    x = torch.empty(2, device="cuda")
    x.copy_(pinned[::2], non_blocking=True)
    pinned.fill_(2)
    cuda.finish_compute()
    assert held(cuda, x).tolist() == [1, 1]


def swapped(*sizes, **options):
    """A tensor without gaps whose last dimensions lie in memory the other way round."""
    return torch.zeros(*sizes, **options).transpose(-2, -1)


@pytest.mark.parametrize(
    "host, device, seen",
    [
        (lambda **o: swapped(2, 3, **o), lambda **o: swapped(2, 3, **o), 2),
        (lambda **o: swapped(2, 1, 3, **o), lambda **o: swapped(2, 1, 3, **o)[:, :, :], 2),
        # the device puts it in order
        (lambda **o: torch.zeros(3, 2, **o), lambda **o: swapped(2, 3, **o), 2),
        (lambda **o: swapped(2, 3, **o), lambda **o: torch.zeros(3, 2, **o), 1),  # the host does
        (lambda **o: swapped(2, 3, dtype=torch.float64, **o), lambda **o: swapped(2, 3, **o), 1),
        (
            lambda **o: torch.zeros(3, 2, dtype=torch.float64, **o),
            lambda **o: torch.zeros(3, 2, **o),
            2,
        ),
        # the same strides, with gaps
        (lambda **o: torch.zeros(3, 4, **o)[:, :2], lambda **o: torch.zeros(3, 4, **o)[:, :2], 1),
        (lambda **o: torch.zeros(2, **o), lambda **o: torch.zeros(3, 2, **o), 1),  # broadcast
    ],
)
def test_pinned_memory_without_gaps_is_copied_as_it_lies(cuda, host, device, seen):
    """Also to the host: what torch copies through pageable memory makes the host wait."""
    pinned, x = host(pin_memory=True), device(device="cuda")
    pinned.fill_(1)
    x.copy_(pinned, non_blocking=True)
    pinned.fill_(2)
    cuda.finish_compute()
    assert set(held(cuda, x).flatten().tolist()) == {seen} and cuda.notes == []
    if pinned.shape == x.shape:
        pinned.copy_(x.add_(1), non_blocking=True)
        assert [note.kind for note in cuda.notes] == ["sync"] * (seen == 1)
        cuda.finish_compute()
        assert set(pinned.flatten().tolist()) == {seen + 1}


@pytest.mark.parametrize(
    "case, waits",
    [
        (lambda x: torch.empty(2, pin_memory=True).copy_(x, non_blocking=True), False),
        (lambda x: torch.empty(2, pin_memory=True).copy_(x), True),
        # through pageable staging
        (lambda x: torch.empty(4, pin_memory=True)[::2].copy_(x, non_blocking=True), True),
        (lambda x: torch.empty(2).copy_(x, non_blocking=True), True),
        (lambda x: x.to("cpu", non_blocking=True), False),  # pinned, and not there yet
        (lambda x: x.to("cpu"), True),
        (lambda x: x.cpu(), True),
        (lambda x: x.tolist(), True),
        (lambda x: x[0].item(), True),
        (lambda x: bool(x[0]), True),
        (lambda x: int(x[0]), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x.unique(), True),
        (lambda x: x[x > 0], True),
        (lambda x: x.masked_select(x > 0), True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: x.copy_(torch.ones(2)), True),
        (lambda x: x.copy_(torch.ones(2), non_blocking=True), False),
        (lambda x: x.copy_(torch.ones(2, pin_memory=True)), True),
        (lambda x: x.copy_(torch.ones(2, pin_memory=True), non_blocking=True), False),
        (lambda x: torch.tensor([1.0], device="cuda"), True),
        (lambda x: torch.ones(2, device="cuda"), False),
        # the list becomes a tensor on the host, and then on the device
        (lambda x: x[[0, 1]], True),
        (lambda x: x[torch.tensor([0, 1])], True),
        (lambda x: x[torch.arange(2, device="cuda")], False),
        (lambda x: x.__setitem__(0, 5), False),
        (lambda x: x.__setitem__(slice(0, 2), torch.ones(2)), True),
        (lambda x: x.index_copy_(0, torch.arange(2, device="cuda"), x + 1), False),
        (lambda x: x.clone() + x.sum() * 2, False),
        (lambda x: x.to(torch.float16), False),
        (lambda x: x.to("cuda"), False),
        (lambda x: x.where(x > 0, 0), False),
        (lambda x: x.masked_fill_(x > 0, 0), False),
    ],
)
def test_what_makes_the_host_wait(cuda, case, waits):
    x = cuda.to_device(torch.ones(2))
    x.add_(1)
    case(x)
    assert [note.kind for note in cuda.notes] == ["sync"] * waits
    assert held(cuda, x)[0].item() == 1 or waits  # what waits has run what was queued


def test_a_copy_to_the_host_that_does_not_block_is_not_there_yet(cuda):
    x = cuda.to_device(torch.ones(2))
    x.add_(1)
    early = x.to("cpu", non_blocking=True)
    assert early.is_pinned() and early.is_cpu and early.tolist() != [2, 2]
    cuda.finish_compute()
    assert early.tolist() == [2, 2]


def test_values_that_are_waited_for_are_right(cuda):
    x = cuda.to_device(torch.zeros(4))
    x.add_(1)
    x[2] = 0
    assert (
        x.sum().item() == 3
        and x.cpu().tolist() == [1, 1, 0, 1]
        and x.nonzero().flatten().tolist() == [0, 1, 3]
    )
    assert (
        x[x > 0].shape == (3,)
        and x[x > 0].is_cuda
        and x.nonzero().is_cuda
        and bool(x[0])
        and x.numpy(force=True).tolist() == [1, 1, 0, 1]
    )


def test_what_cuda_refuses_is_refused(cuda):
    x = torch.zeros(2, device="cuda")
    for use in (lambda: x.numpy(), lambda: np.asarray(x)):
        with pytest.raises(TypeError, match="numpy"):
            use()
    with pytest.raises(RuntimeError, match="one device"):
        x + torch.ones(2)
    assert (x + torch.tensor(1.0)).tolist() == [1, 1]  # a single number may be on the host
    with pytest.raises(RuntimeError, match="can be pinned"):
        x.pin_memory()
    with pytest.raises(RuntimeError, match="can be pinned"):
        torch.zeros(2, device="cuda", pin_memory=True)
    with pytest.raises(NotEmulated, match="DLPack"):
        x.__dlpack__()


def test_copies_that_python_makes(cuda):
    x = cuda.to_device(torch.ones(2))
    x.add_(1)
    twin = copy.deepcopy({"a": x, "b": x})
    assert twin["a"] is twin["b"] and twin["a"].is_cuda and cuda.notes == []
    x.add_(1)
    file = io.BytesIO()
    torch.save(x, file)
    assert len(cuda.notes) == 1 and torch.load(io.BytesIO(file.getvalue())).tolist() == [3, 3]
    assert pickle.loads(pickle.dumps(x[1:])).tolist() == [3] and twin["a"].tolist() == [2, 2]
    assert x.share_memory_() is x and x.is_cuda
    host = torch.ones(2)
    cuda.notes.clear()
    assert (
        copy.deepcopy(host).tolist() == pickle.loads(pickle.dumps(host)).tolist() == [1, 1]
        and cuda.notes == []
    )


def test_a_shallow_copy_shows_the_same_memory(cuda):
    x, host, weight = (
        cuda.to_device(torch.ones(4)),
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2, device="cuda")),
    )
    x.add_(1)
    twin = copy.copy(x[1:])
    twin[0] = 7
    assert twin.is_cuda and twin.shape == (3,) and cuda.notes == [] and x.tolist() == [2, 7, 2, 2]
    host.tag = weight.tag = "a"
    for tensor in (host, weight):
        again = copy.copy(tensor)
        assert (
            type(again) is type(tensor)
            and again.tag == "a"
            and again.requires_grad == tensor.requires_grad
        )
        assert (
            again.data_ptr() == tensor.data_ptr()
            and again.is_cuda == tensor.is_cuda
            and again is not tensor
        )


def test_new_tensors_are_where_the_tensor_is_or_where_they_are_wanted(cuda):
    x, host = torch.ones(2, dtype=torch.int16, device="cuda"), torch.ones(2, dtype=torch.int16)
    made = [
        x.new_tensor([1]),
        host.new_tensor([1], device="cuda"),
        host.new_tensor([1]),
        x.new_tensor([1], device="cpu"),
    ]
    assert [tensor.is_cuda for tensor in made] == [True, True, False, False] and {
        tensor.dtype for tensor in made
    } == {torch.int16}
    assert host.new_tensor(x).is_cpu and x.new_tensor([1.5], dtype=torch.float32).tolist() == [1.5]


def test_memory_that_would_move_is_refused(cuda):
    x = torch.ones(2, device="cuda")
    moves = (
        lambda: x.resize_(100),
        lambda: torch.add(x, x, out=torch.empty(0, device="cuda")),
        lambda: x.untyped_storage()._share_cuda_(),
    )
    for use in moves:
        with pytest.raises(NotEmulated):
            use()
    assert torch.add(x, x, out=torch.empty(2, device="cuda")).tolist() == [2, 2]


def test_operators_of_extensions_are_queued_like_torchs_own(cuda):
    library = torch.library.Library("kvconform_emulation_test", "DEF")
    library.define("double_into(Tensor source, Tensor(a!) target) -> ()")
    library.define("triple(Tensor source) -> Tensor")
    library.define("gpu_only(Tensor source) -> Tensor")
    library.impl("double_into", lambda source, target: target.copy_(source * 2) and None, "CPU")
    library.impl("triple", lambda source: source * 3, "CPU")
    ops = torch.ops.kvconform_emulation_test
    x, y = cuda.to_device(torch.ones(1)), cuda.to_device(torch.zeros(1))
    x.add_(1)
    assert ops.double_into(x, y) is None and held(cuda, y).tolist() == [0]
    # it has no shape function
    assert ops.triple(x).tolist() == [6] and [note.kind for note in cuda.notes] == [
        "undelayed",
        "sync",
    ]
    assert y.tolist() == [4]
    with pytest.raises(NotEmulated, match="gpu_only"):
        ops.gpu_only(x)


def test_inference_mode_makes_no_difference(cuda):
    """Work may be queued under it and run outside of it, and the other way round."""
    x = torch.zeros(2, device="cuda")
    with torch.inference_mode():
        y = torch.zeros(2, device="cuda")
        y[:1].add_(1)
        x.add_(1)
    z = x + y
    with torch.inference_mode():
        cuda.finish_compute()
    assert z.tolist() == [2, 1]


def test_printing_a_device_tensor_works(cuda):
    assert "cuda:0" in repr(torch.ones(2, device="cuda"))


def test_values_that_do_not_fit_are_refused_when_the_call_is_made():
    with emulate("compute") as cuda:
        kv = cuda.to_device(torch.zeros(4, 3, 2))
        index = torch.tensor([0, 2], device="cuda")
        with pytest.raises(RuntimeError, match="cannot be broadcast to indexing result"):
            kv[index, 1] = torch.ones(3, 2, device="cuda")
        with pytest.raises(RuntimeError, match="dtypes match, got Float .* and Double"):
            kv[index, 1] = torch.ones(2, device="cuda", dtype=torch.float64)
        kv[index, 1] = torch.ones(2, device="cuda")
        kv[kv[:, 0, 0] > 1] = 0.0  # a mask has to be read first
        cuda.drain()
        with cuda.raw():
            assert kv.sum() == 4
