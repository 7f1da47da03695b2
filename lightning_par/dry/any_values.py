"""Functions that want values, though the shapes that they make go by none: they are run on several kinds of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.fake_tensors import FakeTensor, FakeTensorMode, unset_fake_temporarily
from lightning_par.private.operators import Operator
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.functions import operator_of
from lightning_par.trial.fake_functions import places_of
from lightning_par.trial.known_values import is_known

_MOST = 2**28  # elements of what such a function is given


def of_any_values(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of fakes, if it makes the same shapes of zeros, of ones and of both; else `NotImplemented`.

    Whole numbers that are the same then, too, are known, as the sizes of a packed batch, which its lengths tell. Of a
    count of kinds with a ``minlength`` it is taken that there are no others.

    Args:
        mode: of the fakes.
        func: an operation that fakes can't run.
        args: its arguments; those that are real keep their values.
        kwargs: its arguments by name.

    Example::

        with FakeTensorMode() as mode:
            kinds = torch.zeros(8, dtype=torch.long)
        assert of_any_values(mode, torch.bincount, (kinds, None, 4), {}).shape == (4,)
        assert of_any_values(mode, torch.bincount, (kinds,), {}) is NotImplemented
    """
    places = _places(func, args)
    if places is not None:
        return func(args[0], [*places])
    fakes = [x for x in tree_leaves((args, kwargs)) if _is_unknown(x)]
    if not fakes or sum(x.numel() for x in fakes) > _MOST:
        return NotImplemented
    try:
        with unset_fake_temporarily():
            found = [_on(way, func, args, kwargs) for way in (_zeros, _ones, _both)]
    except Exception:  # whatever kernels raise
        return NotImplemented
    leaves = [[x for x in tree_leaves(one) if isinstance(x, Tensor)] for one in found]
    if not leaves[0] or any([*map(_shape, one)] != [*map(_shape, leaves[0])] for one in leaves):
        return NotImplemented
    with unset_fake_temporarily():
        known = {id(x): _is_told(x, *others) for x, *others in zip(*leaves)}
    device = next((x.device for x in fakes if x.device.type != "cpu"), torch.device("cpu"))

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor) or known[id(x)]:
            return x
        with mode:
            return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=device)

    return tree_map(fake, found[0])


def tensor_of(mode: FakeTensorMode) -> Callable[..., Tensor]:
    """What is `torch.tensor` in a dry run: of a list in which a tensor has no value, as of norms, it makes one that has
    none. It reads such tensors behind the back of any mode.

    Args:
        mode: of the fakes.

    Example::

        with FakeTensorMode() as mode:
            norms = [torch.ones(()), torch.ones(())]
        assert tensor_of(mode)(norms).shape == (2,)
    """
    plain = torch.tensor

    def tensor(data: Any, **options: Any) -> Tensor:
        if isinstance(data, Tensor) or not any(map(_is_unknown, tree_leaves(data))):
            return plain(data, **options)
        with unset_fake_temporarily():
            like = plain(tree_map(lambda x: _ones(x) if _is_unknown(x) else x, data), **options | {"device": "meta"})
        with mode:
            made = torch.empty(like.shape, dtype=like.dtype, device=options.get("device"))
        return made.requires_grad_(like.requires_grad)

    return tensor


def _places(func: Any, args: Any) -> tuple[Any, ...] | None:
    """What known masks choose, which takes no memory to tell."""
    if not isinstance(func, Operator) or operator_of(func) != "index" or any(map(_is_unknown, args[1])):
        return None
    return places_of(args[1])


def _on(way: Callable[[Tensor], Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(lambda x: way(x) if _is_unknown(x) else x, (args, kwargs))
    return func(*args, **kwargs)


def _is_unknown(x: Any) -> bool:
    return isinstance(x, Tensor) and (isinstance(x, FakeTensor) or not is_known(x))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(tuple(x.shape), dtype=x.dtype)


def _ones(x: Tensor) -> Tensor:
    return torch.ones(tuple(x.shape), dtype=x.dtype)


def _both(x: Tensor) -> Tensor:
    return (torch.arange(x.numel()) % 2).to(x.dtype).reshape(tuple(x.shape))


def _shape(x: Tensor) -> Any:
    return x.shape, x.stride(), x.dtype


def _is_told(x: Tensor, *others: Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64) and all(torch.equal(x, other) for other in others)
