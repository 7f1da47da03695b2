"""Tensors of the same tokens, as keys and values are, in one flat piece of memory that travels as one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    @classmethod
    def of(cls, *tensors: Tensor) -> Parcel:
        return cls(tuple((x.shape[0], x.shape[1], x.shape[3]) for x in tensors))

    def size(self, tokens: int) -> int:
        """Elements."""
        return tokens * sum(prod(shape) for shape in self.shapes)

    def pack(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
        """The flat piece; the beginning of ``into`` where it is given, rounded to its dtype."""
        tokens = tensors[0].shape[2]
        if into is None:
            into = tensors[0].new_empty(self.size(tokens))
        for room, x in zip(self.unpack(into, tokens), tensors, strict=True):
            room.copy_(x)
        return into[: self.size(tokens)]

    def unpack(self, flat: Tensor, tokens: int) -> list[Tensor]:
        """Views of the beginning of ``flat``."""
        sizes = [tokens * prod(shape) for shape in self.shapes]
        pieces = flat[: sum(sizes)].split(sizes)
        # each [tokens * B * H * d] -> [B, H, tokens, d]
        return [piece.view(B, H, tokens, d) for piece, (B, H, d) in zip(pieces, self.shapes, strict=True)]


def needed_of(grads: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """The gradients that anyone asks for."""
    return [grad for grad, wanted in zip(grads, needed, strict=True) if wanted]


def given_back(
    grads: Sequence[Tensor], needed: tuple[bool, bool], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of keys and values in their dtype, None where nobody asked."""
    left = iter(grads)
    first = next(left).to(dtype) if needed[0] else None
    return first, next(left).to(dtype) if needed[1] else None
