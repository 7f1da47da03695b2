"""Entry by entry."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fact_trials.calls import Call
from tests.fact_trials.trial import UNSET, as_wide, equal, memory, tensors, touched, trial, worlds


@trial("BY_ENTRY")
def makes_each_entry_of_the_same_entries(call: Call) -> None:
    args, kwargs = call.given()
    if call.name in UNSET:
        return gives_the_shape_whatever_the_values(call)
    given = tensors((args, kwargs))
    for at, x in enumerate(given):
        for place in (0, 9):
            for flags in touched(call, args, kwargs, at, place):
                assert flags.shape == torch.broadcast_shapes(*(y.shape for y in given))
                flags.view(-1)[place] = False
                assert not flags.any(), f"entry {place} of {x} changes others"


@trial("LISTS", "FUSED")
def does_so_for_each_tensor_of_a_list(call: Call) -> None:
    args, kwargs = call.given()
    count, place = len(args[0]), 3
    for at, x in enumerate(tensors((args, kwargs))):
        if not x.ndim:  # how many steps there were
            continue
        for n, flags in enumerate(touched(call, args, kwargs, at, place)):
            if n % count == at % count:
                flags.view(-1)[place] = False
            assert not flags.any(), f"tensor {at} changes others"


@trial("PRECISIONS")
def gives_the_same_entries(call: Call) -> None:
    args, kwargs = call.given()
    assert torch.allclose(as_wide(call.on(args, kwargs)), as_wide(args[0]), rtol=0.01)


@trial("LIKES")
def gives_the_shape_whatever_the_values(call: Call) -> None:
    args, kwargs = call.given()
    result = call.on(args, kwargs)
    assert result.shape == args[0].shape and memory(result) != memory(args[0])
    if call.name not in UNSET:
        assert all(equal(result, call.on(*given)) for given in worlds(call))


@trial("NEW")
def reads_dtype_and_device_alone(call: Call) -> None:
    (x, *more), kwargs = call.given()
    for like in (x, x.float(), torch.full((3,), 9).double()):
        result = call.on([like, *more], kwargs)
        assert result.dtype == like.dtype and result.shape == more[0] and memory(result) != memory(like)
        assert call.name in UNSET or equal(as_wide(result), as_wide(call.on([x, *more], kwargs)))


@trial("COPIES")
def gives_memory_of_its_own(call: Call) -> None:
    (x, *more), kwargs = call.given()
    result: Tensor = call.on([x.t(), *more], kwargs)
    assert memory(result) != memory(x) and result.stride() == x.t().stride()
