"""Functions that treat each sample by itself: resizing, some pools, normalisation by stored statistics.

The dims of an argument before its last few, its core, are rows: a sharded one stays sharded in the result.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.rules.lookup import aligned, enter, is_same, rule, view
from lightning_par.sharded.rules.reduce import every_rank_has_some
from lightning_par.sharded.rules.strides import follows
from lightning_par.sharded.tensor import ShardedTensor

Cores = dict[str, int]
"""How many of the last dims of each argument with rows belong together; below zero: all but so many of the first."""

_BY_ROWS: dict[str, Cores] = {
    **{f"conv_transpose{n}d": {"input": n + 1} for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": {"input": n} for n in (1, 2, 3)
       for kind in ("lp", "adaptive_max", "adaptive_avg")},
    **{f"{kind}_pool{n}d_with_indices": {"input": n} for n in (1, 2, 3) for kind in ("max", "adaptive_max")},
    **{f"max_unpool{n}d": {"input": n, "indices": n} for n in (1, 2, 3)},
    "interpolate": {"input": -2},
    "group_norm": {"input": -1}, "local_response_norm": {"input": -1}, "channel_shuffle": {"input": -1},
    "pixel_shuffle": {"input": 3}, "pixel_unshuffle": {"input": 3}, "fold": {"input": 2},
    "grid_sample": {"input": -1, "grid": -1},
    "pairwise_distance": {"x1": 1, "x2": 1}, "cdist": {"x1": 2, "x2": 2},
    "lstm_cell": {"input": 1, "hx": 1}, "gru_cell": {"input": 1, "hx": 1},
    "rnn_tanh_cell": {"input": 1, "hx": 1}, "rnn_relu_cell": {"input": 1, "hx": 1},
    "tril": {"input": 2}, "triu": {"input": 2},
    "view_as_real": {"input": 0}, "view_as_complex": {"input": 1},
    "bucketize": {"input": 0},
}  # fmt: skip


def rows_of(x: Tensor, core: int) -> int:
    """How many of the first dims of ``x`` are rows."""
    return max(x.ndim - core, 0) if core >= 0 else min(-core, x.ndim)


@rule(*_BY_ROWS)
def rows(func: Any, *args: Any, **kwargs: Any) -> Any:
    return by_rows(func, _BY_ROWS[func.__name__], args, kwargs)


def by_rows(func: Any, cores: Cores, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on this rank's rows of the arguments named in ``cores``, which are its first; others are entered."""
    names = list(cores)
    given: dict[Any, Any] = {names[i] if i < len(names) else i: arg for i, arg in enumerate(args)} | kwargs
    with_rows = [(x, cores[name]) for name in names for x in tree_leaves(given.get(name)) if isinstance(x, Tensor)]
    sharded = [(x, core) for x, core in with_rows if isinstance(x, ShardedTensor)]
    if not sharded:
        return NotImplemented
    lead, core = max(sharded, key=lambda pair: rows_of(*pair))
    row = lead._dim - rows_of(lead, core)  # from the last row, as broadcasting counts
    if row >= 0 or not every_rank_has_some(lead):  # many kernels won't have an empty tensor
        return NotImplemented
    missed = False

    def local(x: Any, core: int | None) -> Any:
        nonlocal missed
        if not isinstance(x, Tensor):
            return x
        if core is None:
            missed |= isinstance(x, ShardedTensor)
            return enter(x, lead._axis)
        part = aligned(x, row - (x.ndim - rows_of(x, core)), lead._positions, lead._axis)
        missed |= part is None
        return part

    placed = {name: tree_map(lambda x: local(x, cores.get(name)), value) for name, value in given.items()}  # noqa: B023
    if missed:
        return NotImplemented
    local_args = [placed.pop(names[i] if i < len(names) else i) for i in range(len(args))]
    out = func(*local_args, **placed)
    dim = max(rows_of(*pair) for pair in with_rows) + row
    return tree_map(lambda x: view(x, dim, lead._positions, lead._axis) if isinstance(x, Tensor) else x, out)


@rule("batch_norm")
def batch_norm(
    func: Any, x: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *more: Any,
) -> Any:  # fmt: skip
    """By stored statistics; in training it takes those of all samples."""
    if not is_same(func, F.batch_norm) or training or more or not isinstance(x, ShardedTensor) or x._dim == 1:
        return NotImplemented
    others = (running_mean, running_var, weight, bias)
    if any(isinstance(other, ShardedTensor) for other in others):
        return NotImplemented
    others = tuple(enter(other, x._axis) for other in others)
    return view(func(x._local, *others, False, momentum, eps), x._dim, x._positions, x._axis)


