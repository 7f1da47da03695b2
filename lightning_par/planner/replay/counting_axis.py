"""Dry axes of ranks that need not be a run's: tensors are fake, and what would be sent is noted in open ledgers."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.gather_order import GatherOrder
from lightning_par.fsdp.stored_parameter import StorageAxis
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.collectives import enter
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.deep_masks import DeepMasks
from lightning_par.sequence.scheme import AttentionSettings, make_grid
from lightning_par.sequence.sequence_axis import SequenceAxis
from lightning_par.tensor.residual_stream import ResidualAxis
from lightning_par.trial.memo import Memo


class _Nothing(Memo[Any, Any]):
    """Keeps nothing, so that each call runs, and is counted."""

    def get(self, key: Any, default: Any = None) -> Any:
        return None

    def __setitem__(self, key: Any, value: Any) -> None: ...


class _Counting(Axis):
    """A dry axis of no process group, whose every call is run and counted."""

    tells_gathers = False
    _known: dict[int, tuple[weakref.ref[Tensor], Tensor]]

    def forget_calls(self) -> None:
        """Let each call run by its rule; to be called once after it was made."""
        self.dry = True
        self.calls, self.forms, self._known = _Nothing(), _Nothing(), {}

    def entered(self, x: Tensor) -> Tensor:
        """As `Axis.entered`, without a look at the memory, which fakes have none of."""
        if self.size == 1 or self.gradient_shares or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        key = id(x)
        known = self._known.get(key)
        if known is not None and known[0]() is x:
            return known[1]
        entry = enter(x, self)
        self._known[key] = weakref.ref(x, lambda _: self._known.pop(key, None)), entry
        return entry


class _Shallow(DeepMasks):
    """Of masks without values it is taken that none is huge throughout; no message goes by that."""

    def has(self, mask: Tensor) -> bool:
        return False


class CountingAxis(_Counting):
    """A tensor axis of ``size`` ranks, as ``rank`` sees it."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__("tensor", tuple(range(size)), rank, None)
        self.forget_calls()


class CountingSequence(_Counting, SequenceAxis):
    """A sequence axis of ``size`` ranks, as ``rank`` sees it."""

    def __init__(self, size: int, rank: int, name: str = "sequence") -> None:
        super().__init__(name, tuple(range(size)), rank, None)
        self.masks = _Shallow()
        self.forget_calls()

    def attend(self, asked: Any) -> None:
        """Attention is computed by the scheme that is ``asked`` for."""
        ulysses = asked["ulysses"] if isinstance(asked, Mapping) else self.size if asked == "ulysses" else 1
        grid = None
        if 1 < ulysses < self.size or asked == "auto":

            def made(name: str, ranks: Sequence[int], rank: int) -> Axis:
                return CountingSequence(len(ranks), rank, name)

            grid = make_grid(self, ulysses, made)
        self.attention = AttentionSettings(asked, grid)


class CountingResidual(_Counting, ResidualAxis):
    """The ranks of a counting tensor axis, as those among which tokens are shared out.

    Args:
        tensor: the axis.
        lengths: of sequences that earlier steps have met.
    """

    def __init__(self, tensor: CountingAxis, lengths: Collection[int] = ()) -> None:
        ResidualAxis.__init__(self, tensor)
        self.lengths.update(lengths)
        self.masks = _Shallow()
        self.forget_calls()
        self._unknown: set[int] = set()  # sizes that were no known length as an island ended

    def tokens_of(self, shape: Sequence[int]) -> tuple[int, Positions] | None:
        if len(shape) > 2:
            self._unknown.update(size for size in shape[:2] if size not in self.lengths)
        return super().tokens_of(shape)

    @property
    def settled(self) -> bool:
        """Whether another step, which has met the lengths of this one, does the same."""
        return self._unknown.isdisjoint(self.lengths)


class CountingStorage(_Counting, StorageAxis):
    """``size`` ranks that store parts of weights, as the first one sees them; who uses a weight has it gathered."""

    def __init__(self, size: int) -> None:
        Axis.__init__(self, "data", tuple(range(size)), 0, None)
        self.copies, self.gathering, self.order = size, None, GatherOrder()
        self.forget_calls()
