"""Values that a plan and a dry run do without, though nothing but the batch tells them: large ones.

A mask of 32,768 x 32,768 entries, made of nothing or of two rows of positions, takes gigabytes: it is fake.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.private.fake_tensors import FakeTensor, FakeTensorMode
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.private.operators import Operator, schema_of
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.storage import storage_of

LARGEST = 2**22
"""Elements of a tensor that has values, if it is larger than what it is made of: all of them take memory and time."""

_LARGE = "_lightning_par_large"  # of memory: what of its content is known

_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def stays_small(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> bool:
    """Whether what ``func`` makes may have values: it has no more than `LARGEST` elements, or than those of one that is
    ``given``, which are in memory anyway. To be asked where a mode makes fakes; only what may be large is run on these.

    Args:
        func: an operation.
        args: its arguments.
        kwargs: its arguments by name.
        given: the tensors among them, which have values.
    """
    if given and (_most(args, kwargs) <= LARGEST or _makes_nothing(func)):
        return True
    if any(tag in func.tags for tag in _DATA):  # what there is of the given
        return True
    most = max((LARGEST, *(x.untyped_storage().nbytes() // x.element_size() for x in given)))
    return all(x.numel() <= most for x in tree_leaves(on_fakes(func, args, kwargs)) if isinstance(x, Tensor))


def on_fakes(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of tensors like those that it is given, in a mode that makes fakes; which itself computes
    what takes real ones alone, as a difference."""

    def fake(x: Any) -> Any:
        like = isinstance(x, Tensor) and x.layout is torch.strided and not isinstance(x, FakeTensor)
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device) if like else x

    args, kwargs = tree_map(fake, (args, kwargs))
    return func(*args, **kwargs)


def _most(args: Any, kwargs: Any) -> float:
    """Elements of a function's result, at most: none has more than all that it is given, sizes too, tell together."""
    most = 1.0
    for x in tree_leaves((args, kwargs)):
        most *= max(1.0, x.numel() if isinstance(x, Tensor) else abs(x) if isinstance(x, (int, float)) else 1.0)
    return most


def _makes_nothing(func: Any) -> bool:
    """Whether it returns views of what it is given, or what it writes to."""
    returns = schema_of(func).returns
    return bool(returns) and all(x.alias_info is not None for x in returns)


class LargeAsFakes(TorchDispatchMode):
    """Computes what is made of real tensors, or of none, but for what is large: that is a fake of ``mode``.

    Example::

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with LargeAsFakes(mode):
            mask, few = torch.ones(32_768, 32_768).tril(), torch.ones(8, 8).tril()
        assert is_fake(mask) and not is_fake(few)
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not isinstance(func, Operator) or not all(type(x) is Tensor for x in given):
            return func(*args, **kwargs)
        with self.mode:
            small = stays_small(func, args, kwargs, given)
        if small:
            return func(*args, **kwargs)
        with self.mode:
            return on_fakes(func, args, kwargs)


def is_large(x: Any) -> bool:
    """Whether ``x`` is fake for its size alone: it depends on no parameter.

    Example::

        note_made(x, [], "arange")
        assert is_large(x) and is_large(x[:2])
    """
    return content_of(x) is not None


def content_of(x: Any) -> Any:
    """What `note_made` was last told of the memory of ``x``; None if that is not only fake for its size."""
    x = getattr(x, "_whole", x)  # of a batch's tensor, which is whole on every rank
    storage = storage_of(x) if isinstance(x, FakeTensor) else None
    return None if storage is None else getattr(storage, _LARGE, None)


def note_made(made: Any, given: Any, content: Any = True) -> None:
    """A function made ``made`` of what it was ``given``, or wrote into it.

    Where it was given no other fakes than those of large values, the fakes among what it made are of such, too. Where
    it was, they are not, though they may have been.

    Args:
        made: tensors, among whatever else.
        given: likewise.
        content: equal where the content of what was made is equal.
    """
    fakes = [getattr(x, "_whole", x) for x in tree_leaves(made)]
    fakes = [x for x in fakes if isinstance(x, FakeTensor)]
    if not fakes:
        return
    of_none = all(is_large(x) for x in tree_leaves(given) if isinstance(getattr(x, "_whole", x), FakeTensor))
    for storage in filter(None, map(storage_of, fakes)):
        if of_none:
            setattr(storage, _LARGE, content)
        elif hasattr(storage, _LARGE):
            delattr(storage, _LARGE)
