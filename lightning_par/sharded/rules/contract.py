"""Products that sum over dims: linear, matmul, einsum and their kin.

Each is written as Einstein letters. One letter is sharded: where it is in the result, the result is sharded; where it
is summed over, the ranks hold partial sums and one all-reduce ends the island.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.rules.chunked_linear import row_linear
from lightning_par.sharded.rules.column_linear import arriving_linear, column_linear, fits
from lightning_par.sharded.rules.lookup import gathered, moves, rule, view
from lightning_par.sharded.tensor import ShardedTensor, full

Letters = Sequence[object]
Cut = tuple[object, Positions, Axis]


def sharded_letter(operands: Sequence[Tensor], letters: Sequence[Letters]) -> Cut | None:
    """The one letter that is sharded, with its positions; None where the operands are sharded along several."""
    found: Cut | None = None
    for operand, names in zip(operands, letters, strict=True):
        if not isinstance(operand, ShardedTensor):
            continue
        here = (names[operand._dim], operand._positions, operand._axis)
        if here[0] is None:
            return None
        if found is None:
            found = here
        elif here[0] != found[0] or here[2] is not found[2] or not here[1].agree(found[1]):
            return None
    return found


def along_one_letter(operands: Sequence[Tensor], letters: Sequence[Letters], result: Letters) -> Sequence[Tensor]:
    """Where sequences meet along several letters, as queries and keys do, all but one of the result's are gathered."""
    sharded = [i for i, x in enumerate(operands) if isinstance(x, ShardedTensor) and x._axis.spread(x.shape[x._dim])]
    if len(sharded) < 2 or sharded_letter(operands, letters) is not None:
        return operands
    axes = {id(operands[i]._axis) for i in sharded}  # type: ignore[attr-defined]
    kept = [i for i in sharded if letters[i][operands[i]._dim] in result]  # type: ignore[attr-defined]
    if len(axes) > 1 or not kept:
        return operands
    lead = max(kept, key=lambda i: (moves(operands[i]), operands[i].numel(), -i))  # type: ignore[arg-type]
    return [gathered(x) if i in sharded and i != lead else x for i, x in enumerate(operands)]  # type: ignore[arg-type]


def local_operands(operands: Sequence[Tensor], letters: Sequence[Letters], cut: Cut) -> list[Tensor] | None:
    """This rank's part of each operand: cut where it has the sharded letter, else entered.

    None where a replicated parameter would have to be cut at each use: gathering the activation moves less.
    """
    letter, positions, axis = cut
    local = []
    for operand, names in zip(operands, letters, strict=True):
        if isinstance(operand, ShardedTensor):
            local.append(operand._local)
        elif letter in names:
            if operand.shape[list(names).index(letter)] != positions.size:
                return None  # of size 1, it broadcasts
            if operand.is_leaf and operand.requires_grad and not axis.gradient_shares:
                return None
            local.append(collectives.scatter(operand, list(names).index(letter), positions, axis))
        else:
            local.append(axis.entered(operand))
    return local


def contract(
    run: Callable[..., Tensor], operands: Sequence[Tensor], letters: Sequence[Letters], result: Letters
) -> Tensor:
    """``run`` on the local parts of ``operands``, whose dims are named by ``letters``, giving dims ``result``."""
    operands = along_one_letter(operands, letters, result)
    cut = sharded_letter(operands, letters)
    local = None if cut is None else local_operands(operands, letters, cut)
    if cut is None or local is None:
        return NotImplemented
    letter, positions, axis = cut
    partial = run(*local)
    return (
        view(partial, list(result).index(letter), positions, axis)
        if letter in result
        else collectives.leave(partial, axis)
    )


