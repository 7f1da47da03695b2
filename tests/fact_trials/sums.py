"""What is linear, and what sums over entries or samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fact_trials.calls import Call, Values
from tests.fact_trials.trial import as_wide, copied, made, memory, tensors, touched, trial


def _linear(call: Call, *places: int) -> None:
    """``f(2a - b) == 2 f(a) - f(b)`` in the arguments at ``places`` together, small and large."""
    for scale in (1e-3, 1.0, 1e3):
        (one, kwargs), (other, _) = call.given(1, signed=True), call.given(2, signed=True)
        if not all(tensors(one[place]) for place in places):
            return  # a number

        def of(make: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
            def value(place: int) -> Any:
                a, b = one[place], other[place]  # noqa: B023
                if isinstance(a, Sequence):
                    return [make(scale * x, scale * y) for x, y in zip(a, b)]  # noqa: B023
                return make(scale * a, scale * b) if a.is_floating_point() or a.is_complex() else a  # noqa: B023

            args = [value(i) if i in places else copied(x) for i, x in enumerate(one)]  # noqa: B023
            return [as_wide(x) for x in made(call, args, kwargs)]  # noqa: B023

        for whole, a, b in zip(of(lambda a, b: 2 * a - b), of(lambda a, b: a + 0), of(lambda a, b: b + 0)):
            most = float(a.abs().max()) + float(b.abs().max())
            low = call.name in ("half", "bfloat16") or any(x.dtype == torch.bfloat16 for x in tensors(one))
            assert torch.allclose(whole, 2 * a - b, rtol=0, atol=most * (0.05 if low else 1e-6))


@trial("ADDS")
def is_linear_in_two_together(call: Call) -> None:
    _linear(call, 0, 1)


@trial("SCALES")
def is_linear_in_each_of_two(call: Call) -> None:
    _linear(call, 0)
    _linear(call, 1)


@trial("DIVIDES", "LINEAR", "STACKS")
def is_linear_in_the_first(call: Call) -> None:
    _linear(call, 0)


@trial("MATRIX_PRODUCTS", "CONVOLUTIONS", "TRANSPOSED_CONVOLUTIONS")
def is_linear_in_both_factors(call: Call) -> None:
    args, _ = call.given()
    first = next(i for i, x in enumerate(args) if isinstance(x, Tensor)) + (call.name in ("addmm", "baddbmm"))
    for place in (first, first + 1):
        zeroed = Call(call.name, call.func, lambda v: _without_a_summand(call, v))
        _linear(zeroed, place)


def _without_a_summand(call: Call, values: Values) -> tuple[Any, ...]:
    first, *others = call.arguments(values)
    return (torch.zeros_like(first) if call.name in ("addmm", "baddbmm") else first, *others)


@trial("WEIGHTED")
def is_linear_in_a_weight(call: Call) -> None:
    args, _ = call.given()
    weights = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    zeroed = Call(call.name, call.func, lambda v: _without_a_summand(call, v))
    _linear(zeroed, weights[0 if call.name == "__rmatmul__" else -1])


@trial("RECURRENT")
def goes_along_a_sequence(call: Call) -> None:
    (x, *more), kwargs = call.given()
    more[4] = 0.0  # no dropout
    out = [call.on([given, *more], kwargs)[0] for given in (x, torch.cat([x[:3], -x[3:]]))]
    assert torch.equal(out[0][:3], out[1][:3]) and not torch.equal(out[0][3:], out[1][3:])


@trial("LOWERED")
def runs_in_low_precision_under_autocast(call: Call) -> None:
    args, kwargs = call.given()
    with torch.autocast("cpu", torch.bfloat16):
        result = call.on([x.float() if isinstance(x, Tensor) else x for x in args], kwargs)
    assert result.dtype == torch.bfloat16


_N = 4  # samples


def _batched(values: Values) -> dict[str, tuple[tuple[Any, ...], dict[int, int]]]:
    """Arguments of what sums over samples in another dim than the first, and in which dim of which each has them."""
    a, b = values.unit(6, _N), values.unit(_N, 5)
    v = values.unit(_N)
    by_columns: tuple[tuple[Any, ...], dict[int, int]] = ((a, b), {0: 1, 1: 0})
    return {
        **dict.fromkeys(("matmul", "mm"), by_columns),
        "bmm": ((a[None], b[None]), {0: 2, 1: 1}),
        "einsum": (("ij,jk->ik", a, b), {1: 1, 2: 0}),
        "linear": ((a, b.t()), {0: 1, 1: 1}),
        "tensordot": ((a, b, 1), {0: 1, 1: 0}),
        "mv": ((a, v), {0: 1, 1: 0}),
        **dict.fromkeys(("dot", "vdot", "inner"), ((v, v), {0: 0, 1: 0})),
        "ctc_loss": ((values.unit(5, _N, 6).log_softmax(-1), 1 + values.below(5, _N, 2), torch.full((_N,), 5),
                      torch.tensor([2, 1, 2, 2])), {0: 1, 1: 0, 2: 0, 3: 0}),
    }  # fmt: skip


@trial("SUMS")
def is_the_sum_of_what_it_makes_of_parts(call: Call) -> None:
    args, kwargs = call.given()
    if len(args) == 2 and not isinstance(args[1], Tensor):
        return  # along a dim
    given, dims = _batched(Values(5)).get(call.name, (tuple(args), dict.fromkeys(range(len(args)), 0)))
    for reduction in _ways_to_reduce(call, [*given], kwargs):
        named = kwargs if reduction is None else {**kwargs, "reduction": reduction}
        means = reduction in ("mean", 1) or call.name == "mean"

        def part(start: int, stop: int) -> Tensor:
            cut = [x.narrow(dims[i], start, stop - start) if i in dims and isinstance(x, Tensor) else x
                   for i, x in enumerate(given)]  # fmt: skip
            return call.on(cut, named) * ((stop - start) / _N if means else 1)  # noqa: B023

        assert torch.allclose(part(0, _N).double(), (part(0, 1) + part(1, _N)).double(), rtol=1e-9)


def _ways_to_reduce(call: Call, args: Any, kwargs: Any) -> Sequence[Any]:
    for ways in (("sum", "mean"), (2, 1)):  # of `torch.nn.functional`, of `torch`
        with contextlib.suppress(TypeError, RuntimeError, ValueError):
            call.on(args, {**kwargs, "reduction": ways[0]})
            return ways
    return (None,)


@trial("REDUCTIONS")
def makes_one_entry_of_many(call: Call) -> None:
    args, kwargs = call.given()
    along = len(args) > 1 or bool(kwargs)
    for result in tensors(call.on(args, kwargs)):
        assert result.shape == ((6,) if along else ())
    for column in (1, 4):
        changed = [touched(call, args, kwargs, 0, place, (-9, 0.0, 0.45, 9)) for place in range(column, 24, 6)]
        for flags in zip(*changed, strict=True):
            in_column = torch.stack(flags).view(4, -1)  # which results go by each entry of the column
            assert int(in_column.any(1).sum()) > 1, "the result goes by one entry of a column at most"
            if along:
                in_column[:, column] = False
                assert not in_column.any(), "the result goes by other columns"


@trial("STATISTICS")
def goes_smoothly_by_each_entry(call: Call) -> None:
    (x, *more), kwargs = call.given()
    x.requires_grad_()
    sum(y.sum() for y in tensors(call.on([x, *more], kwargs))).backward()  # type: ignore[union-attr]
    assert x.grad is not None and bool((x.grad != 0).all())


@trial("SCANS")
def makes_each_of_those_before_it(call: Call) -> None:
    args, kwargs = call.given()
    for flags in touched(call, args, kwargs, 0, 13):  # the second column of row 2
        flags[2:, 1] = False
        assert not flags.any()
    assert any(bool(flags[3:, 1].any()) for flags in touched(call, args, kwargs, 0, 13))


@trial("MAKES_NEW")
def makes_new_tensors(call: Call) -> None:
    args, kwargs = call.given()
    before = copied(args)
    results = tensors(call.on(args, kwargs))
    assert all(torch.equal(x, y) for x, y in zip(tensors(args), tensors(before), strict=True))
    assert not {memory(x) for x in results} & {memory(x) for x in tensors(args)}
    on_meta = tensors(call.on([_meta(x) for x in args], kwargs))
    assert [x.shape for x in on_meta] == [x.shape for x in results]


def _meta(x: Any) -> Any:
    return [_meta(y) for y in x] if isinstance(x, list) else x.to("meta") if isinstance(x, Tensor) else x
