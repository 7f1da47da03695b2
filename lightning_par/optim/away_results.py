"""What functions return where another rank has the tensors that they are given: the same kinds, without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.optim.function_facts import Effect, Function
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.functions import PRECISIONS


class AwayResults:
    """Tells the shape and dtype of what a function returns; of functions of single entries it asks torch once.

    Example::

        results = AwayResults()
        x = results.away(torch.add, function_of(torch.add), (elsewhere, 1.0), {}, origin)
        assert x.shape == elsewhere.shape
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, torch.dtype]] = {}

    def away(self, func: Any, function: Function, args: Any, kwargs: Any, origin: Origin) -> Any:
        """What ``func`` returns where its located arguments are, without its values.

        Args:
            func: torch's, as a `torch.overrides.TorchFunctionMode` is given it.
            function: what is known of it.
            args: some of them elsewhere.
            kwargs: likewise.
            origin: of what it makes.
        """
        if function.name in ("__setitem__", "backward"):
            return None
        if function.writes:
            return args[0]
        if function.name == "detach":
            return Elsewhere(args[0].shape, args[0].dtype, args[0].device, args[0].origin)
        device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Elsewhere))
        if function.name in PRECISIONS:
            # a cast of nothing tells the device, too, which a meta tensor can't
            like = func(torch.empty(0, dtype=args[0].dtype, device=device), *args[1:], **kwargs)
            return Elsewhere(args[0].shape, like.dtype, like.device, origin)
        key = _kinds(func, args, kwargs) if function.kind is Effect.BY_ELEMENT else None
        if key in self._known:
            return Elsewhere(*self._known[key], device, replace(origin))
        result = on_meta(func, args, kwargs)
        if key is not None and isinstance(result, Tensor):
            self._known[key] = result.shape, result.dtype
        return tree_map(
            lambda x: Elsewhere(x.shape, x.dtype, device, replace(origin)) if isinstance(x, Tensor) else x, result
        )


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` returns for tensors without values."""

    def meta(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

    args, kwargs = tree_map(meta, (args, kwargs))
    return func(*args, **kwargs)


def _kinds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """All by which the shape and dtype may go of what a function of single entries returns; None where that is not
    known."""
    kinds = tuple(map(_kind, (*args, *kwargs.values())))
    return None if None in kinds else (func, kinds, tuple(kwargs))


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    if isinstance(x, bool | int | float | complex):
        return type(x)  # by whose value nothing goes but values
    return x if isinstance(x, str | torch.dtype) else None
