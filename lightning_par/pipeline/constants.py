"""What a step's events are given beside values of the model: numbers, and tensors of the batch alone, by content.

Two runs whose placeholders for unknown numbers differ, but whose constants agree, used none of those numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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


def words_of(value: Any) -> tuple[str, ...]:
    """The numbers and words in ``value``, without its tensors."""
    return tuple(repr(leaf) for leaf in tree_leaves(value) if type(leaf) in _PLAIN)


def _content(leaf: Any, is_located: Callable[[Tensor], bool]) -> Any:
    if isinstance(leaf, Tensor):
        return "value" if is_located(leaf) or leaf.is_meta else _of_tensor(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.shape, hashlib.sha1(np.ascontiguousarray(leaf).tobytes()).digest()
    if isinstance(leaf, _PLAIN):
        return repr(leaf)  # a NaN equals itself
    return type(leaf)


def _of_tensor(x: Tensor) -> Any:
    if x.layout != torch.strided:
        return tuple(x.shape)
    flat = x.detach().cpu().contiguous().view(-1)
    content = flat.view(torch.uint8) if flat.numel() else flat
    return tuple(x.shape), hashlib.sha1(content.numpy().tobytes()).digest()
