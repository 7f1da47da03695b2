"""The microbatch axis: samples of one batch that run one after another, as if they were on ranks.

Rules for tensors sharded along the batch dim then do what a microbatch needs: user code sees the whole batch's shapes,
a mean divides by the whole batch's count, and a sum over samples gives this microbatch's share of the whole. What would
need the other microbatches' values at that moment can't run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn

from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions


class SamplesMixError(RuntimeError):
    """A function needs several microbatches at once; ``unit`` is the module that was called as a whole there."""

    unit: str | None = None


class WholeBatchesAdvised(AbstractContextManager[None]):
    """Inside, samples that need one another in a later batch than the first are an error of the user's."""

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        mixing, seen = error, set[int]()
        while mixing is not None and not isinstance(mixing, SamplesMixError):  # the user's code may reword it
            seen.add(id(mixing))
            mixing = mixing.__cause__
            if id(mixing) in seen:  # errors may name one another
                return
        if mixing is not None:
            raise ValueError(
                f"Samples of this batch need one another, which none of the first batch did: {mixing}. Write "
                "microbatches=1."
            ) from error


class MicrobatchAxis(Axis):
    """Microbatch ``index`` of ``count``, as an axis whose sums are shares: the whole is their sum over microbatches.

    Args:
        count: microbatches in the batch.
        index: the one that runs.

    Example::

        axis = MicrobatchAxis(4, 0)
        x = ShardedTensor(torch.ones(2, 3), 0, Positions.even(8, 4), axis)
        assert x.mean().item() == 0.25  # a quarter of the whole batch's mean, 1
    """

    depth = 1
    by_sample = True

    def __init__(self, count: int, index: int) -> None:
        super().__init__("microbatch", tuple(range(count)), index, None)
        self.sums = 0  # sums over samples so far
        self.cuts = 0  # whole tensors that were cut so far
        self.tried = False  # whether code of a unit ran with its values, of which ranks know their own alone
        self.said: SamplesMixError | None = None  # what was last said to the user's code, which may catch it

    def positions(self, samples: int) -> Positions:
        """Which microbatch holds each of the batch's samples: contiguous runs, the first ones a sample longer."""
        return Positions.even(samples, self.size)

    def all_reduce_(self, x: Tensor, purpose: str, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        if op != "sum" and purpose != "extreme":
            self._refuse(f"takes the {op} over the samples of a batch")
        self.sums += 1  # of an extreme it is no share, which an analysis tells by the function's name
        return x

    def no_shares(self, name: str) -> NoReturn:
        self._refuse(f"`{name}` needs a sum over the samples of a batch whole")

    def entered(self, x: Tensor) -> Tensor:
        return x  # its gradient's shares are summed as each microbatch's backward accumulates them

    def about_to_cut(self, x: Tensor) -> None:
        self.cuts += self.size > 1

    def about_to_gather(self, func: Any, x: Tensor) -> NoReturn:
        name = func if isinstance(func, str) else getattr(func, "__name__", str(func))
        self._refuse(f"`{name}` needs the samples of a batch together")

    def all_gather(self, x: Tensor, purpose: str, shape: Sequence[int] | None = None) -> NoReturn:
        self._refuse("a function needs the samples of a batch together")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Around a run of the microbatch: raises what that said to the user's code where this caught it, and went
        another way than on one device, or made an error of its own of it."""
        self.said = None
        try:
            yield
        except Exception as error:
            if self.said is None or self.said is error:
                raise
            raise self.said from error
        if self.said is not None:
            raise self.said

    def _refuse(self, message: str) -> NoReturn:
        self.said = SamplesMixError(message)
        raise self.said
