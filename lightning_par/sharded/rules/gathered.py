"""Functions that have no rule: everything is gathered, the function runs whole, and its result is cut again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.private.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import write_count
from lightning_par.private.transforms import outside_transforms
from lightning_par.sharded import aliases
from lightning_par.sharded.aliases.frames import axes_of
from lightning_par.sharded.functions import name_of
from lightning_par.sharded.rules.gather_report import on_gather, user_line
from lightning_par.sharded.rules.in_place import targets
from lightning_par.sharded.rules.strides import viewed
from lightning_par.sharded.tensor import ShardedTensor, full, moves


def run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on gathered arguments."""
    views: list[ShardedTensor] = []
    tree_map(lambda t: views.append(t) if isinstance(t, ShardedTensor) else None, (args, kwargs))
    if views[0].axis.by_sample:
        from lightning_par.sharded.rules.sample_trial import run_by_sample

        result = run_by_sample(func, args, kwargs)
        if result is not NotImplemented:
            return result
    announce_gather(func, views)
    wholes: dict[int, Tensor] = {}  # a tensor given twice is one tensor, which a write shows

    def to_whole(x: Any) -> Any:
        if not isinstance(x, ShardedTensor):
            return x
        if id(x) not in wholes:
            wholes[id(x)] = full(x)
        return wholes[id(x)]

    whole_args, whole_kwargs = tree_map(to_whole, (args, kwargs))
    before = {key: _version(whole) for key, whole in wholes.items()}
    result = func(*whole_args, **whole_kwargs)
    # names tell of those whose versions nobody counts
    into = [x for x in views if before[id(x)] != _version(wholes[id(x)])] or written(func, args, kwargs)
    for target in {id(x): x for x in into}.values():
        _write_back(func, target, wholes[id(target)])
    if into:
        return tree_map(lambda x: next((t for t in into if x is wholes[id(t)]), x), result)
    call = GatheredCall(func, args, kwargs, views)
    return call.cut(result, wholes)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else write_count(x)


@dataclass(frozen=True)
class GatheredCall:
    """A function that is called with whole tensors in place of sharded ones.

    Attributes:
        func: the function.
        args: its arguments.
        kwargs: its arguments by name.
        views: the sharded ones of them.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    views: list[ShardedTensor]

    def cut(self, result: Any, wholes: dict[int, Tensor]) -> Any:
        """Its ``result``, sharded again where it can be; views of the ``wholes``, by their ids, are noted as copies."""
        memories = {memory_of(wholes[id(x)]): x for x in self.views if x.axis.size > 1}
        given = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]
        leaves, spec = tree_flatten(result)
        for number, x in enumerate(leaves):
            if isinstance(x, Tensor) and not isinstance(x, ShardedTensor) and all(x is not other for other in given):
                source = memories.get(memory_of(x))
                leaves[number] = again = sharded_again(x, self.views)
                if source is not None and self._is_view(number, source, again):
                    self._note(number, source, wholes[id(source)], again)
        return tree_unflatten(leaves, spec)

    def _is_view(self, number: int, source: ShardedTensor, again: Any) -> bool:
        """Whether it is one on one device, too, whose tensor may lie otherwise than the gathered one."""
        first = bool(self.args) and self.args[0] is source
        strides = viewed(self.func, source, self.args[1:], self.kwargs) if first else None
        if strides is None or number >= len(strides):
            return True
        again._strides = strides[number]
        return strides[number] is not None

    def _note(self, number: int, source: ShardedTensor, whole: Tensor, again: Tensor) -> None:
        """``again`` is a copy, of which one device has a view; unless ``whole`` is the memory that all see."""
        name, axes = name_of(self.func), axes_of(source)
        if isinstance(again, ShardedTensor):

            def make(x: ShardedTensor) -> Any:
                return sharded_again(self._run(source, aliases.gathered(x))[number], self.views)

            def put(x: ShardedTensor, part: ShardedTensor) -> None:
                new = aliases.gathered(x)
                self._run(source, new)[number].copy_(aliases.gathered(part))
                if new is not x._innermost:  # else it was written where it lies
                    _put_whole(x, new)

            aliases.note(name, source.twin(), again, make, put, axes)
        elif moves(source):
            aliases.note(name, source.twin(), again, aliases.gathered, _put_whole, axes, root=whole)

    def _run(self, source: ShardedTensor, whole: Tensor) -> list[Any]:
        """The leaves of its result, ``source`` being ``whole``."""
        args, kwargs = tree_map(
            lambda x: whole if x is source else full(x) if isinstance(x, ShardedTensor) else x, (self.args, self.kwargs)
        )
        return tree_leaves(self.func(*args, **kwargs))


def _put_whole(x: ShardedTensor, whole: Tensor) -> None:
    x._local.copy_(x.part_of(whole))


def run_in_transform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole tensors inside a transform such as ``vmap``, where nothing can be sharded."""
    if written(func, args, kwargs):
        raise RuntimeError(
            f"`{name_of(func)}` at {user_line()} writes in place into a sharded tensor within a transform such as "
            "torch.vmap, where the write would be lost. Hand the tensor to the transformed function as an argument."
        )
    views = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor)]
    announce_gather(func, views)
    with outside_transforms():
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
    part = collectives.scatter(x, dim, positions, lead.axis)
    # What lies in one piece is cut as a view, which nobody could write into.
    shares = memory_of(aliases.innermost(part)) == memory_of(aliases.innermost(x))
    again = ShardedTensor(part.clone() if shares else part, dim, positions, lead.axis)
    if not isinstance(x, ShardedTensor) and not x.is_contiguous():  # as a recurrent layer's result may lie
        again._strides = tuple(x.stride())
    return again


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """The sharded tensors that ``func`` is told to write into."""
    return [x for x in targets(func, args, kwargs) if isinstance(x, ShardedTensor)]


def _write_back(func: Any, target: ShardedTensor, whole: Tensor) -> None:
    """Into the same memory, which other views of it see, and under autograd, as one device's write is."""
    if whole is target._innermost:  # it was written where it lies
        return
    name = name_of(func)
    if whole.shape != target.shape:
        raise RuntimeError(f"`{name}` at {user_line()} changes the shape of a sharded tensor in place, which it can't.")
    leaf = target._local.is_leaf and target._local.requires_grad
    initialises = (getattr(func, "__module__", None) or "").startswith("torch.nn.init")
    # torch.nn.init writes without a graph, but is through by now
    with torch.no_grad() if leaf and initialises else contextlib.nullcontext():
        target._local.copy_(target.part_of(whole))
