"""Views, reshapes, slices, and what is a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fact_trials.calls import Call
from tests.fact_trials.trial import UNSET, as_wide, equal, of_one_memory, tensors, trial


@trial("LIKE_ANOTHER")
def takes_no_value_of_a_second(call: Call) -> None:
    args, kwargs = call.given()
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return
    result = call.on(args, kwargs)
    assert equal(result, call.on([args[0], torch.full_like(args[1], 9)], kwargs))
    assert result.dtype == args[1].dtype or result.shape == args[1].shape


@trial("SLICES")
def gives_a_part_of_a_dim(call: Call) -> None:
    x, found = of_one_memory(call)
    assert len(found) > 1 or found[0].numel() < x.numel()
    entries = torch.cat([y.flatten() for y in found]).tolist()
    assert len(entries) == len(set(entries)) and set(entries) <= set(x.flatten().tolist())


@trial("TURNS")
def turns_dims(call: Call) -> None:
    x, (turned,) = of_one_memory(call)
    assert torch.equal(turned, x.permute(1, 0))


@trial("REGROUPS")
def keeps_the_order(call: Call) -> None:
    x, (regrouped,) = of_one_memory(call)
    assert torch.equal(regrouped.flatten(), x.flatten()) and regrouped.shape != x.shape


@trial("EXPANDS")
def repeats_entries(call: Call) -> None:
    x, (expanded,) = of_one_memory(call)
    assert expanded.numel() > x.numel() and torch.equal(expanded.unique(), x.unique())


@trial("VIEWS")
def may_return_the_same_memory(call: Call) -> None:
    of_one_memory(call)


@trial("VALUE_PROPERTIES")
def holds_entries_of_the_tensor(call: Call) -> None:
    of_one_memory(call)


@trial("RESHAPES")
def gives_each_entry_at_most_once(call: Call) -> None:
    args, kwargs = call.given()
    left = as_wide(args[0]).flatten().real.tolist()
    for entry in torch.cat([as_wide(x).flatten().real for x in tensors(call.on(args, kwargs))]).tolist():
        match = min(left, key=lambda x: abs(x - entry))
        assert abs(match - entry) < 0.005
        left.remove(match)


@trial("PICKS")
def takes_places_from_a_tensor(call: Call) -> None:
    x, index = torch.rand(4, 6), torch.tensor([2, 0])
    found = call.on([x, index] if call.name == "__getitem__" else [x, 0, index])
    assert torch.equal(found, torch.stack([x[2], x[0]]))


@trial("INDEXES")
def reads_or_writes_at_an_index(call: Call) -> None:
    x = torch.arange(4)
    result = call.on([x, 2] if call.name == "__getitem__" else [x, 2, 9])
    assert x.tolist() == [0, 1, 9, 3] if result is None else result == 2


@trial("SHIFTS")
def goes_by_a_number_modulo_a_size(call: Call) -> None:
    x = torch.rand(4, 4)
    dims = 0 if call.name == "roll" else (0, 1)
    assert equal(call.on([x, 1, dims]), call.on([x, 5, dims]))


_SIZES: dict[str, Callable[[int], list[Any]]] = {
    "view": lambda n: [torch.ones(n, 6), (n, 2, 3)],
    "reshape": lambda n: [torch.ones(n, 6), (n, 2, 3)],
    "unflatten": lambda n: [torch.ones(3 * n), 0, (n, 3)],
    "full": lambda n: [(n, 6), 1.0],
    "new_full": lambda n: [torch.ones(1), (n, 6), 1.0],
    **{name: lambda n: [torch.ones(1), (n, 6)] for name in ("new_zeros", "new_ones", "new_empty")},
    **{name: lambda n: [torch.ones(1, 6), (n, 6)] for name in ("expand", "broadcast_to")},
    **{name: lambda n: [torch.ones(6), (n, 1)] for name in ("repeat", "tile")},
    **{name: lambda n: [(n, 6)] for name in ("zeros", "ones", "empty", "rand", "randn")},
}


@trial("SIZED")
def its_numbers_are_sizes(call: Call) -> None:
    four, eight = call.on(_SIZES[call.name](4)), call.on(_SIZES[call.name](8))
    assert four.shape[0] == 4 and eight.shape == (8, *four.shape[1:])
    if call.name not in UNSET | {"rand", "randn"}:
        assert len(eight.unique()) == 1 and torch.equal(eight, torch.cat([four, four]))


@trial("SIZED_BY_SECOND")
def its_second_argument_tells_the_size(call: Call) -> None:
    args, kwargs = call.given()
    (first, *_), _ = call.given(1)
    shapes = [x.shape for x in tensors(call.on(args, kwargs))]
    assert shapes == [x.shape for x in tensors(call.on([first, *args[1:]], kwargs))]
