"""Between deferred tensors and what stands for them: on ``meta``, in an `Op`, and as a function's results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred, UndeferrableError
from lightning_par.absent.deferred.history import Allocation, Constant, History, Op, Store, written_by
from lightning_par.absent.deferred.session import Session
from lightning_par.absent.geometry import Geometry
from lightning_par.mesh.digest import digest
from lightning_par.private.operators import schema_of
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.storage import memory_of

_COPIED = 1 << 20  # bytes: real tensors up to this size are copied, since their owner may write to them


def deferred_in(value: Any) -> list[Deferred]:
    """The deferred tensors in ``value``."""
    return [x for x in tree_leaves(value) if isinstance(x, Deferred)]


def metas(value: Any) -> Any:
    """``value`` with tensors on meta: of a deferred one its twin."""

    def meta(x: Any) -> Any:
        if isinstance(x, Deferred):
            return x.meta
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")

    return tree_map(meta, value)


def on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with which a function makes its result on meta."""
    changed = {name: x for name, x in kwargs.items() if name not in ("pin_memory", "generator")}
    if changed.get("device") is not None:
        changed["device"] = torch.device("meta")
    return {**changed, "generator": None} if "generator" in kwargs else changed


def kept(value: Any) -> Any:
    """``value`` as an `Op` keeps it."""

    def keep(x: Any) -> Any:
        if isinstance(x, Deferred):
            return x.ref()
        return _constant(x) if isinstance(x, Tensor) else x

    return tree_map(keep, value)


def _constant(x: Tensor) -> Constant:
    if x.is_meta:
        return Constant(x.detach(), None)
    session, plain = Session.current, type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
    if not plain and session is not None:
        raise UndeferrableError(f"a {type(x).__name__} of layout {x.layout} goes into a tensor")
    x, large = x.detach(), x.nbytes > _COPIED
    if session is None and (large or not plain):  # of a checkpoint, which is the same for all ranks
        return Constant(x, None)
    constant = Constant(x if large else x.clone(), int(digest(x)))
    if session is not None:
        session.constants.append(constant)
    return constant


def results(func: Any, op: Op, out: Any, args: Any, kwargs: Any) -> Any:
    """What the caller of ``func`` gets; ``op`` is written down where it wrote or made something.

    Args:
        func: what ran.
        op: the same, to run it again.
        out: what it returned, on meta.
        args: what it was given.
        kwargs: as ``args``.
    """
    inputs, written = deferred_in((args, kwargs)), written_by(func, args, kwargs)
    for store in {id(x.store): x.store for x in written}.values():
        store.history = store.history.after(op)
    for x in written:
        follow_meta(x)
    if written and all(r.alias_info is not None and r.alias_info.is_write for r in schema_of(func).returns):
        count = len(schema_of(func).returns)
        return written[0] if count == 1 else tuple(written[:count]) or None
    stores = {memory_of(x.meta): x.store for x in inputs}
    device = torch.device(kwargs.get("device") or (inputs[0].device if inputs else "cpu"))
    outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    for index, x in enumerate(outputs):
        key = memory_of(x)
        if key not in stores:
            memory = Allocation(x.untyped_storage().nbytes(), device)
            op.made.append((index, memory, Geometry.of(x)))
            stores[key] = Store(History(memory, (op, index)))
    return tree_map(lambda x: Deferred(stores[memory_of(x)], x) if isinstance(x, Tensor) else x, out)


def follow_meta(x: Deferred) -> Deferred:
    """``x``, whose twin on meta may have changed its shape in place."""
    if Geometry.of(x) != Geometry.of(x.meta):
        if x.meta.untyped_storage().nbytes() > x.store.history.allocation.nbytes:
            raise UndeferrableError("a tensor is made larger in place")
        x.take_over(x)
    return x
