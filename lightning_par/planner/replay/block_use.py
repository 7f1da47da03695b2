"""The weights of a block for one call of it, on fakes: allocated when `lightning_par.fsdp.block_use` allocates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.storage import memory_of


@dataclass(frozen=True)
class BlockWeight:
    """One weight of a block.

    Attributes:
        key: of the tensor that stands for it in the step.
        part: a leaf that stands for what this rank stores.
        shape: of what is gathered.
        message: elements of its part in a message.
        ordered: whether the ranks' parts follow one another in it.
        used: makes of the gathered weight what the step uses.
        dtype: in which it travels.
    """

    key: int
    part: Tensor
    shape: tuple[int, ...]
    message: int
    ordered: bool
    used: Callable[[Tensor], Tensor]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class GatheredBlock:
    """Weights that are gathered together.

    Attributes:
        weights: in the order of their message.
        ranks: that store a part of each.
        stays: whether they stay from the first call to the end of backward.
    """

    weights: tuple[BlockWeight, ...]
    ranks: int
    stays: bool = False


class BlockUse:
    """The weights of a block for one call of it.

    Args:
        block: whose they are.
        before: the use that was made before, to which backward comes next.

    Attributes:
        refers: how often backward will need each weight.
        memories: the number of the weight that lies in a memory.
        is_tracked: whether it is in the graph.
        has_graph: whether autograd was on as the weights were taken.
    """

    def __init__(self, block: GatheredBlock, before: BlockUse | None) -> None:
        self.block, self.before = block, before
        self.arriving: list[Tensor] | None = None
        self.wholes: list[Tensor | None] | None = None
        self.token: Tensor | None = None
        self.refers: Counter[int] = Counter()
        self.left: Counter[int] | None = None
        self.begun = self.is_tracked = self.has_graph = False
        self.memories: dict[int, int] = {}
        self.sums: list[Tensor] = []

    def _like(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.block.weights[0].part.dtype)

    def start(self) -> None:
        """Begin to gather: there is a message, and this rank's own part of it where that is put together."""
        if self.arriving is None and self.wholes is None:
            weights = self.block.weights
            entries = sum(w.message * w.dtype.itemsize for w in weights) // weights[0].dtype.itemsize
            copied = len(weights) > 1 or weights[0].dtype is not weights[0].part.dtype
            sizes = [entries] * copied + [entries * self.block.ranks]
            self.arriving = [torch.empty(size, dtype=weights[0].dtype) for size in sizes]

    def land(self) -> None:
        """The whole weights are there, and the message is gone."""
        if self.wholes is not None:
            return
        self.start()
        assert self.arriving is not None
        weights = self.block.weights
        if len(weights) == 1 and weights[0].ordered:
            self.wholes = [self.arriving[-1][: prod(weights[0].shape)].view(weights[0].shape)]
        else:
            ranks = self.block.ranks
            self.wholes = [
                torch.empty(w.message * ranks, dtype=w.dtype)[: prod(w.shape)].view(w.shape) for w in weights
            ]  # fmt: skip
        self.arriving = None
        self.memories |= {memory_of(x): i for i, x in enumerate(self.wholes) if x is not None}

    def track(self) -> None:
        """Take part in the graph from here on."""
        parts = [w.part for w in self.block.weights]
        if not self.is_tracked and any(x.requires_grad for x in parts) and torch.is_grad_enabled():
            self.is_tracked, self.token = True, _Parts.apply(self, *parts)

    def weights(self) -> Sequence[Tensor]:
        """The whole weights, for the call."""
        token, self.token = self.token, None
        self.has_graph = torch.is_grad_enabled()
        if token is not None and self.has_graph:
            return _Whole.apply(token, self)  # type: ignore[no-any-return]
        self.land()
        assert self.wholes is not None
        return [x.detach() for x in self.wholes if x is not None]

    def land_where(self, other: BlockUse) -> None:
        """The whole weights are there, in the memory of those of an ``other`` use, as far as user code has that."""
        self.land()
        assert self.wholes is not None
        there = [None] * len(self.wholes) if other.wholes is None or other.begun else other.wholes
        self.wholes = [own if known is None else known for own, known in zip(self.wholes, there, strict=True)]

    def let_go(self) -> None:
        """Forget what was gathered."""
        self.wholes = self.left = None

    def begin_backward(self) -> None:
        """Backward comes to the call: gather what it needs here, and begin with what it needs next."""
        if self.begun:
            return
        self.begun = True
        self.land()
        before = self.before
        while before is not None and not before.refers and not before.begun:
            before = before.before
        if before is not None and not before.begun:
            before.start()

    def for_backward(self, number: int) -> Tensor:
        """The weight of this number; the last one that asks lets it go."""
        self.begin_backward()
        if self.wholes is not None and self.wholes[number] is None:  # another backward comes
            self.let_go()
        self.land()
        assert self.wholes is not None
        if self.left is None:
            self.left = Counter(self.refers)
            self.wholes = [x if self.left[i] else None for i, x in enumerate(self.wholes)]
        found = self.wholes[number]
        assert found is not None
        self.left[number] -= 1
        if not self.left[number]:
            self.wholes[number] = None
        return found

    def sum(self, gradients: Sequence[Tensor | None]) -> None:
        """Begin to sum whole gradients over the ranks."""
        if self.refers:
            self.begin_backward()
        self.let_go()
        trained = [w for w in self.block.weights if w.part.requires_grad]
        own = self.block.weights[0].part.dtype
        gradients = [g if g is None else g.to(own) for g in gradients]
        entries = sum(w.message for w in trained) + len(trained) * (len(trained) > 1)
        if len(trained) > 1:
            self.sums.append(self._like(entries * self.block.ranks))
        else:
            self.sums += [g for g in gradients if g is not None]  # sent from where it is
        self.sums.append(self._like(entries))

    def summed(self) -> list[Tensor | None]:
        """This rank's parts of the gradients; the message is gone."""
        found = [torch.empty_like(w.part) if w.part.requires_grad else None for w in self.block.weights]
        self.sums.clear()
        return found


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: BlockUse, *parts: Tensor) -> Tensor:
        ctx.use = use
        return torch.empty(1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.use.summed()


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, use: BlockUse) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        use.land()
        assert use.wholes is not None
        weights = [x.detach() for x in use.wholes if x is not None]
        trained = [w.part.requires_grad for w in use.block.weights]
        ctx.mark_non_differentiable(*(x for x, trains in zip(weights, trained) if not trains))
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        if all(g is None for g in gradients):
            return None, None
        ctx.use.sum(gradients)
        return torch.empty(1), None
