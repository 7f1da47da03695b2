"""What was done to memory that does not exist: functions in their order, and tensors as they stood between two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.deferred.generator_draws import Draw
from lightning_par.mesh.digest import digest
from lightning_par.private.pytree import tree_leaves

_serials = count()


@dataclass(frozen=True, eq=False)
class Constant:
    """A real tensor that went into a deferred one, such as numpy's data.

    Args:
        value: the tensor; a copy of its own where that is small.
        hash: of its bytes, when it was used; None for one whose bytes are not looked at.
    """

    value: Tensor
    hash: int | None

    def unchanged(self) -> bool:
        return self.hash is None or self.hash == int(digest(self.value))

    def __repr__(self) -> str:
        return f"Constant({tuple(self.value.shape)}, {self.value.stride()}, {self.value.dtype}, {self.hash})"


@dataclass(eq=False)
class Op:
    """One function that ran.

    Args:
        func: an overload of an ATen function.
        args: its arguments: tensors are a `Ref` or a `Constant`.
        kwargs: as ``args``.
        draw: where the generator stood, if it draws.
        made: the outputs with memory of their own: index among the output tensors, history, geometry.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draw: Draw | None = None
    made: list[tuple[int, History, Geometry]] = field(default_factory=list)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # what factories make where told no other
    serial: int = field(default_factory=lambda: next(_serials))

    def __post_init__(self) -> None:
        self.refs = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Ref)]
        named = {name: x for name, x in self.kwargs.items() if name != "generator"}  # it is in the draw
        self.digest = _hashed(self.func, self.args, named, self.draw, self.dtype)


class History:
    """What was written to one piece of memory since it was made, or since it was last written whole.

    Args:
        nbytes: its size.
        device: where it will be.
        origin: the function whose output it is, and the index among its output tensors; None for fresh memory.
    """

    def __init__(self, nbytes: int, device: torch.device, origin: tuple[Op, int] | None = None) -> None:
        self.nbytes, self.device = nbytes, device
        self.origin = None if origin is None else origin[0]
        self.ops: list[Op] = []
        source = None if origin is None else (origin[0].digest, origin[1])
        self._digests = [_hashed(nbytes, device, source)]  # one for each length: a `Ref` may be of an earlier one

    def append(self, op: Op) -> None:
        self.ops.append(op)
        self._digests.append(_hashed(self._digests[-1], op.digest))

    def digest(self, length: int) -> str:
        """A hash of all that decides its content once ``length`` functions have written to it."""
        return self._digests[length]


@dataclass(eq=False)
class Store:
    """The memory that a tensor and its views share; its history begins anew when it is written whole."""

    history: History


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its memory.

    Example::

        assert Geometry.of(torch.ones(2, 3).t()).shape == (3, 2)
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Geometry:
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    @property
    def dense(self) -> bool:
        """Whether each entry has a place of its own, and no place is left between."""
        step = 1
        for stride, size in sorted(zip(self.stride, self.shape)):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def nbytes(self) -> int:
        """How much memory the tensor reaches into."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Ref:
    """A deferred tensor as it stood once ``length`` functions had written to its memory."""

    history: History
    length: int
    geometry: Geometry

    def digest(self) -> str:
        """A hash of all that decides its values."""
        return _hashed(self.history.digest(self.length), self.geometry)

    def __repr__(self) -> str:
        return f"Ref({self.digest()})"


def _hashed(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
