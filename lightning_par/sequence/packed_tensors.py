"""Tensors of the same tokens, as keys and values are, in one flat piece of memory that travels as one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parcel:
    """What is packed together: tensors (B, H, tokens, d) of one dtype, any number of tokens.

    Args:
        shapes: (B, H, d) of each.

    Example::

        k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)
        parcel = Parcel.of(k, v)
        flat = parcel.pack((k, v))
        assert flat.shape == (parcel.size(5),) and torch.equal(parcel.unpack(flat, 5)[1], v)
    """

    shapes: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(*tensors: Tensor) -> Parcel:
        return _of_shapes(tuple([x.shape for x in tensors]))

    @cached_property
    def _numels(self) -> tuple[int, ...]:
        """Elements of each for one token."""
        return tuple(map(prod, self.shapes))

    @cached_property
    def _numel(self) -> int:
        return sum(self._numels)

    @cached_property
    def _alike(self) -> bool:
        """Whether all have one shape, so that the piece is one tensor, too: a few calls less for each hop."""
        return len(set(self.shapes)) == 1

    def size(self, tokens: int) -> int:
        """Elements."""
        return tokens * self._numel

    def pack(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
        """The flat piece; the beginning of ``into`` where it is given, rounded to its dtype."""
        tokens = tensors[0].shape[2]
        if into is None:
            into = tensors[0].new_empty(self.size(tokens))
        flat = self.beginning(into, tokens)
        if self._alike and {x.dtype for x in tensors} == {into.dtype}:
            torch.stack(tuple(tensors), out=self._stacked(flat, tokens))
            return flat
        for room, x in zip(self.unpack(flat, tokens), tensors, strict=True):
            room.copy_(x)
        return flat

    def unpack(self, flat: Tensor, tokens: int) -> Sequence[Tensor]:
        """Views of the beginning of ``flat``."""
        flat = self.beginning(flat, tokens)
        if self._alike:
            return self._stacked(flat, tokens).unbind()
        pieces = flat.split([tokens * numel for numel in self._numels])
        # each [tokens * B * H * d] -> [B, H, tokens, d]
        return [piece.view(B, H, tokens, d) for piece, (B, H, d) in zip(pieces, self.shapes, strict=True)]

    def beginning(self, flat: Tensor, tokens: int) -> Tensor:
        """What of ``flat`` so many tokens take."""
        size = self.size(tokens)
        return flat if flat.shape[0] == size else flat[:size]

    def _stacked(self, flat: Tensor, tokens: int) -> Tensor:
        B, H, d = self.shapes[0]
        return flat.view(len(self.shapes), B, H, tokens, d)


@lru_cache(maxsize=4096)
def _of_shapes(shapes: tuple[tuple[int, ...], ...]) -> Parcel:
    return Parcel(tuple((B, H, d) for B, H, _, d in shapes))


def needed_of(grads: Sequence[Tensor], needed: Sequence[bool]) -> Sequence[Tensor]:
    """The gradients that anyone asks for."""
    return grads if all(needed) else [grad for grad, wanted in zip(grads, needed, strict=True) if wanted]


def given_back(
    grads: Sequence[Tensor], needed: tuple[bool, bool], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of keys and values in their dtype, None where nobody asked."""
    left = iter(grads)
    first = next(left).to(dtype) if needed[0] else None
    return first, next(left).to(dtype) if needed[1] else None
