"""What trials of facts are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_par.sharded.functions import writes
from tests.fact_trials.calls import Call

Trial = Callable[[Call], Any]
TRIALS: dict[str, Trial] = {}
"""By the fact: raises where it does not hold of a call's function."""

UNSET = {"empty_like", "new_empty", "empty"}
"""What these return is whatever lay in the memory."""


def trial(*facts: str) -> Callable[[Trial], Trial]:
    def register(function: Trial) -> Trial:
        TRIALS.update(dict.fromkeys(facts, function))
        return function

    return register


def tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def copied(value: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def equal(one: Any, other: Any) -> bool:
    a, b = tensors(one), tensors(other)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def seeded(call: Call, args: Any, kwargs: Any) -> Any:
    torch.default_generator.manual_seed(3)  # what `torch.manual_seed` asks of each kind of device takes longer
    return call.on(args, kwargs)


def made(call: Call, args: Any, kwargs: Any) -> list[Tensor]:
    """What a call writes and returns, from equal random draws."""
    args, kwargs = copied((args, kwargs))
    result = seeded(call, args, kwargs)
    return tensors(copied(args[0] if writes(call.name) else result))


def worlds(call: Call) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments of the same shapes with other values: drawn, all zero, all alike."""
    yield from (call.given(seed) for seed in range(12))
    for fill in (torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 3)):
        yield tree_map(lambda x: fill(x) if isinstance(x, Tensor) else x, call.given())  # noqa: B023


def answers(call: Call) -> set[str]:
    found = [call.on(*given) for given in worlds(call)]
    assert not any(isinstance(x, Tensor) for x in found)
    return {repr(x) for x in found}


def touched(
    call: Call, args: Any, kwargs: Any, at: int, place: int, among: tuple[float, ...] = (-9, 0.2, 0.7, 9)
) -> list[Tensor]:
    """Which entries of the results go by the entry ``place`` of the tensor ``at``: tried with some values."""
    x = tensors((args, kwargs))[at]
    before = made(call, args, kwargs)
    found = [torch.zeros_like(y, dtype=torch.bool) for y in before]
    for value in among if x.is_floating_point() else range(2 if x.dtype is torch.bool else 4):
        other = x.clone()
        other.view(-1)[place] = value
        after = made(call, *tree_map(lambda y: other if y is x else y, (args, kwargs)))  # noqa: B023
        for flags, y, z in zip(found, before, after, strict=True):
            flags |= (y != z) & ~(y.isnan() & z.isnan())
    return found


def of_one_memory(call: Call) -> tuple[Tensor, list[Tensor]]:
    """The first argument, and the results, which share its memory."""
    args, kwargs = call.given()
    found = tensors(call.on(args, kwargs))
    assert found and all(memory(x) == memory(args[0]) for x in found)
    return args[0], found


def as_wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)
