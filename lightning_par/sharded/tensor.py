"""The sharded tensor: to the user's code it has the full shape, in memory it is this rank's part.

A `ShardedTensor` wraps a plain local tensor, the sharded dim, its `Positions` and the mesh `Axis`. Functions with a
rule (`lightning_par.sharded.rules`) run on the local tensor; every other function gathers, runs, and is reported once
by name and line. Autograd runs on the plain local tensors.

It serves as activation and as parameter. As a parameter it stands where the module's own parameter stood, and its
``local`` is the leaf that holds the gradient. (DTensor was turned down for both: it shards a dim in even chunks only,
so neither uneven heads nor the chunks of a fused projection can be said in it, and a model that mixes DTensors and
plain tensors breaks clipping, the gradient scaler and foreach optimizers.)
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.modes import DisableTorchFunction, innermost_mode
from lightning_par.private.storage import storage_of
from lightning_par.private.tensors import get_data, is_marked, make_wrapper_subclass, mark_parameter, set_data
from lightning_par.sharded import aliases
from lightning_par.sharded.local_autograd import LocalAutograd
from lightning_par.sharded.parts import note_part
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.user_classes import KeepsClass, of_users_class, put_on, users_class
from lightning_par.sharded.wrapped_tensors import is_wrapped

_dispatch: Callable[..., Any] | None = None


def _load_rules() -> Callable[..., Any]:
    """The table of rules, which itself needs this module."""
    global _dispatch
    if _dispatch is None:
        from lightning_par.sharded.rules import dispatch

        _dispatch = dispatch
    return _dispatch


class OutOfSightError(TypeError):
    """A sharded tensor went where no rule, and no gather, can be put before what is done with it."""


class ShardedTensor(KeepsClass, LocalAutograd):
    """A tensor of which every rank along ``axis`` holds the ``positions`` of dim ``dim``.

    Args:
        local: this rank's part, plain; its shape is the full one except for ``dim``.
        dim: the sharded dim, from 0.
        positions: who holds which index of the dim.
        axis: the mesh axis.

    Example::

        axis = Axis("tensor", ranks=(0,), rank=0, group=None)
        x = ShardedTensor(torch.ones(3, 4), 1, Positions.of([0, 0, 0, 0]), axis)
        assert x.shape == (3, 4) and torch.equal((x + 1).full_tensor(), torch.full((3, 4), 2.0))
    """

    _local: Tensor
    _dim: int
    _positions: Positions
    _axis: Axis
    _name: str = ""  # see `lightning_par.sharded.tensor_names`
    _strides: Any = None  # on one device, or what tells them, where the part's don't
    _form: Any = None  # see `lightning_par.sharded.local_calls.form`
    _users_class: Any = None  # see `lightning_par.sharded.user_classes`

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, positions: Positions, axis: Axis) -> ShardedTensor:
        with DisableTorchFunction():  # nor do modes look: it is made often
            shape = list(local.shape)
            shape[dim] = positions.size
            self = make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
            is_leaf = local.requires_grad and local.is_leaf
        self._local, self._dim, self._positions, self._axis = local, dim, positions, axis
        names = RunState.current.names
        if names.on:
            self._name = names.current
        if is_leaf:
            note_part(local, axis)
        return self

    def _recast(self, kind: type) -> None:
        put_on(self, kind)

    def __getattr__(self, name: str) -> Any:
        return of_users_class(self, name)

    @property
    def local(self) -> Tensor:
        """This rank's part, a plain tensor."""
        return self._local

    @property
    def _innermost(self) -> Tensor:
        """The plain tensor that holds this rank's part; its part, where it is sharded over two axes."""
        return aliases.innermost(self._local)  # type: ignore[no-any-return]

    @property
    def sharded_dim(self) -> int:
        return self._dim

    @property
    def positions(self) -> Positions:
        return self._positions

    @property
    def axis(self) -> Axis:
        return self._axis

    @property
    def used_sharding(self) -> tuple[int, Positions, Axis] | None:
        """Dim, positions and axis of the shards that a step computes with; None where that is the whole."""
        return self._dim, self._positions, self._axis

    def as_used_gradient(self, part: Tensor) -> Tensor:
        """Of ``part``, this rank's of a parameter's gradient, the plain shard of `used_sharding`; all ranks that use
        the same must call it."""
        return part

    def with_local(self, local: Tensor) -> ShardedTensor:
        """The same sharding of another local tensor of the same shape."""
        x = ShardedTensor(local, self._dim, self._positions, self._axis)
        x._strides = self._strides
        return x

    def twin(self, local: Tensor | None = None) -> ShardedTensor:
        """Another object of the same, or of its part ``local``: what this one becomes later does not matter to it."""
        return self.with_local(self._local if local is None else local)

    def as_gathered(self) -> Tensor:
        """The whole tensor as functions use it, whatever it shares memory with."""
        return aliases.gathered(self)  # type: ignore[no-any-return]

    def own_part(self, whole: Tensor) -> Tensor:
        """What of ``whole``, as functions use it, this rank holds."""
        return self.part_of(whole)

    def full_tensor(self, purpose: str = "gather") -> Tensor:
        """The whole tensor, plain, on every rank along the axis. All of them must call it."""
        self._about_to_gather()
        return collectives.gather(self._local, self._dim, self._positions, self._axis, purpose)

    def kept_whole(self, purpose: str, to_cpu: bool = False) -> Tensor:
        """`full_tensor`, to be held by every rank along the axis from now on, on its device or the CPU."""
        if isinstance(self._local, ShardedTensor):
            return self.full_tensor(purpose)
        self._about_to_gather()
        return RunState.current.gathered(self._local, self._dim, self._positions, self._axis, purpose, to_cpu)

    def _about_to_gather(self) -> None:
        self._axis.about_to_gather("full_tensor", self)
        names = RunState.current.names
        if names.on:
            names.current = self._name or names.current
        if aliases.is_any():
            aliases.settle(self._innermost, "full_tensor")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_wrapped(types):
            return NotImplemented  # as a plain tensor, which torch does not ask
        lender = RunState.current.lender
        if lender is not None:  # between two steps of a pipeline
            result = lender.lent(func, args, kwargs or {}, sys._getframe(1))
            if result is not NotImplemented:
                return result
        return (_dispatch or _load_rules())(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        from lightning_par.sharded.rules.gather_report import user_line

        raise OutOfSightError(
            f"{func} at {user_line()} met a sharded tensor below the level of torch functions, where it can't be "
            "followed, as in nested tensors or under DisableTorchFunctionSubclass. Write it with plain functions of "
            "tensors, or make it whole first: `x = x.full_tensor() if hasattr(x, 'full_tensor') else x`."
        )

    def _own_part(self, value: Tensor) -> tuple[Tensor, bool]:
        """The part of ``value`` in memory that is sharded as it is; whether that is its own."""
        part = self.part_of(value).detach()
        shares = storage_of(aliases.innermost(part)) is storage_of(aliases.innermost(value))
        alone = shares and not isinstance(value, ShardedTensor)
        return (part.clone() if alone else part), shares and not alone

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        if has_torch_function_unary(self):  # what follows the step follows this, too, as of a plain tensor
            return handle_torch_function(get_data, (self,), self)  # type: ignore[no-any-return]
        return self.own_data()

    @data.setter
    def data(self, value: Tensor) -> None:
        if innermost_mode() is not None:
            handle_torch_function(set_data, (self, value), self, value)
        else:
            with RunState.current.writes_once():
                self.set_own_data(value)

    def set_own_data(self, value: Tensor) -> None:
        """``data = value``, told to no mode."""
        lender = RunState.current.lender
        if lender is not None and lender.set_data(self, value, sys._getframe(1)):
            return
        with DisableTorchFunction():
            self._local.data, shares = self._own_part(value)
            if type(self) is ShardedTensor:  # of another dtype, say, as after `module.double()`
                set_data(self, self.with_local(self._local))
        self._form = None
        if not shares:
            aliases.link(self, value)

    def own_data(self) -> ShardedTensor:
        """What ``data`` is, told to nobody."""
        return self.with_local(self._local.data)

    def part_of(self, value: Tensor) -> Tensor:
        """This rank's part of ``value``, sharded as this tensor is; ``value`` is replicated or sharded alike."""
        if isinstance(value, ShardedTensor):
            if value._dim == self._dim and value._positions is self._positions:
                return value._local
            value = value.full_tensor()
        return collectives.scatter(value, self._dim, self._positions, self._axis)

    def part_of_gradient(self, share: Tensor, axes: Iterable[Axis]) -> Tensor:
        """This rank's part of its gradient, of which each rank has the ``share``, whole but for a sum over ``axes``."""
        return self.part_of(functools.reduce(collectives.leave, axes, share))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        import copy

        if id(self) not in memo:
            copied = self.with_local(copy.deepcopy(self._local, memo))
            if is_marked(self):
                mark_parameter(copied)
                put_on(copied, users_class(self))
            note_copy(self, copied, sys._getframe(1))
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        asked = RunState.current.memory_of(self)
        if asked is not None:
            return asked.reduced(self, protocol)
        raise TypeError(
            f"This rank holds only its part of a tensor of shape {tuple(self.shape)}, so it can't be pickled. Save "
            "with `trainer.save_checkpoint(path)`, or call `.full_tensor()` on all ranks first."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dim={self._dim}, axis={self._axis.name!r}, "
            f"rank {self._axis.rank} of {self._axis.size} holds {tuple(self._local.shape)}, dtype={self.dtype})"
        )


def note_copy(x: Tensor, copied: Tensor, frame: types.FrameType) -> None:
    """The code of ``frame`` has made a deep copy of ``x``: to it that is on the stages of a pipeline where ``x`` is."""
    lender = RunState.current.lender
    if lender is not None:
        lender.note_copy(x, copied, frame)


def leaf(param: Tensor) -> Tensor:
    """The plain leaf that holds a parameter's gradient on this rank: its local part where it is sharded."""
    return param._local if isinstance(param, ShardedTensor) else param


def leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The `leaf` of each; where none is sharded, in C alone, as it is asked of all weights in every step."""
    those = [*parameters]
    return [*map(leaf, those)] if any(map(isinstance, those, repeat(ShardedTensor))) else those


def full(value: Tensor) -> Tensor:
    """The whole tensor, plain; all ranks along its axis must call it."""
    while isinstance(value, ShardedTensor):  # it may be sharded over two axes
        value = value.full_tensor()
    return value


def remembered(x: Any) -> tuple[int, ...] | None:
    """The strides that ``x`` remembers to have on one device, worked out; None where its part tells them."""
    known = getattr(x, "_strides", None)
    if callable(known):
        known = x._strides = known()
    return known  # type: ignore[no-any-return]


def moves(x: ShardedTensor) -> bool:
    """Whether making ``x`` whole takes communication."""
    return type(x) is ShardedTensor
