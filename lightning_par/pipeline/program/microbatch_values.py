"""Values of a step as one microbatch holds them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.located import Run
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.private.tensors import as_class
from lightning_par.python_state.tensor_classes import class_of, of_its_class, plain
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.user_classes import REMEMBERED


def written_into(run: Run, target: Tensor, value: Tensor, func: Any) -> Any:
    """Let ``target``, which depended on the batch alone, stand for ``value``; what the writing function returns."""
    run.write(target, value)
    return None if func.__name__ == "__setitem__" else value


def cut_to(x: Tensor, layout: tuple[int, Any], axis: MicrobatchAxis) -> ShardedTensor:
    """A whole tensor's samples of one microbatch."""
    return shown_as(x, ShardedTensor(_samples(plain(x), layout, axis), *layout, axis))


def own_samples(x: Tensor, layout: tuple[int, Any], axis: MicrobatchAxis) -> Tensor:
    """A whole tensor's samples of one microbatch, as a module takes them."""
    return of_its_class(x, _samples(plain(x), layout, axis))


def _samples(x: Tensor, layout: tuple[int, Any], axis: MicrobatchAxis) -> Tensor:
    dim, positions = layout
    piece = positions.piece(axis.rank)
    return x.index_select(dim, positions.index(axis.rank, x.device)) if piece is None else x.narrow(dim, *piece)


def local_shape(model: Tensor, axis: MicrobatchAxis | None) -> tuple[int, ...]:
    """The shape that the value recorded as ``model`` has in a microbatch."""
    if not isinstance(model, ShardedTensor) or axis is None:
        return tuple(model.shape)
    shape = list(model.shape)
    shape[model.sharded_dim] = model.positions.count(axis.rank)
    return tuple(shape)


def share_of(program: Program, axis: MicrobatchAxis) -> float:
    """The microbatch's share of the batch's samples."""
    return axis.positions(program.samples).count(axis.rank) / program.samples


def of_microbatch(x: Tensor) -> Tensor:
    """``x`` without the samples of other microbatches; it may still be sharded over ranks."""
    if not isinstance(x, ShardedTensor) or not x.axis.by_sample:
        return x
    kind = vars(x).get(REMEMBERED)
    return x.local if kind is None else as_class(x.local, kind)


def shown_as(x: Tensor, part: ShardedTensor) -> ShardedTensor:
    """``part``, which user code takes to be of the class of ``x``: functions do with that what they do with torch's."""
    kind = vars(x).get(REMEMBERED) if isinstance(x, ShardedTensor) else class_of(x)
    if kind is not None:
        vars(part)[REMEMBERED] = kind
    return part
