"""A weight or buffer that lives on some ranks of a pipeline, as user code between two steps sees it on every rank.

Functions that write into it run where it is. Its views and copies are where it is, too. All other functions first send
its values, so that all ranks go on with one result; they meet before. Where the weight is kept in parts, too, what goes
entry by entry, as averages do, stays in parts, and the others are refused.
See `lightning_par.pipeline.between_steps.remote_reads`.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import types
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_par.absent.elsewhere import Elsewhere, ElsewhereError, is_elsewhere
from lightning_par.absent.geometry import Geometry
from lightning_par.mesh.broadcast import kind_of, send_to_all
from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.pipeline.between_steps.remote_gradient import Gradient
from lightning_par.pipeline.between_steps.unlinked import unlinked
from lightning_par.pipeline.program.event_functions import is_metadata
from lightning_par.private.graph import in_backward
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.module_calls import METHODS
from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.functions import ASKS, COPIES, HOOKS, PRECISIONS, name_of
from lightning_par.sharded.rules.in_place import targets
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.rules.raw_memory import VIEWS, in_memory
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients

_AS_IT_IS = ASKS | HOOKS | {"backward", "__deepcopy__", "__reduce_ex__"}
_MAY_BE_SAME = PRECISIONS | {"contiguous"}
_OURS = (
    "lightning_par.",
    *("torch.optim.", "torch.nn.modules.module", "torch.serialization", "torch.distributed"),
    *("lightning.pytorch.strategies", "pytorch_lightning.strategies"),
    *("lightning.fabric.utilities.optimizer", "lightning_fabric.utilities.optimizer"),
)
_BETWEEN = (
    __name__,
    *(Elsewhere.__module__, "lightning_par.pipeline.between_steps.remote_gradient"),
    "lightning_par.pipeline.between_steps.optimizer_state",
    *("lightning_par.pipeline.run.located", "lightning_par.pipeline.between_steps.unit_by_unit"),  # a step's mode
    "lightning_par.pipeline.run.unit_calls",
    "lightning_par.sharded.patches.tensor_data",  # of ``x.data``, for whoever wrote that
)
_TRANSPARENT = ("torch", "copy", "collections")
# What reads for those who call it between steps.
_USERS = ("torch.optim.swa_utils", "lightning_par.sharded.patches.dummy_experiments")
# What torch does for a caller: a module's call, where it is no unit, as a copy of one is, and what is held.
_CALLS = {
    "torch.nn.modules.module": METHODS,
    "torch.optim.optimizer": frozenset(("state_dict", "<dictcomp>")),
}  # fmt: skip
_LOG = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")  # one rank alone will read what is logged


class Weight:
    """What the class of a spread parameter or buffer, or of a view or a copy of one, begins with.

    Attributes:
        _owner: carries it over the ranks.
        _plain: its class outside of the run.
    """

    _owner: ClassVar[JointGradients]
    _plain: ClassVar[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        known = name in _AS_IT_IS or is_metadata(func, getattr(func, "__name__", ""))
        known = known or name == "__format__" and bool(args[0].ndim)
        shows = not known and cls._owner.shows and not in_backward()
        user = user_of(sys._getframe(1)) if shows else None
        if user is None:
            if any(issubclass(kind, ShardedTensor) and not issubclass(kind, Weight) for kind in types):
                return NotImplemented  # which those answer, as where a layer adds this bias to what is split
            return _as_it_is(func, args, kwargs)
        if (name == "detach" or name in COPIES) and user not in _LOG or name == "data":
            return _stays(cls._owner, func, name, args, kwargs)
        return _run(cls._owner, func, name, args, kwargs)

    @property
    def data(self) -> Any:
        return self._plain.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if self._owner.shows and not in_backward() and user_of(sys._getframe(1)) is not None:
            self._owner.replicas.set_data(self, value)
        else:
            self._plain.data.__set__(self, value)

    def lend_data(self, x: Tensor) -> bool:
        """``x.data = self`` of a plain ``x``, by `lightning_par.sharded.patches.tensor_data`; whether that is done."""
        lends = self._owner.shows and not in_backward() and user_of(sys._getframe(3)) is not None
        if lends:
            self._owner.replicas.lend(x, self)
        return lends or (isinstance(self, Elsewhere) and Elsewhere.lend_data(self, x))

    def numpy(self, *, force: bool = False) -> Any:
        x: Any = self
        return torch.Tensor.numpy(x, force=force)

    def tolist(self) -> Any:
        x: Any = self
        return torch.Tensor.tolist(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        x: Any = self
        way, x.__class__ = x.__class__, x._plain  # for the copy it is a plain tensor
        try:
            new = copy.deepcopy(x, memo)
        finally:
            x.__class__ = way
        for name in ("_of", "_copied"):
            vars(new).pop(name, None)
        shows = self._owner.shows and user_of(sys._getframe(1)) is not None
        return self._owner.show(new, self._owner.name_of(self), copied=object()) if shows else new


class WeightView(Weight):
    """A spread buffer, or a view or a copy of a spread parameter or buffer.

    Attributes:
        _of: the name of the parameter or buffer.
        _copied: the same for copies that share memory; None where that is the parameter's or buffer's.
    """

    _of: str
    _copied: object | None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def copied(x: Any) -> object | None:
    """The same for all that has the memory of one copy; None where ``x`` has that of a parameter or buffer."""
    return x._copied if isinstance(x, WeightView) else None


def _plain(x: Any) -> Any:
    """The same memory in a tensor without ways of its own."""
    with DisableTorchFunctionSubclass():
        return x.detach()


def user_of(frame: types.FrameType | None) -> str | None:
    """The module whose code called a function, by itself or by torch's; None where that is not for user code."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        calls = frame.f_code.co_name in _CALLS.get(module, ())
        if module.startswith(_OURS) and module not in (*_BETWEEN, *_USERS) and not calls:
            return None
        if module not in _BETWEEN and module.partition(".")[0] not in _TRANSPARENT:
            return str(module)
        frame = frame.f_back
    return None


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("numpy", "tolist") and is_elsewhere(args[0]):
        return getattr(Elsewhere, name)(args[0])
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _stays(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A view or a copy, on the ranks of the weight; in no graph, which would hold the weight beyond the run."""
    x, links = args[0], name == "clone" and torch.is_grad_enabled() and args[0].requires_grad
    with torch.no_grad():
        result = _as_it_is(func, args, kwargs)
    return owner.show(
        _unlinked(result) if links else result, owner.name_of(x), object() if name in COPIES else copied(x)
    )


def _run(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in _MAY_BE_SAME and not _is_new(func, args, kwargs):
        return args[0]
    if RunState.current.shows_memory and not targets(func, args, kwargs):
        result = _alone(owner, func, name, args, kwargs)
        if result is not NotImplemented:
            return result
    if targets(func, args, kwargs):
        RunState.current.wrote()
        result = _write(owner, func, name, args, kwargs)
        owner.replicas.refresh()
        return result
    if name == "equal" and all(isinstance(x, Tensor) for x in args[:2]) and args[0].dtype == args[1].dtype:
        return _equal(owner, *args[:2])
    view = _viewed(owner, func, name, args, kwargs)
    return _read(owner, func, name, args, kwargs) if view is None else view


def _write(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Where what is written is; of weights that are not there, all ranks get the values first."""
    written = kwargs.get("out", next(iter((*args, *kwargs.values()))))
    many = isinstance(written, (list, tuple))
    weights = [x for x in tensors_in((args, kwargs)) if isinstance(x, Weight)]
    for x in written if many else [written]:
        owner.replicas.refuse_write(name, x)
    there = [_holders(owner, name, x, weights) for x in (written if many else [written])]

    def given(value: Any, *homes: set[int]) -> Any:
        if value is written:
            return value
        if many and isinstance(value, (list, tuple)) and len(value) == len(there):
            return [given(x, home) for x, home in zip(value, there, strict=True)]
        return present(owner, name, value, set().union(*homes))

    args = [given(value, *there) for value in args]
    kwargs = {key: given(value, *there) for key, value in kwargs.items()}
    if not is_elsewhere(written):
        return _as_it_is(func, args, kwargs)
    if name == "__setitem__":
        return None
    if "out" in kwargs and not any(map(is_elsewhere, tensors_in((args, {**kwargs, "out": None})))):
        # The generators of all ranks stay equal, should it draw.
        func(*args, **{**kwargs, "out": torch.empty(written.shape, dtype=written.dtype, device=written.device)})
        return written
    try:
        return _as_it_is(func, args, kwargs)
    except ElsewhereError:  # it goes by parts or by values of what is written, where that is
        return written


def present(owner: JointGradients, name: str, value: Any, ranks: set[int]) -> Any:
    """``value`` as a function needs it that writes on ``ranks``: these have the weights and gradients in it."""

    def there(x: Tensor) -> Tensor:
        if isinstance(x, Gradient):
            return x.beside(ranks)
        away = isinstance(x, Weight) and not ranks <= set(owner.holders_of(owner.name_of(x)))
        return sent(owner, name, x) if away else x

    return map_tensors(there, value)


def _holders(owner: JointGradients, name: str, written: Any, weights: list[Any]) -> set[int]:
    """The ranks that hold what ``name`` writes, of the ``weights``."""
    if isinstance(written, Weight):
        return {*owner.holders_of(owner.name_of(written))}
    known = owner.others.known(written)
    if known is not None:
        return {*known}
    if is_elsewhere(written) and any(owner.name_of(x) in owner.in_parts for x in weights):
        return {*written.origin.holders}  # those that hold parts write into theirs, and don't meet
    for x in weights:
        _refuse_parts(owner, name, owner.name_of(x))
    owner.meet(f"called `{name}` with weights of the model between two steps")
    return {*owner.others.ask(written)}


def _is_new(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether what ``func`` makes is another tensor than its argument, as ``x.to(y)`` is of another kind."""
    if name_of(func) == "contiguous":
        return not args[0].is_contiguous(*args[1:], **kwargs)
    like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return func(like, *args[1:], **kwargs) is not like


def _alone(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Once memory was asked for, each rank reads on its own: others may not come. `NotImplemented` where it can't."""
    with DisableTorchFunctionSubclass():
        result = in_memory(func, args, kwargs)
    tensors = tensors_in((args, kwargs))
    if result is not NotImplemented or any(is_elsewhere(x) for x in tensors):
        return result
    view = _viewed(owner, func, name, args, kwargs)
    if view is not None:
        return view
    result = _as_it_is(func, args, kwargs)
    links = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return map_tensors(_unlinked, result) if links else result


def _viewed(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A view of a weight, for which no rank needs values; None where ``func`` makes none, on any rank."""
    if name not in VIEWS or len(tensors_in((args, kwargs))) > 1 or not isinstance(args[0], Weight):
        return None
    base: Any = args[0]
    like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    views = func(like, *args[1:], **kwargs)
    if {memory_of(x) for x in tensors_in(views)} != {memory_of(like)}:
        return None
    if not is_elsewhere(base):
        return map_tensors(lambda x: owner.show(x, owner.name_of(base), copied(base)), _as_it_is(func, args, kwargs))
    return map_tensors(lambda x: _away(owner, x, base, _lies(x) == _lies(like)), views)


def _lies(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset()  # fake tensors know no `is_set_to`


def _away(owner: JointGradients, like: Tensor, base: Any, is_whole: bool) -> Any:
    """What stands here for a view of the kind of ``like`` of a weight that is elsewhere."""
    view = Elsewhere(like.shape, like.dtype, base.device, base.origin, stride=like.stride())
    view.is_whole = is_whole and base.is_whole
    return owner.show(view, owner.name_of(base), copied(base))


def _read(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of the values; where that is a view, it is one of the weight itself."""
    wholes: dict[int, Any] = {}  # weights and what was sent of them, by its memory

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, Weight):
            return x
        values = sent(owner, name, x)
        wholes[memory_of(values)] = x, values
        return values

    stays = _stays_in_parts(owner, func, args, kwargs)
    if stays is not None:
        return stays
    links = torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in((args, kwargs)))
    given = map_tensors(whole, (args, kwargs))
    result = func(*given[0], **given[1])
    if isinstance(result, np.ndarray):
        result.flags.writeable = False  # what is written into a copy would be lost
    strided = [x for x in tensors_in(result) if x.layout == torch.strided]
    memories = {memory_of(x) for x in strided}
    if len(memories) != 1 or not memories <= wholes.keys():  # no view, or views of several
        return map_tensors(_unlinked, result) if links else result
    base, values = wholes[memories.pop()]
    of = owner.name_of(base)
    if not is_elsewhere(base):
        return map_tensors(lambda x: owner.show(x, of, copied(base)), _as_it_is(func, args, kwargs))

    def away(x: Tensor) -> Tensor:
        return base if x is values else _away(owner, x, base, False)

    return map_tensors(away, result)


def _stays_in_parts(owner: JointGradients, func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of weights entry by entry is in parts where they are, as an average is: no rank needs values.
    None where it needs them, or can have them."""
    given = tensors_in((args, kwargs))
    weights = [x for x in given if isinstance(x, Weight)]
    if not weights or not all(is_elsewhere(x) and owner.name_of(x) in owner.in_parts for x in weights):
        return None
    if any(isinstance(x, ShardedTensor) for x in given):  # a part that is here, beside one that is not
        return None
    try:
        with torch.no_grad():
            result = _as_it_is(func, args, kwargs)
    except ElsewhereError:
        return None
    origins = {id(vars(x)["_facts"]): copied(x) for x in weights}
    of = owner.name_of(weights[0])

    def shown(x: Tensor) -> Tensor:
        return owner.show(x, of, origins.get(id(x.origin), object())) if isinstance(x, Elsewhere) else x

    return map_tensors(shown, result)


def _unlinked(x: Tensor) -> Tensor:
    return unlinked(x, "is made of a pipeline's weights between two steps")


def sent(owner: JointGradients, name: str, x: Any) -> Tensor:
    """The values of ``x`` for the function ``name``, in memory of their own. All ranks must call it."""
    of = owner.name_of(x)
    _refuse_parts(owner, name, of)
    owner.meet(f"called `{name}` on the weight {of!r} between two steps")
    here = None if is_elsewhere(x) else _plain(x)
    values = send_to_all(here, kind_of(x), owner.sources[of], owner.axis, "weights")
    return _laid_as(x, values.to(x.device, copy=here is not None))


def _laid_as(x: Any, values: Tensor) -> Tensor:
    """``values`` in memory where they lie as those of ``x`` do: what is a view of it, and what a copy, goes by that."""
    stride = x.stride()
    if values.stride() == stride or not Geometry(tuple(x.shape), stride, 0, x.dtype).apart:
        return values
    once = values[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    return torch.empty_strided(once.shape, stride, dtype=x.dtype, device=x.device).copy_(once).expand(x.shape)


def _refuse_parts(owner: JointGradients, name: str, of: str) -> None:
    """Those that hold parts of a weight go on with these, and won't meet: on them it is no `Weight`.

    Raises:
        NotImplementedError: each rank that holds it has a part of it.
    """
    over = owner.in_parts.get(of)
    if over is not None:
        raise NotImplementedError(
            f"{user_line()}: `{name}` needs the values of the weight {of!r} between two steps. They are on another "
            f"stage of the pipeline, and split there over the {over} axis: no rank has them to send. Use them "
            "within the step, write into the weight in place, as `p.data.mul_(0.9)` does, or train by a pipeline "
            "without that axis."
        )


def _equal(owner: JointGradients, a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, by hashes of what is compared."""
    if a.shape != b.shape or a is b:
        return a.shape == b.shape
    for x in (a, b):
        if isinstance(x, Weight):
            _refuse_parts(owner, "equal", owner.name_of(x))
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
    return hashlib.blake2b(raw_bytes(plain.contiguous()).numpy().tobytes()).digest()
