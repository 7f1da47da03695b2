"""Products of groups of rows, each with a matrix of its own: a mixture of experts, whose weights are stacked."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_par.sharded.rules.contract import contract
from lightning_par.sharded.rules.lookup import rule
from lightning_par.sharded.rules.reduce import every_rank_has_some
from lightning_par.sharded.tensor import ShardedTensor

_ALIGNED = 16  # bytes: kernels take rows of a multiple
_FEATURES = "kmn"

# The dims of both factors and of the result, by how many the factors have: experts, tokens by groups, features.
_LETTERS: dict[tuple[int, int], tuple[str, str, str]] = {
    (2, 3): ("tk", "ekn", "tn"),
    (3, 2): ("emk", "kt", "mt"),
    (2, 2): ("mt", "tn", "emn"),
    (3, 3): ("emk", "ekn", "emn"),
}


@rule("_grouped_mm")
def grouped_mm(func: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Along the features; which tokens and experts meet is for all of them together."""
    letters = _LETTERS.get((a.ndim, b.ndim))
    if letters is None or bias is not None or isinstance(offs, ShardedTensor):
        return NotImplemented
    together = "t" if a.ndim < 3 or b.ndim < 3 else ""
    sharded = [(x, names[x._dim]) for x, names in zip((a, b), letters) if isinstance(x, ShardedTensor)]
    if any(letter in together or (letter == "e" and together) for _, letter in sharded):
        return NotImplemented
    if not all(every_rank_has_some(x) for x, _ in sharded):
        return NotImplemented  # kernels won't take nothing

    def run(a: Tensor, b: Tensor) -> Tensor:
        given = [_padded(x, names) for x, names in zip((a, b), letters)]
        out = func(*given, offs=offs, out_dtype=out_dtype)
        sizes = {name: size for x, names in zip((a, b), letters) for name, size in zip(names, x.shape)}
        whole = tuple(slice(sizes[name]) if name in _FEATURES else slice(None) for name in letters[2])
        return out if given[0] is a and given[1] is b else out[whole]

    return contract(run, [a, b], letters[:2], letters[2])


def _padded(x: Tensor, names: str) -> Tensor:
    """With zeros where a rank's part has so many features that the kernels won't take it."""
    unit = max(1, _ALIGNED // x.element_size())
    more = [-size % unit if name in _FEATURES else 0 for size, name in zip(x.shape, names)]
    return F.pad(x, [n for extra in reversed(more) for n in (0, extra)]) if any(more) else x
