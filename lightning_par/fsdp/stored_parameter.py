"""Weights of which each rank stores a part, and which are gathered where they are used: fully sharded data parallelism.

A `Stored` weight is a sharded tensor of which the ranks along data and sequence hold the parts. Whatever computes with
it gets the whole weight, gathered; the gather's backward is a reduce-scatter, which averages over replicas. What a
module's call has gathered is let go at its end, and gathered again in backward, in place of being kept for it. (ZeRO
stage 3, arXiv 1910.02054.)

Where they can be, weights are gathered together around the call of their block (`blocks`, `block_calls`, `block_use`).

Torch's ``fully_shard`` was turned down: it gathers in the hooks of modules' calls, so a weight that is used elsewhere,
as a tied head's, is not there; and it puts plain tensors into the modules, where a weight that is split over the tensor
axis, too, must be a sharded one.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.gather_order import GatherOrder
from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.graph import in_backward
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded import parameter_hooks
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.rules.stored_weights import Gathering
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, full, leaf, note_copy
from lightning_par.sharded.user_classes import put_on, users_class
from lightning_par.sharded.who_reads import is_inner

PURPOSE = "parameters"


class StorageAxis(Axis):
    """Ranks that store parts of weights which each of them uses whole.

    Args:
        axis: the ranks.
        copies: how many of them have a gradient of their own, to be averaged.
        gathering: what makes the weights whole where they are used.
    """

    stores = True
    gradient_shares = True

    def __init__(self, axis: Axis, copies: int, gathering: Gathering) -> None:
        super().__init__("data", axis.ranks, axis.rank, axis.group)
        self.copies = copies
        self.gathering: Gathering | None = gathering
        self.order = GatherOrder()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "gathering": None}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, what ranks come to is no part of the order that they compare."""
        order, self.order = self.order, GatherOrder()
        try:
            yield
        finally:
            self.order = order