@rule("instance_norm")
def instance_norm(
    func: Any, x: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """By each sample's own statistics; stored ones are updated by all samples."""
    if not is_same(func, F.instance_norm) or (use_input_stats and running_mean is not None):
        return NotImplemented
    args = (x, running_mean, running_var, weight, bias, use_input_stats, *args)
    return by_rows(func, {"input": -1}, args, kwargs)


@rule("affine_grid")
def affine_grid(func: Any, theta: Tensor, size: Any, align_corners: Any = None) -> Any:
    """``size`` names the whole batch."""
    if not isinstance(theta, ShardedTensor) or theta._dim != 0 or size[0] != theta.shape[0]:
        return NotImplemented
    if not every_rank_has_some(theta):
        return NotImplemented
    local = [theta._positions.count(theta._axis.rank), *size[1:]]
    return view(func(theta._local, local, align_corners), 0, theta._positions, theta._axis)


@rule("one_hot")
def one_hot(func: Any, ids: Tensor, num_classes: int = -1) -> Any:
    """Without a number of classes it looks for the largest."""
    return NotImplemented if num_classes < 0 else by_rows(func, {"tensor": 0}, (ids, num_classes), {})


@rule("unfold")
@follows
def unfold(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`F.unfold` of images, or `Tensor.unfold` along another dim."""
    if is_same(func, F.unfold):
        return by_rows(func, {"input": 3}, (x, *args), kwargs)
    dim = kwargs.get("dimension", args[0] if args else None)
    if not isinstance(x, ShardedTensor) or not isinstance(dim, int) or dim % x.ndim == x._dim:
        return NotImplemented
    return view(func(x._local, *args, **kwargs), x._dim, x._positions, x._axis)


@rule("cosine_similarity")
def cosine_similarity(func: Any, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    lead = max((x for x in (x1, x2) if isinstance(x, ShardedTensor)), key=lambda x: x.ndim)
    ndim = max(x1.ndim, x2.ndim)
    along, row = dim % ndim - ndim, lead._dim - lead.ndim
    local = [aligned(x, row, lead._positions, lead._axis) for x in (x1, x2)]
    if along == row or any(x is None for x in local):
        return NotImplemented
    out = func(*local, along, eps)
    return view(out, ndim + row - (along < row), lead._positions, lead._axis)


@rule("searchsorted")
def searchsorted(func: Any, sorted_sequence: Tensor, input: Any, **kwargs: Any) -> Any:
    """Each value by itself, or each row of values in its own row."""
    if not isinstance(input, Tensor) or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    if sorted_sequence.ndim > 1:
        return by_rows(func, {"sorted_sequence": 1, "input": 1}, (sorted_sequence, input), kwargs)
    if isinstance(sorted_sequence, ShardedTensor):
        return NotImplemented
    return by_rows(lambda values, x: func(x, values, **kwargs), {"input": 0}, (input, sorted_sequence), {})


@rule("embedding_bag")
def embedding_bag(
    func: Any, ids: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: Any = None,
) -> Any:  # fmt: skip
    """Bags of ids, one a row."""
    if not is_same(func, F.embedding_bag) or ids.ndim != 2 or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    if offsets is not None or isinstance(weight, ShardedTensor):
        return NotImplemented

    def run(ids: Tensor, per_sample_weights: Any, weight: Tensor) -> Tensor:
        return F.embedding_bag(
            ids, weight, mode=mode, per_sample_weights=per_sample_weights, padding_idx=padding_idx
        )  # fmt: skip

    return by_rows(run, {"ids": 1, "per_sample_weights": 1}, (ids, per_sample_weights, weight), {})


_FOURIER_DIMS = {"": (-1,), "2": (-2, -1), "n": None}


@rule(*[f"fft_{a}{b}fft{n}" for a in ("", "i") for b in ("", "r", "h") for n in _FOURIER_DIMS])
def fourier(func: Any, x: Tensor, s: Any = None, dim: Any = None, norm: Any = None, **kwargs: Any) -> Any:
    """Transforms of other dims; ``s`` is called ``n`` where there is one."""
    s = kwargs.pop("n", s)
    if kwargs or not isinstance(x, ShardedTensor):
        return NotImplemented
    if dim is None:
        last = range(-len(s), 0) if isinstance(s, (tuple, list)) else range(-x.ndim, 0)
        dim = _FOURIER_DIMS[func.__name__.rpartition("fft")[2]] or tuple(last)
    dims = [dim] if isinstance(dim, int) else list(dim)
    if x._dim in [d % x.ndim for d in dims] or not every_rank_has_some(x):
        return NotImplemented
    one = func.__name__.endswith("fft")
    return view(func(x._local, s, dims[0] if one else dims, norm), x._dim, x._positions, x._axis)
