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
from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.region import Region
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
        region: of a mapped file, whose content it has; None for other memory.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        origin: tuple[Op, int] | None = None,
        region: Region | None = None,
    ) -> None:
        self.nbytes, self.device, self.region = nbytes, device, region
        self.origin = None if origin is None else origin[0]
        self.ops: list[Op] = []
        source = region if origin is None else (origin[0].digest, origin[1])
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
