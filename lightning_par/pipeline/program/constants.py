"""What a step's events are given beside values of the model: numbers, and tensors of the batch alone, by content.

Two runs whose placeholders for unknown numbers differ, but whose constants agree, used none of those numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.private.modes import no_modes
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.storage import memory_of
from lightning_par.private.transforms import in_functorch
from lightning_par.trial.known_values import is_known
from lightning_par.trial.large_values import content_of, is_large

_MUCH = 4096  # elements
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def constants_of(value: Any, is_located: Callable[[Tensor], bool]) -> tuple[Any, ...]:
    """Whatever is known of ``value`` without any value of the model; equal for equal contents.

    Args:
        value: a function's arguments, or its result.
        is_located: whether a tensor depends on the model.

    Example::

        assert constants_of((2.0, [torch.ones(1)]), lambda x: False) == constants_of((2.0, [torch.ones(1)]), bool)
    """
    return tuple(_content(leaf, is_located) for leaf in tree_leaves(value))


def words_of(value: Any, is_located: Callable[[Tensor], bool]) -> tuple[Any, ...]:
    """As `constants_of`, of which large tensors give their shapes alone: for what is called very often."""

    def word(x: Any) -> Any:
        large = isinstance(x, (Tensor, np.ndarray)) and math.prod(x.shape) > _MUCH
        hidden = isinstance(x, Tensor) and in_functorch()  # what a transform wraps has no storage
        return tuple(x.shape) if large or hidden else _content(x, is_located)

    return tuple(map(word, tree_leaves(value)))


def _content(leaf: Any, is_located: Callable[[Tensor], bool]) -> Any:
    if isinstance(leaf, Tensor):
        if is_large(leaf):
            return tuple(leaf.shape), leaf.stride(), content_of(leaf)
        return "value" if is_located(leaf) or leaf.is_meta else _of_tensor(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.shape, hashlib.sha1(np.ascontiguousarray(leaf).tobytes()).digest()
    if isinstance(leaf, (*_PLAIN, torch.dtype, np.generic)):
        return repr(leaf)  # a NaN equals itself
    if isinstance(leaf, slice):
        return tuple(_content(x, is_located) for x in (leaf.start, leaf.stop, leaf.step))
    return type(leaf)


def _of_tensor(x: Tensor) -> Any:
    if x.layout != torch.strided:
        return tuple(x.shape)
    if not is_known(x):  # in a dry run: equal where it lies in the same memory
        return tuple(x.shape), memory_of(x), x.storage_offset()
    with no_modes():  # no run takes it for the user's code, which would decide by what it reads
        return tuple(x.shape), hashlib.sha1(raw_bytes(x.detach().cpu().contiguous()).numpy().tobytes()).digest()
