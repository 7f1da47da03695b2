"""How tensors lie in memory: which entries of one another one has, without looking at any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    def apart(self) -> bool:
        """Whether each entry has a place of its own, but for those that are repeated along a dim."""
        reach, dims = 0, zip(self.stride, self.shape)
        for stride, size in sorted((stride, size) for stride, size in dims if size > 1 and stride):
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True

    @property
    def nbytes(self) -> int:
        """How much memory the tensor reaches into."""
        return self.span[1]

    @property
    def span(self) -> tuple[int, int]:
        """The first byte of its memory that it has, and the one after the last."""
        if 0 in self.shape:
            return 0, 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def expanded(self, shape: Sequence[int]) -> Geometry:
        """The same entries, repeated to ``shape`` as functions of torch repeat them."""
        new = len(shape) - len(self.shape)
        own = [0 if size == 1 else stride for size, stride in zip(self.shape, self.stride)]
        return Geometry(tuple(shape), (*[0] * new, *own), self.offset, self.dtype)

    def unsqueezed(self, dim: int) -> Geometry:
        """With a dim of size 1 before ``dim``."""
        shape, stride = (*self.shape[:dim], 1, *self.shape[dim:]), (*self.stride[:dim], 0, *self.stride[dim:])
        return Geometry(shape, stride, self.offset, self.dtype)


@dataclass(frozen=True)
class Along:
    """A dim of a `Box`: ``size`` entries of ``dim``, each ``step`` after the last; of no dim they are all the same."""

    dim: int | None
    size: int
    step: int


@dataclass(frozen=True)
class Box:
    """Which entries of a tensor a view of it has.

    Attributes:
        starts: where it begins, for each dim of the tensor.
        dims: the view's, of which one may stand for several in a row of the view's own.
        shape: the view's.

    Example::

        x = torch.arange(12).view(3, 4)
        box = box_of(Geometry.of(x), Geometry.of(x[1:, 2]))
        assert box.starts == (1, 2) and box.dims == (Along(0, 2, 1),)
        assert box.within(Geometry.of(x.t().contiguous().t())).stride == (1,)
    """

    starts: tuple[int, ...]
    dims: tuple[Along, ...]
    shape: tuple[int, ...]

    @property
    def finer(self) -> tuple[int, ...]:
        """The shape that ``dims`` make."""
        return tuple(along.size for along in self.dims)

    def within(self, x: Geometry) -> Geometry:
        """The same entries of another tensor of the same shape; with as many dims as `finer`."""
        offset = x.offset + sum(start * stride for start, stride in zip(self.starts, x.stride))
        stride = tuple(0 if a.dim is None else a.step * x.stride[a.dim] for a in self.dims)
        return Geometry(self.finer, stride, offset, x.dtype)

    def place(self, dim: int) -> int | None:
        """The one of ``dims`` that goes along ``dim``; None where there is but one index.

        Raises:
            ValueError: several do.
        """
        found = [place for place, along in enumerate(self.dims) if along.dim == dim]
        if len(found) > 1:
            raise ValueError(f"dim {dim} is cut in several")
        return found[0] if found else None

    def indices(self, dim: int) -> range:
        """Those of ``dim`` that it has, in order; see `place`."""
        place = self.place(dim)
        along = Along(dim, 1, 1) if place is None else self.dims[place]
        return range(self.starts[dim], self.starts[dim] + along.size * along.step, along.step)

    def moved(self, dim: int, start: int, size: int, step: int) -> Box:
        """With other indices of ``dim``, as many as its own or fewer."""
        starts, place = (*self.starts[:dim], start, *self.starts[dim + 1 :]), self.place(dim)
        if place is None:
            return Box(starts, self.dims, self.finer)
        dims = (*self.dims[:place], Along(dim, size, step), *self.dims[place + 1 :])
        return Box(starts, dims, tuple(along.size for along in dims))


def box_of(x: Geometry, view: Geometry) -> Box | None:
    """Which entries of ``x`` the ``view`` into its memory has; None where that is no box of it."""
    order = sorted((d for d, size in enumerate(x.shape) if size > 1), key=lambda d: -x.stride[d])
    starts = _starts(x, view.offset - x.offset, order)
    if x.dtype != view.dtype or 0 in view.shape or starts is None:
        return None
    left = {d: x.shape[d] - 1 - starts[d] for d in order}
    dims, waiting = [], [*zip(view.shape, view.stride)]
    while waiting:
        size, stride = waiting.pop(0)
        if size == 1 or stride == 0:
            dims.append(Along(None, size, 0))
            continue
        dim = next((d for d in order if stride % x.stride[d] == 0), None)
        if dim is None:
            return None
        step = stride // x.stride[dim]
        if step * (size - 1) <= left[dim]:
            left[dim] -= step * (size - 1)
            dims.append(Along(dim, size, step))
            continue
        whole = x.shape[dim] // step  # it goes through all of this dim, and on along the next outer one
        if whole < 2 or x.shape[dim] % step or size % whole or size == whole:
            return None
        waiting[:0] = [(size // whole, stride * whole), (whole, stride)]
    return Box(tuple(starts), tuple(dims), view.shape)


def _starts(x: Geometry, offset: int, order: list[int]) -> list[int] | None:
    """The index of the entry at ``offset``; None where there is none, or dims overlap."""
    reach = 1
    for d in reversed(order):
        if x.stride[d] < reach:
            return None
        reach = x.stride[d] * x.shape[d]
    starts = [0] * len(x.shape)
    for d in order:
        starts[d], offset = divmod(offset, x.stride[d])
        if not 0 <= starts[d] < x.shape[d]:
            return None
    return starts if offset == 0 else None
