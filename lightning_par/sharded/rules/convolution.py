"""Windows that slide along the sharded dim: convolutions, pools, padding. Only rows at the borders of parts move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh.collectives import _plain
from lightning_par.mesh.positions import Array, Positions
from lightning_par.sequence.halo import fetch
from lightning_par.sharded.rules.lookup import aligned, enter, rule, view
from lightning_par.sharded.rules.memory_format import laid_out, memory_format_of
from lightning_par.sharded.rules.per_sample import by_rows
from lightning_par.sharded.tensor import ShardedTensor


@dataclass(frozen=True)
class Window:
    """A window along one dim, in torch's terms, with as much padding before as after it as these say."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def reach(self) -> int:
        """Rows from its first to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def places(self, size: int) -> int:
        """How many places it has along ``size`` rows."""
        return (size + self.before + self.after - self.reach) // self.stride + 1


@dataclass(frozen=True, eq=False)
class WindowSpread:
    """Who computes which places of a window, and what each rank needs for that.

    Attributes:
        positions: of the result.
        wanted: for each rank the rows for its places, one run of places after another; -1 is padding.
        lengths: for each rank, how many of them each run needs.
    """

    positions: Positions
    wanted: tuple[Array, ...]
    lengths: tuple[list[int], ...]


@lru_cache(maxsize=1024)
def spread(rows: Positions, result: Positions, window: Window, ranks: int) -> WindowSpread:
    """What each rank needs to compute the places that ``result`` gives it of a window along ``rows``.

    Example::

        halves, window = Positions.of([0, 0, 1, 1]), Window(3, 1, 1, 1, 1)
        assert [list(rows) for rows in spread(halves, halves, window, 2).wanted] == [[-1, 0, 1, 2], [1, 2, 3, -1]]
    """
    runs = [_runs_of(result.indices(rank), window, rows.size) for rank in range(ranks)]
    return WindowSpread(
        result, tuple(np.concatenate(of_rank) for of_rank in runs), tuple([len(run) for run in each] for each in runs)
    )


def _runs_of(places: Array, window: Window, size: int) -> list[Array]:
    if not len(places):  # kernels won't have an empty tensor: a place of padding alone, which is dropped
        return [np.full(window.reach, -1)]
    runs = []
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):  # in zigzag order a rank has two runs
        start = run[0] * window.stride - window.before
        rows = np.arange(start, run[-1] * window.stride - window.before + window.reach)
        runs.append(np.where((rows < 0) | (rows >= size), -1, rows))
    return runs


def _result(x: ShardedTensor, window: Window) -> Positions | None:
    """Who computes which place, so that the result lies as ``x`` and as other sequences of its length do."""
    size, places = x.shape[x._dim], window.places(x.shape[x._dim])
    if places <= 0:
        return None
    if places >= size and window.stride == 1:  # what is cut off it afterwards, of a causal one, is at its end
        return _clamped(x._positions, np.arange(places))
    found: Positions | None = x._axis.spread(places)
    return found


def _clamped(positions: Positions, rows: Array) -> Positions:
    """Rows beyond an end lie with the row at that end."""
    same = len(rows) == positions.size and rows[0] == 0
    return positions if same else positions.take(np.clip(rows, 0, positions.size - 1))


def _along(x: Any, spatial: int) -> int | None:
    """Which of the last ``spatial`` dims of ``x`` is sharded, on an axis along which rows may be fetched."""
    if not isinstance(x, ShardedTensor) or x._dim < x.ndim - spatial or not _plain(x._local):
        return None
    return None if x._axis.spread(x.shape[x._dim]) is None else x._dim - (x.ndim - spatial)


def _slid(x: ShardedTensor, window: Window, fill: float, run: Callable[[Tensor], Tensor]) -> Any:
    """``run``, which pads nothing along the sharded dim, on the rows that this rank's places need."""
    result = _result(x, window)
    if result is None:
        return NotImplemented
    found = spread(x._positions, result, window, x._axis.size)
    parts = fetch(x, found.wanted, fill).split(found.lengths[x._axis.rank], x._dim)
    outs = [run(part) for part in parts]
    local = outs[0] if len(outs) == 1 else torch.cat(outs, x._dim)
    # without the place of a rank that has none
    return view(local.narrow(x._dim, 0, result.count(x._axis.rank)), x._dim, result, x._axis)


def _each(value: Any, count: int) -> list[int]:
    """One number a dim."""
    return [value] * count if isinstance(value, int) else [*value] * (count if len(value) == 1 else 1)


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    func: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    spatial = weight.ndim - 2
    channels = x.ndim - spatial - 1  # of [B, C, ...] or [C, ...]
    split = isinstance(weight, ShardedTensor) or isinstance(x, ShardedTensor) and x._dim == channels
    if split and groups == 1 and _is_product(weight, stride, padding):
        lies = memory_format_of(x, weight)
        for _ in range(spatial):
            weight = weight.squeeze(-1)  # [out, in, 1, ...] -> [out, in]
        # [B, C, ...] -> [B, ..., C], and back, to lie in memory as torch's result does: views and draws go by that
        return laid_out(F.linear(x.movedim(channels, -1), weight, bias).movedim(-1, channels), lies)
    if split and groups > 1:
        return _by_channel(func, x, weight, bias, (stride, padding, dilation), groups)
    out = by_rows(func, {"input": spatial + 1}, (x, weight, bias, stride, padding, dilation, groups), {})
    at = _along(x, spatial)
    if out is not NotImplemented or at is None or not all(w is None or _plain(w) for w in (weight, bias)):
        return out
    kernel, strides, dilations = list(weight.shape[2:]), _each(stride, spatial), _each(dilation, spatial)
    around = _padding(padding, kernel, dilations)
    # Torch refuses strides here, and no argument says uneven padding of the other dims.
    if padding == "same" and (set(strides) != {1} or any(a != b for i, (a, b) in enumerate(around) if i != at)):
        return NotImplemented
    window = Window(kernel[at], strides[at], dilations[at], *around[at])
    # along the cut dim it comes with the rows that are fetched
    beside = [0 if i == at else before for i, (before, _) in enumerate(around)]
    weight, bias = enter(weight, x._axis), enter(bias, x._axis)
    return _slid(x, window, 0.0, lambda part: func(part, weight, bias, strides, beside, dilations, groups))