class Stored(ShardedTensor):
    """A parameter of which this rank stores a part.

    ``axis`` and ``positions`` say who stores what of it, over all ranks that have any of it. Where it is split over the
    tensor axis, too, as ``split_over`` says, these are more than the ranks that use this rank's part of it, ``peers``.
    """

    _peers: StorageAxis
    _inner: Positions
    split_over: tuple[Positions, Axis] | None

    @staticmethod
    def of(parameter: Tensor, axis: StorageAxis, peers: StorageAxis) -> Stored:
        """The part of ``parameter``, whole or split over the tensor axis, that this rank stores, as a fresh leaf.

        Args:
            parameter: the same on all ``peers``.
            axis: all ranks that have any of it; the tensor ranks beside one of ``peers`` follow one another.
            peers: those that have the same of it.
        """
        within = parameter if isinstance(parameter, ShardedTensor) else None
        held = leaf(parameter)
        dim = dim_of(parameter, peers.size)
        assert dim is not None
        inner = Positions.even(held.shape[dim], peers.size)
        part = collectives.own_part(held.detach(), dim, inner, peers).clone(memory_format=torch.contiguous_format)
        own = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
        positions = inner if within is None else composed(within._positions, within._axis.size, peers.size)
        self = Stored(own, dim, positions, peers if within is None else axis)
        self._peers, self._inner = peers, inner
        self.split_over = None if within is None else (within._positions, within._axis)
        mark_parameter(self)  # what `isinstance(x, nn.Parameter)` asks of a subclass
        return self

    def gathered(self, dtype: torch.dtype | None = None, before_sum: Callable[[], None] = lambda: None) -> Tensor:
        """The whole weight, or all of what the tensor axis leaves this rank; all peers must call it.

        Args:
            dtype: to be gathered in, and used; its own by default. Gradients are summed in the weight's own.
            before_sum: called in backward before its gradient is summed.
        """

        def part(gradient: Tensor) -> Tensor:
            before_sum()
            return self.part_of_sum(gradient)

        return self.used(_Gathered.apply(self._local, partial(self.held, dtype or self._local.dtype), part))

    def held(self, dtype: torch.dtype) -> Tensor:
        """What all peers hold of it, of no graph; all of them must call it."""
        self._peers.order.note(self._name)
        return collectives.gather(self._local.detach().to(dtype), self._dim, self._inner, self._peers, PURPOSE)

    def part_of_sum(self, gradient: Tensor) -> Tensor:
        """This rank's part of the mean over replicas of ``gradient``, which each peer has one of; all must call it."""
        own = gradient.to(self._local.dtype)
        self._peers.order.note(self._name)
        return collectives.sum_scatter(own, self._dim, self._inner, self._peers, PURPOSE) / self._peers.copies

    def part_of_gradient(self, share: Tensor, axes: Iterable[Axis]) -> Tensor:
        others = (axis for axis in axes if not {*axis.ranks} <= {*self._peers.ranks})  # the peers sum theirs below
        share = functools.reduce(collectives.leave, others, share)
        if self.split_over is not None:
            share = collectives.scatter(share, self._dim, *self.split_over)
        return self.part_of_sum(share)

    @property
    def used_sharding(self) -> tuple[int, Positions, Axis] | None:
        return None if self.split_over is None else (self._dim, *self.split_over)

    def as_used_gradient(self, part: Tensor) -> Tensor:
        return collectives.gather(part, self._dim, self._inner, self._peers, "gradients")

    def as_gathered(self) -> Tensor:
        return self.held(self._local.dtype)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return ShardedTensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardedTensor):
            self.note_write(value)
        ShardedTensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if self._peers.gathering is not None:
            self._peers.gathering.has_moved(self)

    def note_write(self, value: Tensor) -> None:
        """User code has written the plain ``value`` to it, of which this rank keeps a part."""
        if not self._peers.dry:  # in a dry run there are no values
            self._peers.order.note_write(repr(self._name), user_line(), [value])

    def look_at_gradient(self, frame: types.FrameType) -> None:
        super().look_at_gradient(frame)
        if in_backward() and not is_inner(frame) and not parameter_hooks.has_come(self):
            raise NotImplementedError(
                f"{user_line()}: a hook that runs within backward looks at the gradient of {self._name!r}, which is "
                "stored in parts: the ranks sum it up by blocks, so that it comes later than on one device. Do it in "
                "on_after_backward or on_before_optimizer_step."
            )

    def own_part(self, whole: Tensor) -> Tensor:
        return collectives.own_part(whole, self._dim, self._inner, self._peers)

    def full_tensor(self, purpose: str = "gather") -> Tensor:
        """The whole weight, plain, on every rank. All of them must call it."""
        if self._local.requires_grad and torch.is_grad_enabled():
            return full(self.gathered())  # whose backward averages
        return super().full_tensor(purpose)

    def as_used(self, held: Tensor) -> Tensor:
        """A tensor that lies as what all peers hold of it, as the user's code sees it."""
        return held if self.split_over is None else ShardedTensor(held, self._dim, *self.split_over)

    def used(self, held: Tensor) -> Tensor:
        """What all peers hold of it, as the step uses it."""
        mark_parameter(held)  # to the rules it is no part of a batch
        return self.as_used(held)

    def held_like(self) -> Tensor:
        """Zeros of the shape of what all peers hold of it."""
        shape = list(self._local.shape)
        shape[self._dim] = self._inner.size
        return self._local.new_zeros(shape)

    def unstored(self) -> Tensor:
        """The parameter as it was before; all peers must call it."""
        with torch.no_grad():
            own = torch.nn.Parameter(self._kept(self._local.detach()), requires_grad=self.requires_grad)
            if self._local.grad is not None:
                own.grad = self._kept(self._local.grad)
        used = self.used(own)
        if used is not own:
            mark_parameter(used)
        return used

    def _kept(self, part: Tensor) -> Tensor:
        return RunState.current.gathered(part, self._dim, self._inner, self._peers, "unshard")

    def twin(self, local: Tensor | None = None) -> Stored:
        x = Stored(self._local if local is None else local, self._dim, self._positions, self._axis)
        x._peers, x._inner, x.split_over = self._peers, self._inner, self.split_over
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) not in memo:
            copied = self.twin(super().__deepcopy__(memo)._local)
            mark_parameter(copied)
            note_copy(self, copied, sys._getframe(1))
            memo[id(self)] = put_on(copied, users_class(self))
        return memo[id(self)]


class _Gathered(torch.autograd.Function):
    gathers_a_weight = True

    @staticmethod
    def forward(ctx: Any, local: Tensor, whole: Callable[[], Tensor], part: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.part = part
        return whole()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.part(grad), None, None


def dim_of(parameter: Tensor, ranks: int) -> int | None:
    """The dim of which each of ``ranks`` can store a part: the first one that is long enough, if any.

    Alike on all ranks, those along the tensor axis included.
    """
    if isinstance(parameter, ShardedTensor):
        held = [parameter.positions.count(rank) for rank in range(parameter.axis.size)]
        return dim_of_shape(parameter.shape, ranks, parameter.sharded_dim, held)
    return dim_of_shape(parameter.shape, ranks)


def dim_of_shape(shape: Sequence[int], ranks: int, split: int | None = None, held: Sequence[int] = ()) -> int | None:
    """As `dim_of`, of a parameter of that shape.

    Args:
        shape: of the whole.
        ranks: that use the same of it.
        split: the dim that the tensor axis splits, if any.
        held: the indices along it that each rank of the tensor axis holds.

    Example::

        assert dim_of_shape((2, 8), ranks=4) == 1
    """
    if 0 in shape:  # there is nothing to store
        return None
    if split is not None:
        return split if min(held) >= ranks else None
    return next((dim for dim, size in enumerate(shape) if size >= ranks), None)


def composed(split: Positions, tensor: int, peers: int) -> Positions:
    """Who stores which index, where each of ``tensor`` ranks' indices are shared out over its ``peers``."""
    owner = split.owner.copy()
    for rank in range(tensor):
        own = split.indices(rank)
        # the tensor ranks beside a peer follow one another
        owner[own] = Positions.even(len(own), peers).owner * tensor + rank
    return Positions.of(owner)
