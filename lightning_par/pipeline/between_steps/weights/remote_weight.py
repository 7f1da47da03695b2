"""A weight or buffer that lives on some ranks of a pipeline, as user code between two steps sees it on every rank.

What functions of it do is said in `lightning_par.pipeline.between_steps.weights.weight_functions`, and who knows of all
weights in `lightning_par.pipeline.between_steps.remote_reads`.
"""

from __future__ import annotations

import copy
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_par.absent.elsewhere import Elsewhere, is_elsewhere
from lightning_par.pipeline.between_steps.caller import user_of
from lightning_par.pipeline.program.event_functions import is_metadata
from lightning_par.private.graph import in_backward
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import ASKS, HOOKS, name_of
from lightning_par.sharded.rules.alias import Alias
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.user_classes import KeepsClass, set_class
from lightning_par.sharded.wrapped_tensors import is_wrapped

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients

_AS_IT_IS = ASKS | HOOKS | {"backward", "__deepcopy__", "__reduce_ex__"}


class Weight(KeepsClass):
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
        if name == "backward" and kwargs.get("inputs") is not None:
            ends = [_end(x) for x in kwargs["inputs"]]
            if any(isinstance(x, GradientEdge) for x in ends):
                return func(*args, **{**kwargs, "inputs": ends})
        user = user_who_asks(cls._owner, func, name, args, sys._getframe(1))
        if user is None:
            split = any(issubclass(kind, ShardedTensor) and not issubclass(kind, Weight) for kind in types)
            if split or is_wrapped(types):
                return NotImplemented  # which those answer, as where a layer adds this bias to what is split
            return as_it_is(func, args, kwargs)
        return cls._owner.run(user, func, name, args, kwargs)

    def _recast(self, kind: type) -> None:
        self._owner.recast(self, kind)

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
        way = type(x)
        set_class(x, x._plain)  # for the copy it is a plain tensor
        try:
            new = copy.deepcopy(x, memo)
        finally:
            set_class(x, way)
        for name in ("_of", "_copied"):
            vars(new).pop(name, None)
        shows = self._owner.shows and user_of(sys._getframe(1)) is not None
        return self._owner.show(new, self._owner.name_of(self), copied=object()) if shows else new


def user_who_asks(owner: JointGradients, func: Any, name: str, args: Any, frame: FrameType) -> str | None:
    """The user's module that calls ``func`` for the values of weights; None where ranks go by what they have."""
    known = name in _AS_IT_IS or is_metadata(func, getattr(func, "__name__", ""))
    known = known or name == "__format__" and bool(args[0].ndim)
    return user_of(frame) if not known and owner.shows and not in_backward() else None


class WeightParameter(Weight):
    """What the class of a spread parameter begins with while user code may read it and its gradient."""

    def gradient_edge(self) -> Any:
        """Where its gradient arrives in the graph that all ranks have."""
        return self._owner.ends.edge(self)

    @property
    def grad(self) -> Tensor | None:
        return self._owner.read(_tensor(self), sys._getframe(1))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._owner.write(_tensor(self), value, sys._getframe(1))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class WeightView(Weight):
    """A spread buffer, or a view or a copy of a spread parameter or buffer.

    Attributes:
        _of: the name of the parameter or buffer.
        _copied: the same for copies that share memory; None where that is the parameter's or buffer's.
        _links: there where on one device a node of autograd's graph has made it.
        _way: the function by which it was made of another one, its arguments, and which of its results it is.
        _read_alone: there where ranks without the weight have a plain tensor of its values in its place.
    """

    _of: str
    _copied: object | None
    _links: bool
    _way: tuple[Any, Any, Any, int] | None
    _read_alone: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def _end(x: Any) -> Any:
    return x.gradient_edge() if isinstance(x, WeightParameter) else x


def _tensor(parameter: Any) -> Tensor:
    assert isinstance(parameter, Tensor)
    return parameter


def copied(x: Any) -> object | None:
    """The same for all that has the memory of one copy; None where ``x`` has that of a parameter or buffer."""
    return vars(x).get("_copied")


def plain(x: Any) -> Any:
    """The same memory in a tensor without ways of its own."""
    with DisableTorchFunctionSubclass():
        return x.detach()


def as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on what this rank has of a weight: its memory, a part of it, or what stands for it."""
    lender = RunState.current.lender
    if lender is not None and any(isinstance(x, ShardedTensor | Alias) for x in tensors_in((args, kwargs))):
        with lender.unseen():
            return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name in ("numpy", "tolist") and is_elsewhere(args[0]):
        return getattr(Elsewhere, name)(args[0])
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
