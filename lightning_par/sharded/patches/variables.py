"""``torch.autograd.Variable(x)``, as older code writes for a tensor without its graph: torch asks no
``__torch_function__``, and who follows tensors would not know what it made."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.autograd.variable import Variable, VariableMeta

from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of the call of `torch.autograd.Variable`."""
    return Replacement(VariableMeta, "__call__", _followed)


def _followed(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def call(kind: type, *args: Any, **kwargs: Any) -> Any:
        if not use.on or kind is not Variable or len(args) > 2 or not kwargs.keys() <= {"data", "requires_grad"}:
            return plain(kind, *args, **kwargs)
        given = dict(zip(("data", "requires_grad"), args)) | kwargs
        if not isinstance(given.get("data"), Tensor):
            return plain(kind, *args, **kwargs)
        x = given["data"].detach()
        return x.requires_grad_() if given.get("requires_grad") else x

    return call
