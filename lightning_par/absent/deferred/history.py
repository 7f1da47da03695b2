"""What was done to memory that does not exist: functions in their order, and tensors as they stood between two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.deferred.generator_draws import Draw
from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.region import Region
from lightning_par.mesh.digest import digest
from lightning_par.private.operators import written_arguments
from lightning_par.private.pytree import tree_leaves

_serials = count()


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that went into a deferred one, such as numpy's data, or a checkpoint's that is not read yet.

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
        made: the outputs with memory of their own: index among the output tensors, the memory, geometry.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draw: Draw | None = None
    made: list[tuple[int, Allocation, Geometry]] = field(default_factory=list)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # what factories make where told no other
    serial: int = field(default_factory=lambda: next(_serials))

    def __post_init__(self) -> None:
        self.refs = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Ref)]
        named = {name: x for name, x in self.kwargs.items() if name != "generator"}  # it is in the draw
        self.written = written_by(self.func, self.args, self.kwargs, Ref)
        self.digest = _hashed(self.func, self.args, named, self.draw, self.dtype)


@dataclass(frozen=True, eq=False)
class Allocation:
    """One piece of memory that does not exist.

    Args:
        nbytes: its size.
        device: where it will be.
        region: of a mapped file, whose content it has; None for other memory.
    """

    nbytes: int
    device: torch.device
    region: Region | None = None


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """What was written to one piece of memory up to a moment, since it was made, or since it was last written whole.

    It refers to what came before and to nothing later: so no history is part of a cycle, and what it alone holds, such
    as data that went into a tensor, is given up with the last tensor that depends on it.

    Args:
        allocation: the memory, one for all of its histories.
        origin: the function whose output it is, and the index among its output tensors; None for fresh memory.
        before: the history before ``op``; None where nothing was written yet.
        op: what was written last.

    Example::

        history = History(Allocation(400, torch.device("cpu")))
        later = history.after(op)
        assert [*later.backwards()] == [op] and history.op is None
    """

    allocation: Allocation
    origin: tuple[Op, int] | None = None
    before: History | None = None
    op: Op | None = None
    digest: str = field(init=False)
    """A hash of all that decides the memory's content."""

    def __post_init__(self) -> None:
        memory = self.allocation
        if self.before is not None and self.op is not None:
            digest = _hashed(self.before.digest, self.op.digest)
        else:
            source = memory.region if self.origin is None else (self.origin[0].digest, self.origin[1])
            digest = _hashed(memory.nbytes, memory.device, source)
        object.__setattr__(self, "digest", digest)

    def after(self, op: Op) -> History:
        """With ``op``, which has just written to the memory."""
        return History(self.allocation, self.origin, self, op)

    def backwards(self) -> Iterator[Op]:
        """The functions that wrote to the memory, the last first."""
        history: History | None = self
        while history is not None and history.op is not None:
            yield history.op
            history = history.before


@dataclass(eq=False)
class Store:
    """The memory that a tensor and its views share, as it stands now; begun anew when it is written whole."""

    history: History


@dataclass(frozen=True, eq=False)
class Ref:
    """A deferred tensor as it stood at a moment."""

    history: History
    geometry: Geometry

    def digest(self) -> str:
        """A hash of all that decides its values."""
        return _hashed(self.history.digest, self.geometry)

    def __repr__(self) -> str:
        return f"Ref({self.digest()})"


def written_by(func: Any, args: Any, kwargs: Any, kind: type = Tensor) -> list[Any]:
    """The tensors among the arguments, or what stands for them, that ``func`` writes to."""
    found: list[Any] = []
    for place, name in written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += [x for x in tree_leaves(value) if isinstance(x, kind)]
    return found


def _hashed(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
