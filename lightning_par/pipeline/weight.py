"""A weight that lives on some ranks of a pipeline, as user code between two steps sees it on every rank.

Functions that write into it run where it is. Views of it are known on every rank, too. All other functions first send
its values, so that all ranks go on with one result; they meet before. Where the weight is kept in parts, too, they are
refused. See `lightning_par.pipeline.joint`.
"""

from __future__ import annotations

import hashlib
import sys
import types
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_par import private
from lightning_par.pipeline.elsewhere import Elsewhere, is_elsewhere, sharding_of
from lightning_par.pipeline.located import is_metadata
from lightning_par.pipeline.structure import map_tensors, tensors_in
from lightning_par.pipeline.travel import kind_of, send_to_all
from lightning_par.pipeline.unlinked import unlinked
from lightning_par.rules.table import user_line, writes

if TYPE_CHECKING:
    from lightning_par.pipeline.joint import JointGradients

_AS_IT_IS = frozenset("""
clone empty_like zeros_like ones_like full_like requires_grad_ swap_tensors register_hook retain_grad backward
register_post_accumulate_grad_hook __deepcopy__ __reduce_ex__
""".split())  # fmt: skip
_OURS = ("lightning_par.", "torch.optim.", "torch.nn.modules.module", "torch.serialization", "torch.distributed")
_BETWEEN = (__name__, "lightning_par.pipeline.elsewhere")


class Weight:
    """What the class of a spread parameter, or of a view of one, begins with.

    Attributes:
        _owner: carries it over the ranks.
    """

    _owner: ClassVar[JointGradients]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        known = is_metadata(func, name) or name in _AS_IT_IS or name == "__format__" and args[0].ndim
        if known or not cls._owner.shows or private.in_backward() or not _is_users(sys._getframe(1)):
            return _as_it_is(func, args, kwargs)
        return _run(cls._owner, func, name, args, kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        x: Any = self
        return torch.Tensor.numpy(x, force=force)

    def tolist(self) -> Any:
        x: Any = self
        return torch.Tensor.tolist(x)


class WeightView(Weight):
    """A view of a spread parameter.

    Attributes:
        _of: the parameter's name.
    """

    _of: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _plain(self).clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _plain(x: Any) -> Any:
    """The same memory in a tensor without ways of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach()


def _is_users(frame: types.FrameType | None) -> bool:
    """Whether a function was called by user code, or for it by torch's."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_OURS) and module not in _BETWEEN:
            return False
        if module not in _BETWEEN and module.partition(".")[0] != "torch":
            return True
        frame = frame.f_back
    return False


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("numpy", "tolist") and is_elsewhere(args[0]):
        return getattr(Elsewhere, name)(args[0])
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _run(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "detach" or name == "__get__" and func.__self__.__name__ == "data":
        return _view(owner, owner.name_of(args[0]), _as_it_is(func, args, kwargs))
    if writes(name) or "out" in kwargs:
        return _write(owner, func, name, args, kwargs)
    if name == "equal" and all(isinstance(x, Tensor) for x in args[:2]) and args[0].dtype == args[1].dtype:
        return _equal(owner, *args[:2])
    return _read(owner, func, name, args, kwargs)


def _write(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Where the weight is; of another one, which is not there, all ranks get the values first."""
    first = args[0] if args else None
    if not isinstance(first, Weight):
        return _as_it_is(func, args, kwargs)
    there = set(owner.holders_of(owner.name_of(first)))

    def given(x: Tensor) -> Tensor:
        away = isinstance(x, Weight) and not there <= set(owner.holders_of(owner.name_of(x)))
        return _sent(owner, name, x) if away else x

    return _as_it_is(func, (first, *map_tensors(given, args[1:])), map_tensors(given, kwargs))


def _read(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of the values; where that is a view, it is one of the weight itself."""
    sent: dict[int, Any] = {}  # weights, by the memory of what was sent of them

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, Weight):
            return x
        values = _sent(owner, name, x)
        sent[private.memory_of(values)] = x
        return values

    links = torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in((args, kwargs)))
    given = map_tensors(whole, (args, kwargs))
    result = func(*given[0], **given[1])
    if isinstance(result, np.ndarray):
        result.flags.writeable = False  # what is written into a copy would be lost
    tensors = tensors_in(result)
    base = sent.get(private.memory_of(tensors[0])) if tensors and tensors[0].layout == torch.strided else None
    if base is None:
        return map_tensors(_unlinked, result) if links else result
    of = owner.name_of(base)
    if is_elsewhere(base):
        return map_tensors(lambda x: _view(owner, of, Elsewhere(x.shape, x.dtype, x.device, base.origin)), result)
    return map_tensors(lambda x: _view(owner, of, x), _as_it_is(func, args, kwargs))


def _unlinked(x: Tensor) -> Tensor:
    return unlinked(x, "is made of a pipeline's weights between two steps")


def _view(owner: JointGradients, of: str, x: Any) -> Any:
    x.__class__ = owner.class_of(WeightView, Elsewhere if is_elsewhere(x) else Tensor)
    x._of = of
    return x


def _sent(owner: JointGradients, name: str, x: Any) -> Tensor:
    """The values of ``x``, in memory of their own. All ranks must call it."""
    of = owner.name_of(x)
    _refuse_parts(name, of, x)
    owner.meet(f"called `{name}` on the weight {of!r} between two steps")
    here = None if is_elsewhere(x) else _plain(x)
    values = send_to_all(here, kind_of(x), owner.sources[of], owner.axis, "weights")
    return values.to(x.device, copy=here is not None)


def _refuse_parts(name: str, of: str, x: Tensor) -> None:
    """Those that hold parts of ``x`` go on with these, and won't meet: on them it is no `Weight`.

    Raises:
        NotImplementedError: each rank that holds ``x`` has a part of it.
    """
    parts = sharding_of(x)
    if parts is not None:
        raise NotImplementedError(
            f"{user_line()}: `{name}` needs the values of the weight {of!r} between two steps. They are on another "
            f"stage of the pipeline, and split there over the {parts[2].name} axis: no rank has them to send. Use them "
            "within the step, write into the weight in place, as `p.data.mul_(0.9)` does, or train by a pipeline "
            "without that axis."
        )


def _equal(owner: JointGradients, a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, by hashes of what is compared."""
    if a.shape != b.shape or a is b:
        return a.shape == b.shape
    for x in (a, b):
        if isinstance(x, Weight):
            _refuse_parts("equal", owner.name_of(x), x)
    owner.meet(f"compared weights of shape {tuple(a.shape)} between two steps")
    told = owner.axis.all_gather_object([_hash(owner, x) for x in (a, b)], "weights")
    one, other = (next((told[r][i] for r in range(len(told)) if told[r][i] is not None), None) for i in (0, 1))
    return one is not None and one == other


def _hash(owner: JointGradients, x: Tensor) -> bytes | None:
    """Equal for equal values; None where they aren't known, and where one is no number."""
    if is_elsewhere(x):
        return None
    plain = _plain(x).cpu() + 0  # of -0.0, too
    if bool(torch.isnan(plain).any()):
        return None
    return hashlib.blake2b(plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()
