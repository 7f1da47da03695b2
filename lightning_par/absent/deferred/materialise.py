"""Give a module the weights that were deferred, one at a time, in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.absent.deferred.replay import values
from lightning_par.private.storage import trim_memory
from lightning_par.private.tensors import is_view
from lightning_par.sharded.identity import become, swappable
from lightning_par.sharded.tensor import leaf

_TRIM = 16 << 20  # bytes that were given up since memory was last handed back to the system


def materialise(module: nn.Module) -> None:
    """Compute the values of every deferred parameter and buffer of ``module``, or of its part on this rank.

    Beside what stays, there is never more than what one of them takes to compute.

    Args:
        module: planned and sharded; what other ranks hold is no longer in it.

    Example::

        build(model, model.configure_model)
        materialise(model)
    """
    freed = _TRIM  # by planning
    with swappable(module.modules()):
        for name, x in _deferred_in(module):
            if freed >= _TRIM:
                trim_memory()
                freed = 0
            freed += x.store.history.allocation.nbytes
            make_real([x], name)
    trim_memory()


def make_real(tensors: Sequence[Deferred], name: str) -> None:
    """Turn ``tensors``, all those that share a memory, into real ones that share one.

    Raises:
        RuntimeError: something else holds one of them, as an autograd graph does.
    """
    order = sorted(tensors, key=is_view)  # the last go first: views hold what they are views of
    real = values([x.ref() for x in order])
    while order:
        become(order[-1], _like(order[-1], real.pop()), name)
        order.pop()


def map_again(tensors: Sequence[Deferred], name: str) -> bool:
    """Turn ``tensors``, all those that share a memory, into real ones in a mapped file, which takes no memory.

    Returns whether it did: they have the file's content.
    """
    history = tensors[0].store.history
    region = history.allocation.region
    if region is None or history.op is not None:
        return False
    storage: Any = region.memory.untyped_storage()
    for x in sorted(tensors, key=is_view, reverse=True):
        place = x.meta.storage_offset(), tuple(x.shape), x.stride()
        become(x, _like(x, torch.empty(0, dtype=x.dtype).set_(storage, *place)), name)
    return True


def _like(x: Deferred, value: Tensor) -> Tensor:
    if isinstance(x, nn.Parameter):
        return nn.Parameter(value, requires_grad=x.requires_grad)
    return value.requires_grad_(x.requires_grad)


def _deferred_in(module: nn.Module) -> Iterator[tuple[str, Deferred]]:
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        held = leaf(x)
        if isinstance(held, Deferred):
            yield name, held
