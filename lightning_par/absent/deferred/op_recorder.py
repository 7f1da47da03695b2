"""Run functions without data, and write down what is needed to run them with data later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.absent.deferred.deferred_tensor import Deferred, UndeferrableError
from lightning_par.absent.deferred.generator_draws import Draw, ScratchDraws
from lightning_par.absent.deferred.history import Allocation, History, Op, written_by
from lightning_par.absent.deferred.replay import values
from lightning_par.absent.deferred.results import deferred_in, follow_meta, kept, metas, on_meta, results
from lightning_par.absent.deferred.session import Session
from lightning_par.absent.geometry import Geometry
from lightning_par.private.operators import schema_of
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.storage import memory_of
from lightning_par.sharded.functions import FILLS, OVERWRITES, operator_of
from lightning_par.sharded.whole_draws import draws

if TYPE_CHECKING:
    from lightning_par.absent.deferred.adoption import Adoption

SMALL = 1 << 16  # bytes: what functions without deferred arguments make of this size is real at once
_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def meet(func: Any, args: Any, kwargs: Any, adoption: Adoption) -> Any:
    """Run ``func`` in a `Session`: with data, or without if its result is to be deferred."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(isinstance(x, Deferred) for x in tensors):
        return record(func, *adoption.instead((args, kwargs)))
    if not tensors or _makes_anew(func, tensors, kwargs):
        return make(func, args, kwargs)
    if not _needs_data(func) and not written_by(func, args, kwargs):  # what is written to knows so by its pages
        given = adoption.instead((args, kwargs))
        if deferred_in(given):
            return record(func, *given)
    return func(*args, **kwargs)


def make(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func``, which reads no tensor's values; a large result is deferred."""
    out = None
    if any(argument.name == "device" for argument in schema_of(func).arguments):
        device = torch.device(kwargs.get("device") or "cpu")
        try:
            out = func(*args, **on_meta({**kwargs, "device": device}))
        except Exception:  # no rule for meta tensors, or a mistake of the caller's, which is then raised below
            out = None
    outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    if all(x.layout != torch.strided or x.nbytes <= SMALL for x in outputs) or device.type == "meta":
        return func(*args, **kwargs)
    draw = None
    if draws(func):
        draw = Draw(device, kwargs.get("generator"))
        if Session.current is None or Session.current.draws:
            func(*args, **kwargs)  # moves the generator on
    return results(func, _op(func, args, kwargs, draw), out, args, kwargs)


def record(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func``, which has a deferred argument. Where its results depend on values, these are computed."""
    if operator_of(func) == "set_":
        return _adopt(*args)
    written = written_by(func, args, kwargs)
    if any(not isinstance(x, Deferred) for x in written):  # a real tensor takes values of a deferred one
        args, kwargs = tree_map(lambda x: x.value() if isinstance(x, Deferred) else x, (args, kwargs))
        return func(*args, **kwargs)
    if operator_of(func) in FILLS and len(deferred_in((args, kwargs))) == 1:
        return _fill(func, args, kwargs)
    if draws(func) or _needs_data(func):
        return _compute(func, args, kwargs)
    try:
        out = func(*metas(args), **on_meta(metas(kwargs)))
    except Exception:  # no rule for meta tensors, or a mistake of the caller's, which is then raised again
        return _compute(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        return follow_meta(args[0])
    _renew(func, args, written)
    return results(func, _op(func, args, kwargs), out, args, kwargs)


def _fill(func: Any, args: Any, kwargs: Any) -> Deferred:
    """Draw as many numbers as the tensor has entries."""
    x: Deferred = args[0]
    draw = Draw(x.device, kwargs.get("generator"))
    session = Session.current
    if session is None or session.draws:
        scratch = ScratchDraws() if session is None else session.scratch
        func(scratch.like(x), *args[1:], **kwargs)
    _renew(func, args, [x])
    x.store.history = x.store.history.after(_op(func, args, kwargs, draw))
    return x


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` with values, for what they decide: numbers, shapes, how many random numbers are drawn."""
    inputs = deferred_in((args, kwargs))
    real = dict(zip(map(id, inputs), values([x.ref() for x in inputs])))
    given = tree_map(lambda x: real.get(id(x), x), (args, kwargs))
    draw = Draw(inputs[0].device, kwargs.get("generator")) if draws(func) else None
    out = func(*given[0], **given[1])
    known = {memory_of(real[id(x)]): x.meta for x in inputs}
    outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    new = all(x.nbytes <= SMALL and memory_of(x) not in known for x in outputs)
    if new and not written_by(func, args, kwargs):
        return out
    op = _op(func, args, kwargs, draw)
    return results(func, op, tree_map(lambda x: _twin(x, known), out), args, kwargs)


def _op(func: Any, args: Any, kwargs: Any, draw: Draw | None = None) -> Op:
    args, kwargs = kept((args, kwargs))
    return Op(func, args, kwargs, draw)


def _twin(x: Any, known: dict[int, Tensor]) -> Any:
    """A tensor on meta for the real ``x``, in the memory on meta that is known by that of ``x``."""
    if not isinstance(x, Tensor):
        return x
    if x.layout != torch.strided or x.is_quantized:
        raise UndeferrableError(f"a tensor of layout {x.layout} is made")
    key = memory_of(x)
    if key not in known:
        known[key] = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
    storage: Any = known[key].untyped_storage()
    return torch.empty(0, dtype=x.dtype, device="meta").set_(storage, x.storage_offset(), x.shape, x.stride())


def _adopt(x: Any, source: Any = None, *rest: Any) -> Any:
    """``x.set_(source)``: between tensors only."""
    if not isinstance(x, Deferred) or not isinstance(source, Deferred) or rest:
        raise UndeferrableError("a tensor is given another memory")
    x.take_over(source)
    return x


def _renew(func: Any, args: Any, written: list[Any]) -> None:
    """Forget what was written to a memory that ``func`` will write whole, reading nothing of it."""
    if operator_of(func) not in OVERWRITES:
        return
    x: Deferred = written[0]
    reads = any(y.store is x.store for y in deferred_in(args[1:]))
    nbytes = x.store.history.allocation.nbytes
    if not reads and x.nbytes == nbytes and Geometry.of(x.meta).dense:
        x.store.history = History(Allocation(nbytes, x.device))


def _makes_anew(func: Any, tensors: list[Tensor], kwargs: Any) -> bool:
    """Whether ``func`` makes a tensor that is real after ones that are not, as `torch.empty_like` can."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type == "meta" or not all(x.is_meta for x in tensors):
        return False
    return operator_of(func).endswith("_like") or operator_of(func).startswith("new_")


def _needs_data(func: Any) -> bool:
    kinds = (str(r.type) for r in schema_of(func).returns)
    return any(tag in func.tags for tag in _DATA) or any("Tensor" not in kind for kind in kinds)
