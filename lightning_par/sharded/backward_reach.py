"""What a backward reaches, and how its gradients get whole where each rank adds a share; see `gradient_shares`.

Whoever synchronizes gradients sums those of the module's parameters. Other tensors whose gradients a user reads, and
hooks that see a gradient while backward runs, are served here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.private.graph import Accumulation, function_of, gathered_by
from lightning_par.private.leaf_hooks import hooks_of
from lightning_par.sharded.parts import parts_along
from lightning_par.sharded.run_state import RunState
from lightning_par.trial.memo import Memo

Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Reached:
    """What lies behind the roots of a backward.

    Attributes:
        leaves: that get gradients, in an order that is the same on all ranks.
        kept: tensors on the way there that keep their gradients.
        talks: whether ranks talk on the way.
        uses: of a weight that is stored in parts, where its gathered wholes are, by the id of the part.
        hides: whether weights are gathered within a node, where a part of the graph is this rank's alone.
    """

    leaves: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]
    talks: bool
    uses: dict[int, tuple[Any, ...]]
    hides: bool

    @property
    def is_synced(self) -> bool:
        """Whether someone waits for the gradient of a leaf, to sum it over the ranks."""
        return any(_is_synced(x) for x in self.leaves)


class _Kind(NamedTuple):
    """What a class of nodes tells of each of them: whether it ends the graph, talks to ranks, gathers a weight, has a
    graph within; nothing where it does none of these, as most do."""

    is_end: bool
    talks: bool
    gathers: bool
    hides: bool

    @classmethod
    def of(cls, kind: type) -> _Kind | None:
        function = function_of(kind)
        ours = function is not None and function.__module__.startswith("lightning_par.")
        gathers, hides = (getattr(function, name, False) for name in ("gathers_a_weight", "is_told"))
        found = cls(kind is Accumulation, ours, gathers, hides)
        return found if any(found) else None


_kinds: Memo[type, _Kind | None] = Memo(_Kind.of)


def behind(roots: Sequence[Tensor]) -> Reached:
    """Walk the graph of ``roots`` once.

    Example::

        weight = torch.ones(2, requires_grad=True)
        assert behind([(weight * 2).sum()]).leaves == (weight,)
    """
    leaves = {id(x): x for x in roots if x.requires_grad and x.grad_fn is None}
    # Depth first: one rank may have a node more on an edge than another, by which breadth first would change the order.
    nodes: list[Any] = [x.grad_fn for x in roots if x.grad_fn is not None]
    seen, talks, hides, kinds = set[Any](), False, False, _kinds
    uses: dict[int, tuple[Any, ...]] = {}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = kinds[type(node)]
        if kind is not None:
            if kind.is_end:
                leaves[id(node.variable)] = node.variable
                continue
            talks, hides = talks or kind.talks, hides or kind.hides
            for part, number in gathered_by(node) if kind.gathers else ():
                uses[id(part)] = (*uses.get(id(part), ()), GradientEdge(node, number))
        for following, _ in node.next_functions:
            if following not in seen and following is not None:
                nodes.append(following)
    state = RunState.current
    kept = tuple(x for step, x in state.retained if step == state.streams.step and x.grad_fn in seen)
    return Reached(tuple(leaves.values()), kept, talks, uses, hides)


def retain(x: Tensor) -> None:
    """From now on ``x``, which keeps its gradient, is found by `behind` in this step."""
    state = RunState.current
    now = state.streams.step
    state.retained = [*((step, other) for step, other in state.retained if step == now and other is not x), (now, x)]


@contextlib.contextmanager
def whole_gradients(reached: Reached, axes: Axes) -> Iterator[None]:
    """Around a backward: leaves that nobody else syncs have whole gradients after it, and all hooks see whole ones."""
    alone = [x for x in (*reached.leaves, *reached.kept) if not _is_synced(x) and sharing(x, axes)]
    before = [x.grad for x in alone]
    for x in alone:
        x.grad = None  # what is there is whole, and only what comes is a share
    try:
        with whole_in_hooks(reached.leaves, axes):
            yield
    finally:
        for x, old in zip(alone, before, strict=True):
            x.grad, new = old, x.grad
            if new is not None:
                _add(x, leave(new, sharing(x, axes)))


@contextlib.contextmanager
def whole_in_hooks(leaves: Sequence[Tensor], axes: Axes) -> Iterator[None]:
    """Within, hooks of ``leaves`` see whole gradients, and what they return is shared out again."""
    handles = []
    for x in leaves:
        hooks, _ = hooks_of(x)
        if hooks and sharing(x, axes):
            users = list(hooks.items())
            hooks.clear()  # hooks run in this order: the user's between ours
            handles.append(x.register_hook(lambda grad, x=x: leave(grad, sharing(x, axes))))
            hooks.update(users)
            handles.append(x.register_hook(lambda grad, x=x: grad / ranks(sharing(x, axes))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sharing(x: Tensor, axes: Axes) -> Axes:
    """The ``axes`` whose ranks have shares of the gradient of ``x``: not those along which it is a part."""
    return beside(axes, parts_along(x))


def beside(axes: Axes, parts: Axes) -> Axes:
    """Those of ``axes`` that are none of ``parts``."""
    return tuple(axis for axis in axes if not any(_lies_along(axis, other) for other in parts)) if parts else axes


def _lies_along(axis: Axis, part: Axis) -> bool:
    return axis is part or part is axis.residual or part.stores and {*axis.ranks} <= {*part.ranks}


def ranks(axes: Axes) -> int:
    """How many ranks there are along ``axes`` together."""
    return prod(axis.size for axis in axes)


def leave(share: Tensor, axes: Axes) -> Tensor:
    """The sum of all ranks' shares."""
    for axis in axes:
        share = collectives.leave(share, axis)
    return share


class _Turned(torch.autograd.Function):
    """``x``, whose gradient ``turn`` makes of that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.turn = turn
        return x.detach()  # a new tensor: a function that returns its input as it is would hand on a view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.turn(grad), None


def ends_whole(x: Any, axes: Axes) -> Any:
    """``x``, whose gradient is whole for what made it."""
    return _Turned.apply(x, lambda share: leave(share, axes)) if isinstance(x, Tensor) and x.requires_grad else x


def begins_whole(x: Any, axes: Axes) -> Any:
    """``x`` for one that gives it a whole gradient, of which each rank then takes a share."""
    return _Turned.apply(x, lambda whole: whole / ranks(axes)) if isinstance(x, Tensor) and x.requires_grad else x


def _is_synced(x: Tensor) -> bool:
    return x.is_leaf and bool(hooks_of(x)[1])


def _add(x: Tensor, grad: Tensor) -> None:
    if x.grad is None:
        x.grad = grad
    elif grad.requires_grad:
        x.grad = x.grad + grad  # with create_graph: the old one may be in a graph, and stays as it is
    else:
        x.grad += grad
