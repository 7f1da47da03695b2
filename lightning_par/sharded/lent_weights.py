"""Autograd functions that are given layers beside their weights, as an adjoint method's is.

Such a function calls the layers in its backward again and asks `torch.autograd.grad` for the gradients of the weights
that it was given. They have to be the very weights that the layers use: where ranks have parts, it is handed whole
copies, and the layers' own would be made whole once more, by other copies, which have no gradient to those. So the
layers hold what the function was handed, in its forward and in its backward. No rank then needs another one there: the
steps of a solver may be as many as the replica's batch wants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.private.modules import parameters_of
from lightning_par.private.pytree import tree_leaves
from lightning_par.sharded.rules.stored_weights import whole
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.memo import Memo

Slot = tuple[dict[str, Any], str]
"""Where a module holds a weight: its table of parameters, and the name in it."""


class LentWeights:
    """What layers hold while a function runs that was given them.

    Args:
        lent: by `id`, the weights that they hold else and the whole ones that the function was handed.
        slots: where the layers hold those.
    """

    def __init__(self, lent: dict[int, tuple[Tensor, Tensor]], slots: list[tuple[Slot, Tensor]]) -> None:
        self.lent, self.slots = lent, slots

    @classmethod
    def to(cls, args: tuple[Any, ...]) -> LentWeights | None:
        """To a function of ``args``; None where it is given no layer of whose weights it has others than their own."""
        modules = [m for x in tree_leaves(args) for m in _modules_of(x)]
        if not modules:
            return None
        given = {id(x): x for x in args if isinstance(x, Tensor) and _is_passing(x)}
        layers = dict.fromkeys(m for module in modules for m in module.modules())
        tables = [parameters_of(m) for m in layers]
        held = [(table, name, p) for table in tables for name, p in table.items() if p is not None and id(p) in given]
        if not held:
            return None
        lent: dict[int, tuple[Tensor, Tensor]] = {id(p): (p, _own(p)) for _, _, p in held}
        return cls(lent, [((table, name), lent[id(p)][1]) for table, name, p in held])

    def handed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``args`` with the whole weights."""
        return tuple(self.lent[id(x)][1] if id(x) in self.lent else x for x in args)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The layers hold the whole weights meanwhile."""
        before = [table[name] for (table, name), _ in self.slots]
        for (table, name), lent in self.slots:
            table[name] = lent
        try:
            yield
        finally:
            for ((table, name), lent), own in zip(self.slots, before, strict=True):
                if table[name] is lent:
                    table[name] = own

    def apply(self, apply: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        """``cls.apply(*args)``, where ``apply`` is given the class and the arguments."""
        return apply(_lending[cls], *args, self, **kwargs)


def _is_passing(x: Tensor) -> bool:
    """Whether backward finds another tensor in the layer: ``x`` is in parts, or was made whole for a call."""
    return isinstance(x, ShardedTensor) or (x.requires_grad and not x.is_leaf)


def _own(x: Tensor) -> Tensor:
    """Whole, and nobody else's: what a call has gathered, backward gathers anew, in other memory."""
    return (whole(x) if isinstance(x, ShardedTensor) else x).clone()


def _modules_of(x: Any) -> list[nn.Module]:
    """What ``x`` lets a function call."""
    if isinstance(x, nn.Module):
        return [x]
    if isinstance(x, functools.partial):
        return [m for one in (x.func, *x.args, *x.keywords.values()) for m in _modules_of(one)]
    if isinstance(getattr(x, "__self__", None), nn.Module):
        return [x.__self__]
    return [m for c in getattr(x, "__closure__", None) or () if isinstance(m := _content(c), nn.Module)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _made_lending(cls: type) -> type:
    """``cls`` with one argument more, the last: `LentWeights`, which layers hold in its forward and backward."""
    function: Any = cls

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with ctx.weights_lent_to_layers.held():
            given = function.backward(ctx, *grads)
        return (*(given if isinstance(given, tuple) else (given,)), None)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.weights_lent_to_layers = inputs[-1]
        function.setup_context(ctx, inputs[:-1], output)

    def forward(*args: Any) -> Any:
        with args[-1].held():
            return function.forward(*args[:-1])

    def forward_with_context(ctx: Any, *args: Any) -> Any:
        ctx.weights_lent_to_layers = args[-1]
        return forward(ctx, *args)

    apart = function.setup_context is not torch.autograd.Function.setup_context
    body = {"forward": forward, "setup_context": setup_context} if apart else {"forward": forward_with_context}
    return type(cls.__name__, (cls,), {k: staticmethod(v) for k, v in {**body, "backward": backward}.items()})


_lending: Memo[type, type] = Memo(_made_lending)
