"""Functions that have no rule: everything is gathered, the function runs whole, and its result is cut again."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_par import comm, private, stale
from lightning_par.rules.report import name_of, on_gather, user_line
from lightning_par.rules.write import refuse_lost_write, writes
from lightning_par.view import ShardedTensor, full, moves


def run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on gathered arguments."""
    views: list[ShardedTensor] = []
    tree_map(lambda t: views.append(t) if isinstance(t, ShardedTensor) else None, (args, kwargs))
    if views[0].axis.by_sample:
        from lightning_par.rules.trial import run_by_sample

        result = run_by_sample(func, args, kwargs)
        if result is not NotImplemented:
            return result
    announce_gather(func, views)
    targets = written(func, args, kwargs)
    for target in targets:
        refuse_lost_write(func, target)
    wholes: dict[int, Tensor] = {}  # a tensor given twice is one tensor, which a write shows

    def to_whole(x: Any) -> Any:
        if not isinstance(x, ShardedTensor):
            return x
        if id(x) not in wholes:
            wholes[id(x)] = full(x)
        return wholes[id(x)]

    whole_args, whole_kwargs = tree_map(to_whole, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    for target in targets:
        _write_back(func, target, wholes[id(target)])
    if targets:
        return tree_map(lambda x: next((t for t in targets if x is wholes[id(t)]), x), result)
    memories = {private.memory_of(wholes[id(t)]): t for t in views if moves(t) and t.axis.size > 1}
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]

    def finished(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, ShardedTensor) or any(x is other for other in given):
            return x  # what was written into stays what it is
        source = memories.get(private.memory_of(x))
        again = sharded_again(x, views)
        return again if source is None else _noted_copy(func, source, again)

    return tree_map(finished, result)


def _noted_copy(func: Any, source: ShardedTensor, copy: Tensor) -> Tensor:
    """``copy``, of which one device has a view: a write into it would be lost."""
    name = name_of(func)
    if isinstance(copy, ShardedTensor):
        return copy.with_local(stale.note(name, source._local, copy._local))
    return stale.note(name, source._local, copy)


def run_in_transform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole tensors inside a transform such as ``vmap``, where nothing can be sharded."""
    if written(func, args, kwargs):
        raise RuntimeError(
            f"`{name_of(func)}` at {user_line()} writes in place into a sharded tensor within a transform such as "
            "torch.vmap, where the write would be lost. Hand the tensor to the transformed function as an argument."
        )
    views = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor)]
    announce_gather(func, views)
    with private.outside_transforms():
        wholes = {id(x): full(x) for x in views}
    whole_args, whole_kwargs = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
    return func(*whole_args, **whole_kwargs)


def announce_gather(func: Any, views: list[ShardedTensor]) -> None:
    """Tell the axes and the user that ``func`` runs on whole tensors."""
    moved = [view for view in views if moves(view)]
    for view in moved:
        view.axis.about_to_gather(func, view)
    if moved:
        on_gather(func, moved)


def sharded_again(result: Any, views: list[ShardedTensor]) -> Any:
    """What a function made of gathered sequences is cut again, where the sequence is still to be seen in it."""
    lead = next((view for view in views if moves(view)), views[0])
    if lead.axis.spread(lead.shape[lead._dim]) is None:
        return result
    return tree_map(
        lambda x: x if isinstance(x, ShardedTensor) or not isinstance(x, Tensor) else _cut_like(x, lead), result
    )


def _cut_like(x: Tensor, lead: ShardedTensor) -> Tensor:
    dim, size = lead._dim, lead.shape[lead._dim]
    if x.ndim <= dim or x.shape[dim] < size // 2 or (x.ndim != lead.ndim and x.shape[dim] != size):
        return x
    positions = lead._positions if x.shape[dim] == size else lead.axis.spread(x.shape[dim])
    if positions is None:
        return x
    part = comm.scatter(x, dim, positions, lead.axis)
    # Of one sample it is a view, which nobody could write into.
    return ShardedTensor(part if x.shape[0] > 1 else part.clone(), dim, positions, lead.axis)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """The sharded tensors that ``func`` writes into."""
    into = [kwargs.get("out")]
    if writes(getattr(func, "__name__", "")):
        into.append(args[0] if args else next(iter(kwargs.values()), None))
    return [x for x in tree_leaves(into) if isinstance(x, ShardedTensor)]


def _write_back(func: Any, target: ShardedTensor, whole: Tensor) -> None:
    """Into the same memory, which other views of it see, and under autograd, as one device's write is."""
    name = name_of(func)
    if whole.shape != target.shape:
        raise RuntimeError(f"`{name}` at {user_line()} changes the shape of a sharded tensor in place, which it can't.")
    leaf = target._local.is_leaf and target._local.requires_grad
    initialises = (getattr(func, "__module__", None) or "").startswith("torch.nn.init")
    with torch.no_grad() if leaf and initialises else contextlib.nullcontext():
        target._local.copy_(target.part_of(whole))