def with_bias(
    run: Callable[..., Tensor], bias: Tensor | None, operands: Sequence[Tensor], letters: Sequence[Letters],
    result: Letters, leave: Callable[[list[Tensor], Positions, Axis], Any] | None = None,
) -> Tensor:  # fmt: skip
    """As `contract`, with a ``bias`` of the last dim of ``result``; ``run`` takes it first, or None.

    ``leave`` may sum the product of local operands over the ranks itself, or give `NotImplemented`.
    """
    cut = sharded_letter(operands, letters)
    local = None if cut is None else local_operands(operands, letters, cut)
    if cut is None or local is None:
        return NotImplemented
    letter, positions, axis = cut
    if letter == result[-1] and bias is not None and bias.shape != (positions.size,):
        return NotImplemented
    if letter not in result:
        if bias is not None:
            axis.no_shares("linear")  # a share of the product and a whole bias are no share
        summed = NotImplemented if leave is None else leave(local, positions, axis)
        if summed is NotImplemented:
            summed = collectives.leave(run(None, *local), axis)
        # the bias comes behind the sum, or each rank would add it
        return summed if bias is None else summed + full(bias).to(summed.dtype)
    if bias is not None and letter != result[-1]:
        bias = axis.entered(full(bias))
    elif isinstance(bias, ShardedTensor):
        if not bias._positions.agree(positions):
            return NotImplemented
        bias = bias._local
    elif bias is not None:
        bias = collectives.scatter(bias, 0, positions, axis)
    return view(run(bias, *local), list(result).index(letter), positions, axis)


@rule("linear")
def linear(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.ndim != 2:
        return NotImplemented
    outer = list(range(x.ndim - 1))
    if isinstance(weight, ShardedTensor) and weight._dim == 0 and isinstance(x, ShardedTensor):
        x = full(x)  # else two letters were sharded; `n` stays, as after a column-split layer

    residual = weight._axis.residual if isinstance(weight, ShardedTensor) else None

    def run(b: Tensor | None, x: Tensor, w: Tensor) -> Tensor:
        arrival = None if residual is None else residual.arrival_of(x)
        if arrival is not None:
            return arriving_linear(x, w, b, arrival)
        return column_linear(x, w, b) if fits(x, w, b) else func(x, w, b)

    leave = None if residual is None else row_linear
    return with_bias(run, bias, [x, weight], [[*outer, "k"], ["n", "k"]], [*outer, "n"], leave)


@rule("addmm")
def addmm(
    func: Any, bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **kwargs: Any
) -> Any:
    if kwargs or beta != 1 or alpha != 1 or bias.ndim != 1:
        return NotImplemented
    if isinstance(mat2, ShardedTensor) and mat2._dim == 1 and isinstance(mat1, ShardedTensor):
        mat1 = full(mat1)
    return with_bias(lambda c, a, b: a @ b if c is None else func(c, a, b), bias, [mat1, mat2], ["ik", "kj"], "ij")


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(func: Any, a: Tensor, b: Tensor) -> Any:
    batch = max(a.ndim, b.ndim) - 2

    def outer(x: Tensor) -> list[object]:
        # A dim of size 1 broadcasts; it has no letter of the result.
        dims = range(-x.ndim, -2)
        return [d if x.shape[d] > 1 or (a if x is b else b).ndim < -d else None for d in dims]

    a_letters = [*outer(a), *("ik" if a.ndim > 1 else "k")]
    b_letters = [*outer(b), *("kj" if b.ndim > 1 else "k")]
    result = [*range(-batch - 2, -2), *("i" if a.ndim > 1 else ""), *("j" if b.ndim > 1 else "")]
    return contract(torch.matmul, [a, b], [a_letters, b_letters], result)


@rule("__rmatmul__")
def rmatmul(func: Any, b: Tensor, a: Tensor) -> Any:
    return matmul(torch.matmul, a, b)


@rule("baddbmm")
def baddbmm(
    func: Any, bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, **kwargs: Any
) -> Any:
    if kwargs:
        return NotImplemented
    product = torch.bmm(batch1, batch2) * alpha
    summed = [x for x in (batch1, batch2) if isinstance(x, ShardedTensor)]
    if beta and summed and not isinstance(product, ShardedTensor):
        summed[0]._axis.no_shares("baddbmm")
    return product + bias * beta if beta else product  # with beta 0 torch ignores what the bias holds


@rule("einsum")
def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    if not isinstance(equation, str) or "." in equation:
        return NotImplemented
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    equation = equation.replace(" ", "")
    terms, arrow, result = equation.partition("->")
    letters = terms.split(",")
    if not arrow:
        every = terms.replace(",", "")
        result = "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    if any(len(set(names)) < len(names) for names in letters):  # a diagonal, which parts don't have
        return NotImplemented
    return contract(lambda *local: torch.einsum(equation, *local), operands, letters, result)
