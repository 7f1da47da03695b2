"""One device's random numbers on a part of a tensor: the whole is drawn, and the part is kept.

Every operation that draws does so for the whole tensor, from the generator that one device would draw from, so that
this moves on as there. What comes of it is cut. Where a function draws within, as attention and recurrent layers do,
the operations that it is made of are met all the same.

On CUDA, too, the whole is drawn. Philox could be put at any offset, but which of a kernel's threads draws which element
follows from the whole tensor's size and strides, and from the device (``calc_execution_policy`` in
ATen/native/cuda/DistributionTemplates.h, ``fused_dropout_kernel_vec`` in ATen/native/cuda/Dropout.cu): what a part has
does not lie in one piece. Attention's fused kernels number by head and block, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.private.modes import DisableTorchFunction, TorchDispatchMode
from lightning_par.private.operators import schema_of
from lightning_par.sharded.functions import FILLS, operator_of

CutDraw = tuple[int, Positions, "tuple[int, ...] | None"]
"""What is drawn for parts: along which dim, by which positions, and the strides of the whole where they are known."""


def draws(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def attends_without_draws(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator of attention, which may draw, is told to drop nothing."""
    told = {a.name: x for a, x in zip(schema_of(operator).arguments, args)} | kwargs
    return "attention" in operator_of(operator) and not told.get("dropout_p")


class InexactDrawError(NotImplementedError):
    """One device's random numbers can't be had of a function on a part of its tensors."""

    def __init__(self, name: str, place: str, reason: str) -> None:
        super().__init__(
            f"`{name}` at {place} draws random numbers on a part of its tensors: {reason}, so that one device's can't "
            "be had. Write draws='per_shard', the default, under which the part has numbers of its own."
        )


class WholeDraws(TorchDispatchMode):
    """Inside, what is drawn for a part is that part of what one device draws.

    Args:
        dim: of what is drawn, along which it is a part. It may have been merged with dims behind it.
        positions: who holds which of its indices.
        rank: whose part it is.
        lies: the shape of the part of which the whole's strides are known, and these.

    Example::

        torch.manual_seed(0)
        whole = torch.rand(4)
        torch.manual_seed(0)
        with WholeDraws(0, Positions.of([0, 0, 0, 1]), 1):
            assert torch.equal(torch.empty(1).uniform_(), whole[3:])
    """

    def __init__(
        self, dim: int, positions: Positions, rank: int, lies: tuple[torch.Size, tuple[int, ...]] | None = None
    ) -> None:
        super().__init__()
        self.dim, self.positions, self.rank, self.lies = dim, positions, rank, lies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func):
            return func(*args, **kwargs)
        name = operator_of(func)
        with DisableTorchFunction():
            if name in FILLS:
                return self._fill(func, *args, **kwargs)
            run = _WAYS.get(name)
            if run is None:
                return _as_it_is(func, name, args, kwargs)
            return run(self, func, *args, **kwargs)

    def _fill(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Numbers that are written into ``x``."""
        if any(isinstance(arg, Tensor) and arg.ndim for arg in args):
            self.goes_by_entries()
        given = [self._beside(arg) for arg in args]
        mask = operator_of(func) == "bernoulli_"
        return x.copy_(self.drawn(lambda: func(self.whole(x), *given, **kwargs), mask))

    def _beside(self, arg: Any) -> Any:
        return self._with_part(arg) if isinstance(arg, Tensor) and arg.ndim else arg

    def _of_entries(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A number for each entry or row of tensors, drawn by what it holds; how many are drawn does not go by that."""
        self.goes_by_entries()
        given = [self._beside(arg) for arg in args]
        whole = func(*given, **{name: self._beside(x) for name, x in kwargs.items()})
        return self.part(whole, self.rank).clone()

    def _like(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Numbers in a new tensor of the shape of ``x``."""
        part = self.drawn(lambda: func(self.whole(x), *args, **kwargs))
        return torch.empty_like(x, dtype=part.dtype).copy_(part)

    def _sized(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Numbers in a new tensor of a shape that is told."""
        place = next(i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)))
        shape = self._shape(args[place])
        return self.drawn(lambda: func(*args[:place], shape, *args[place + 1 :], **kwargs)).clone()

    def _dropout(self, func: Any, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """The kernel that draws a mask and applies it, as on CUDA."""
        if train is False:
            return func(x, p, train)  # type: ignore[no-any-return]
        mask = self.drawn(lambda: func(self.whole(x).fill_(1), p, train)[1], True).clone()
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def drawn(self, draw: Callable[[], Tensor], mask: bool = False) -> Tensor:
        """This rank's part of what ``draw`` gives, which is 0 and 1 where it is a ``mask``; a subclass may know it."""
        return self.part(draw(), self.rank)

    def goes_by_entries(self) -> None:
        """What an operation is about to draw for a part goes by what that holds."""

    # ----------------------------------------------------------------------------------------------- whole and part

    def _shape(self, shape: Any) -> list[int]:
        found, own = list(shape), self.positions.count(self.rank)
        found[self.dim] = self.positions.size * self._times(found[self.dim], own)
        return found

    def _times(self, size: int, own: int) -> int:
        """How many entries there are of each index."""
        return size // own if own else 1

    def whole(self, x: Tensor) -> Tensor:
        """A tensor as large as that of which ``x`` is a part, and that lies in memory so; its values are any."""
        shape = self._shape(x.shape)
        if self.lies is not None and self.lies[0] == x.shape:
            return x.new_empty_strided(shape, self.lies[1])  # a fake, for fakes
        strides, step = [0] * x.ndim, 1
        for d in sorted(range(x.ndim), key=lambda d: (x.stride(d), -d)):
            strides[d] = step
            step *= shape[d]
        return x.new_empty_strided(shape, strides)

    def _with_part(self, x: Tensor) -> Tensor:
        """As `whole`, with ``x`` in its place and ones around it."""
        whole = self.whole(x).fill_(1)
        whole.index_copy_(self.dim, self._index(x.shape[self.dim], self.rank, x.device), x)
        return whole

    def _index(self, size: int, rank: int, device: torch.device) -> Tensor:
        """Which indices of the whole the part of ``rank`` has, of ``size`` in all."""
        times = self._times(size, self.positions.count(rank))
        index = self.positions.index(rank, device)
        if times == 1:
            return index
        return (index[:, None] * times + torch.arange(times, device=device)).flatten()

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """What of ``whole`` is ``rank``'s."""
        times, piece = whole.shape[self.dim] // max(1, self.positions.size), self.positions.piece(rank)
        if piece is not None:
            return whole.narrow(self.dim, piece[0] * times, piece[1] * times)
        own = self.positions.count(rank) * times
        return whole.index_select(self.dim, self._index(own, rank, whole.device))


_WAYS: dict[str, Callable[..., Any]] = {
    "native_dropout": WholeDraws._dropout,
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), WholeDraws._like),
    **dict.fromkeys(("bernoulli", "normal", "multinomial"), WholeDraws._of_entries),
    **dict.fromkeys(("rand", "randn", "randint"), WholeDraws._sized),
}
"""How operations draw that are none of `FILLS`. Those that draw more or fewer numbers by what they hold have no way."""


def _as_it_is(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    # the first is of no tensor, the second draws nothing
    if name in ("randperm", "_fused_sdp_choice") or attends_without_draws(func, args, kwargs):
        return func(*args, **kwargs)
    from lightning_par.sharded.rules.gather_report import user_line

    raise InexactDrawError(name, user_line(), "how its kernel numbers what it draws goes by the part")
