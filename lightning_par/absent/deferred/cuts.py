"""Which parts of files, of checkpoints and of real tensors a deferred tensor is made of: what a rank keeps of a weight
is cut from what it is computed from, through copies, casts, views, joins and arithmetic, so that no more than that is
read."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from lightning_par.absent.deferred.fetches import Wanted
from lightning_par.absent.deferred.history import Allocation, Constant, History, Op, Ref
from lightning_par.absent.deferred.recipe import Cast, Computed, Fetched, Held, Joined, Read, Recipe, Shaped
from lightning_par.absent.geometry import Box, Geometry, box_of
from lightning_par.absent.unread import Unread
from lightning_par.sharded.functions import COPY_OPERATORS, operator_of

_EXACT = frozenset("add sub mul div neg add_ sub_ mul_ div_ neg_".split())
"""Arithmetic whose result for one entry is the same wherever the entry lies: rounded once, as IEEE 754 says."""
_MOST = 1 << 16  # pieces


class _NeedsWholeError(Exception):
    """More than the part has to be computed."""


def recipe_of(ref: Ref) -> Recipe | None:
    """How to make the entries of ``ref`` and no others; None where others have to be computed with them.

    Example::

        weight = torch.load("weights.pt", mmap=True)["weight"].to(torch.bfloat16)  # within a `Session`
        assert recipe_of(weight[:10].ref()).shape == (10, 20)
    """
    try:
        return _recipe(ref.history, ref.geometry)
    except _NeedsWholeError:
        return None


def _recipe(history: History, view: Geometry) -> Recipe:
    memory = history.allocation
    for op in history.backwards():
        written = [ref for ref in op.written if ref.history.allocation is memory]
        if all(_apart(ref.geometry, view) for ref in written):
            continue
        if len(written) > 1:
            raise _NeedsWholeError
        return _output(op, memory, written[0].geometry, view)
    if memory.region is not None:
        return Read(memory.region, view)
    if history.origin is None:  # nothing was written there
        raise _NeedsWholeError
    origin, _ = history.origin
    geometry = next(geometry for _, made, geometry in origin.made if made is memory)
    return _output(origin, memory, geometry, view)


def _output(op: Op, memory: Allocation, out: Geometry, view: Geometry) -> Recipe:
    """The part of what ``op`` wrote, or made, at ``out``, that ``view`` has."""
    box = box_of(out, view)
    if box is None:
        raise _NeedsWholeError
    name, made = operator_of(op.func), None
    if name in COPY_OPERATORS or name == "copy_":
        made = _picked(op.args[1 if name == "copy_" else 0], box, out.shape)
    elif name in ("cat", "stack"):
        made = _joined(op, box, out.shape, name == "stack")
    elif name == "index_select":
        made = _selected(op, box, out.shape)
    elif name in _EXACT and memory.device.type == "cpu":
        made = _computed(op, box, out)
    if made is None:
        raise _NeedsWholeError
    if made.dtype != out.dtype:
        made = Cast(made, out.dtype)
    return made if made.shape == view.shape else Shaped(made, view.shape)


def _picked(x: Any, box: Box, shape: tuple[int, ...]) -> Recipe:
    """The entries of ``x``, an argument that is repeated to ``shape``, at ``box``."""
    geometry = _geometry(x)
    return _entries(x, box.within(geometry.expanded(shape)))


def _geometry(x: Any) -> Geometry:
    return x.geometry if isinstance(x, Ref) else Geometry.of(x.value)


def _entries(x: Ref | Constant, view: Geometry) -> Recipe:
    if isinstance(x, Ref):
        return _recipe(x.history, view)
    if x.value.device.type != "cpu":
        raise _NeedsWholeError
    if isinstance(x.value, Unread):  # which would keep its values for a view
        return Fetched(Wanted(x.value, view))
    return Held(x.value.as_strided(view.shape, view.stride, view.offset))


def _joined(op: Op, box: Box, shape: tuple[int, ...], stacks: bool) -> Recipe:
    """Of `torch.cat`, or of `torch.stack`."""
    dim = _dim(op, 1, len(shape))
    parts, end = [], 0
    for x in op.args[0]:
        geometry = _geometry(x).unsqueezed(dim) if stacks else _geometry(x)
        if len(geometry.shape) != len(shape):  # `torch.cat` passes over empty ones
            continue
        begin, end = end, end + geometry.shape[dim]
        indices = _indices(box, dim)
        within = _between(indices, begin, end)
        if within:
            cut = box.moved(dim, within[0] - begin, len(within), indices.step)
            parts.append(_entries(x, cut.within(geometry)))
    return _in_a_row(parts, box, dim)


def _between(indices: range, begin: int, end: int) -> range:
    """Those of the ascending ``indices`` between ``begin`` and ``end``."""
    first = max(0, -(-(begin - indices.start) // indices.step))
    last = max(first, -(-(end - indices.start) // indices.step))
    return indices[first:last]


def _selected(op: Op, box: Box, shape: tuple[int, ...]) -> Recipe:
    """Of `torch.index_select`."""
    x, index = op.args[0], op.args[2]
    if not isinstance(index, Constant):
        raise _NeedsWholeError
    dim = _dim(op, 1, len(shape))
    wanted = _indices(box, dim)
    picked = index.value.tolist()[wanted.start : wanted.stop : wanted.step]
    runs = [[i for _, i in run] for _, run in groupby(enumerate(picked), lambda at: at[1] - at[0])]
    if len(runs) > _MOST:
        raise _NeedsWholeError
    parts = [_entries(x, box.moved(dim, run[0], len(run), 1).within(_geometry(x))) for run in runs]
    return _in_a_row(parts, box, dim)


def _in_a_row(parts: list[Recipe], box: Box, dim: int) -> Recipe:
    if len(parts) == 1:
        return parts[0]
    place = box.place(dim)
    if place is None or len({part.dtype for part in parts}) > 1:
        raise _NeedsWholeError
    return Joined(tuple(parts), place)


def _computed(op: Op, box: Box, out: Geometry) -> Recipe:
    if len(op.args) > 2 or set(op.kwargs) - {"alpha"} or op.kwargs.get("alpha", 1) != 1:
        raise _NeedsWholeError

    def argument(x: Any) -> Any:
        if not isinstance(x, (Ref, Constant)):
            return x
        if _geometry(x).shape == ():  # it counts otherwise for the dtype of the result
            return _entries(x, _geometry(x))
        return _picked(x, box, out.shape)

    return Computed(op.func, tuple(map(argument, op.args)), op.kwargs, box.finer, out.dtype)


def _dim(op: Op, place: int, ndim: int) -> int:
    dim: int = op.args[place] if len(op.args) > place else op.kwargs.get("dim", 0)
    return dim % ndim


def _indices(box: Box, dim: int) -> range:
    try:
        return box.indices(dim)
    except ValueError:
        raise _NeedsWholeError from None


def _apart(a: Geometry, b: Geometry) -> bool:
    """Whether no byte of the memory that both lie in is in both."""
    return a.span[1] <= b.span[0] or b.span[1] <= a.span[0]
