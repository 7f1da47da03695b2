"""All of a sharded tensor by which a rule decides what runs on its part, as one object for all tensors that are alike.

A call's key then holds one word for such a tensor, and what a noted call returns has its form from the start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_par.sharded.tensor import ShardedTensor, remembered

PLAIN = frozenset((Tensor, Parameter))


class Form:
    """What two sharded tensors have in common where functions come to the same on both.

    Attributes:
        shape: of the whole.
        strides: on one device, where the part's don't tell them.
        requires_grad: as the part's, which the user's code may change; so with ``is_leaf``.
    """

    __slots__ = ("shape", "dtype", "device", "requires_grad", "is_leaf", "dim", "positions", "axis", "strides")

    def __init__(self, x: ShardedTensor, strides: tuple[int, ...] | None) -> None:
        local, self.axis = x._local, x._axis
        self.dim, self.positions, self.strides = x._dim, x._positions, strides
        self.shape = torch.Size((*local.shape[: self.dim], self.positions.size, *local.shape[self.dim + 1 :]))
        self.dtype, self.device = local.dtype, local.device
        self.requires_grad, self.is_leaf = local.requires_grad, local.is_leaf


def form_of(x: ShardedTensor) -> Form | None:
    """The form of ``x``; None where its part is no plain tensor."""
    known: Form | None = x._form
    local, strides = x._local, x._strides
    if (
        known is not None
        and known.requires_grad is local.requires_grad
        and known.is_leaf is local.is_leaf
        and known.strides is strides  # a rule may tell them after a function that it calls gave the tensor
    ):
        return known
    if type(local) not in PLAIN:
        return None
    axis = x._axis
    if strides is not None and type(strides) is not tuple:
        strides = remembered(x)
    facts: Any = (
        local.shape, local.stride(), local.dtype, local.device, local.requires_grad, local.is_leaf,
        x._dim, x._positions, strides,
    )  # fmt: skip
    form: Form | None = axis.forms.get(facts)
    if form is None:
        form = axis.forms[facts] = Form(x, strides)
    x._form, x._strides = form, form.strides
    return form


def forget(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called before a function writes into its first argument, or into ``out``: it may then lie otherwise."""
    for x in (*args[:1], kwargs.get("out")):
        if isinstance(x, ShardedTensor):
            x._form = None