def _by_channel(func: Any, x: Any, weight: Any, bias: Any, window: tuple[Any, ...], groups: int) -> Any:
    """Each channel by a kernel of its own, as in Mamba and in feed-forwards of images: a rank's channels by theirs."""
    channels = x.ndim - weight.ndim + 1
    if not isinstance(x, ShardedTensor) or x._dim != channels or not groups == x.shape[channels] == weight.shape[0]:
        return NotImplemented
    positions, axis, count = x._positions, x._axis, x._local.shape[channels]
    parts = [w if w is None else aligned(w, -w.ndim, positions, axis) for w in (weight, bias)]
    if parts[0] is None or (parts[1] is None and bias is not None):
        return NotImplemented
    local = x._local
    if not count:  # kernels won't have an empty tensor: a channel of padding alone, which is dropped
        local, parts = _one_more(local, channels), [w if w is None else _one_more(w, 0) for w in parts]
    out = func(local, *parts, *window, count or 1).narrow(channels, 0, count)
    return view(out, channels, positions, axis)


def _one_more(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def _is_product(weight: Tensor, stride: Any, padding: Any) -> bool:
    """Whether a convolution is a linear layer of each place, as in some transformers' feed-forwards."""
    spatial = weight.ndim - 2
    if set(weight.shape[2:]) != {1} or set(_each(stride, spatial)) != {1}:
        return False
    return padding in ("same", "valid") or set(_each(padding, spatial)) == {0}


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Before and after each dim."""
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in _each(0 if padding == "valid" else padding, len(kernel))]


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    func: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    options = {"ceil_mode": ceil_mode, "return_indices": return_indices}
    spatial = int(func.__name__[-2])
    out = by_rows(func, {"input": spatial}, (x, kernel_size, stride, padding, dilation), options)
    at = _along(x, spatial)
    if out is not NotImplemented or at is None or ceil_mode or return_indices or not x.is_floating_point():
        return out
    window, beside = _pooled(kernel_size, stride, padding, dilation, spatial, at)
    stride = stride or kernel_size
    # padding of -inf wins nowhere
    return _slid(x, window, -torch.inf, lambda part: func(part, kernel_size, stride, beside, dilation))


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    func: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    spatial = int(func.__name__[-2])
    more = () if spatial == 1 else (divisor_override,)
    stride = stride or kernel_size
    out = by_rows(func, {"input": spatial}, (x, kernel_size, stride, padding, ceil_mode, count_include_pad, *more), {})
    at = _along(x, spatial)
    # What is fetched as padding counts as rows do, so its number must not matter.
    if out is not NotImplemented or at is None or ceil_mode or not count_include_pad:
        return out
    window, beside = _pooled(kernel_size, stride, padding, 1, spatial, at)
    return _slid(x, window, 0.0, lambda part: func(part, kernel_size, stride, beside, False, True, *more))


def _pooled(kernel: Any, stride: Any, padding: Any, dilation: Any, spatial: int, at: int) -> tuple[Window, list[int]]:
    """The window along dim ``at``, and the padding of the others."""
    kernels, around = _each(kernel, spatial), _each(padding, spatial)
    strides = _each(stride or kernel, spatial)
    window = Window(kernels[at], strides[at], _each(dilation, spatial)[at], around[at], around[at])
    return window, [0 if i == at else p for i, p in enumerate(around)]


_MODES: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # numpy's names


@rule("pad")
def pad(func: Any, x: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Pads the last dims; what is put beside the sharded one lies with the row next to it."""
    pad = list(pad)
    while mode == "constant" and pad[-2:] == [0, 0]:
        pad = pad[:-2]
    out = by_rows(func, {"input": len(pad) // 2}, (x, pad, mode, value), {})
    if out is not NotImplemented or not isinstance(x, ShardedTensor) or _along(x, len(pad) // 2) is None:
        return out
    last = 2 * (x.ndim - 1 - x._dim)
    before, after = pad[last : last + 2]
    rows = _source(x.shape[x._dim], before, after, mode)
    if rows is None:
        return NotImplemented
    # A shift, which keeps the length, keeps each place on its rank, where other sequences have it.
    positions = _clamped(x._positions, np.arange(len(rows)) - (0 if before == -after else before))
    local = fetch(x, [rows[positions.indices(rank)] for rank in range(x._axis.size)], value or 0.0)
    pad[last : last + 2] = 0, 0
    return view(func(local, pad, mode, value) if any(pad) else local, x._dim, positions, x._axis)


def _source(size: int, before: int, after: int, mode: str) -> Array | None:
    """Which row each row of the padded dim is; -1 is a new one. None where torch should say what is wrong."""
    if mode == "constant":
        rows = np.arange(-before, size + after)
        return np.where((rows < 0) | (rows >= size), -1, rows) if len(rows) else None
    largest = size - 1 if mode == "reflect" else size
    if mode not in _MODES or min(before, after) < 0 or (mode != "replicate" and max(before, after) > largest):
        return None
    return np.pad(np.arange(size), (before, after), _MODES[mode])
