"""Operators, as `__torch_dispatch__` is told of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.fact_trials.calls import Call, Values
from tests.fact_trials.draws import moves_the_generator
from tests.fact_trials.trial import memory, tensors, touched, trial

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "full_like": (2.0,),
    "kthvalue": (2, 0),
    "_softmax": (0, False),
    "_log_softmax": (0, False),
    "native_batch_norm": (None, None, None, None, True, 0.1, 1e-5),
    "_native_batch_norm_legit": (None, None, True, 0.1, 1e-5),
    "dist": (Values(1).x,),
    "randint_like": (9,),
    **dict.fromkeys(("geometric", "geometric_"), (0.5,)),
    **dict.fromkeys("mode logsumexp cumsum cumprod logcumsumexp cummax cummin".split(), (0,)),
}
_MAKE: dict[str, tuple[Any, ...]] = {"rand": ((4, 6),), "randn": ((4, 6),), "randint": (9, (4, 6))}
"""What is given to those that take no tensor."""


def operator(name: str) -> Call:
    """The operator of this name, with arguments that it takes."""
    func = getattr(torch.ops.aten, name)
    if name == "_native_batch_norm_legit":
        func = func.no_stats
    if name in _MAKE:
        return Call(name, func, lambda v: _MAKE[name])
    first: dict[str, Any] = {"any": torch.zeros(4, 6).bool(), "all": torch.ones(4, 6).bool()}
    return Call(name, func, lambda v: (first.get(name, v.x), *_ARGUMENTS.get(name, ())))


@trial("SAME_MEMORY_OPERATORS")
def returns_the_same_memory(call: Call) -> None:
    args, kwargs = call.given()
    result = call.on(args, kwargs)
    assert memory(result) == memory(args[0]) and torch.equal(result, args[0])


@trial("COPY_OPERATORS")
def returns_memory_of_its_own(call: Call) -> None:
    args, kwargs = call.given()
    result = call.on(args, kwargs)
    assert memory(result) != memory(args[0]) and result.shape == args[0].shape


@trial("DRAWING_OPERATORS")
def draws_each_entry_whatever_the_shape(call: Call) -> None:
    assert moves_the_generator(call)
    (drawn,) = tensors(call(0))
    assert len(drawn.unique()) > 1


@trial("MIXING_OPERATORS")
def mixes_samples(call: Call) -> None:
    args, kwargs = call.given()
    first, last = (touched(call, args, kwargs, 0, place, (-9, 0.0, 0.45, 9)) for place in (1, 19))  # of one column
    assert any(bool((x & y).any()) for x, y in zip(first, last) if x.numel())
    assert tensors(call.on(args, kwargs))
