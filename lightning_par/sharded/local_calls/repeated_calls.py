"""Calls of functions on sharded tensors that come again, as in each layer of each step.

Which plain functions a rule runs on parts follows from what a call's key holds: the function, its settings, and of its
tensors shapes, strides, dtypes, positions, and what autograd and autocast do. So the second such call is noted, and
from the third on what was noted runs: no rule, no check, no arithmetic of positions. What is unclear stays with its
rule. The calls hang on the mesh axis, and end with the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_par.mesh.listener import thread
from lightning_par.private.modes import is_any_mode
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.aliases import Memory
from lightning_par.sharded.functions import BY_ENTRY, MATRIX_PRODUCTS, PRECISIONS, REGROUPS, SLICES, TURNS, writes
from lightning_par.sharded.local_calls.program import program
from lightning_par.sharded.local_calls.tape import Tape, UnclearError
from lightning_par.sharded.rules.in_place import is_told_to
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, remembered
from lightning_par.trial.memo import Memo

Program = Callable[..., Any]
_FUNCTIONS = (
    BY_ENTRY | MATRIX_PRODUCTS | PRECISIONS | REGROUPS | SLICES | TURNS
    | {"softmax", "log_softmax", "layer_norm", "rms_norm", "scaled_dot_product_attention", "dropout", "contiguous"}
    | {"sum", "mean"}
)  # fmt: skip
_SETTINGS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


def _may_repeat(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _FUNCTIONS and not writes(name)


_repeat: Memo[Any, bool] = Memo(_may_repeat)


class Call:
    """One call as the table knows it.

    Attributes:
        key: alike for two calls that come to the same.
        axis: over which its tensors are sharded.
        tensors: the plain ones that it has, and the parts of the sharded ones.
    """

    __slots__ = ("key", "axis", "tensors")

    def __init__(self, func: Any) -> None:
        self.key: list[Any] = [func]
        self.axis: Any = None
        self.tensors: list[Tensor] = []

    def add(self, x: Any) -> bool:
        """Whether the table may know calls that have ``x``."""
        kind = type(x)
        if kind is ShardedTensor:
            return self._add_sharded(x)
        if kind is Tensor or kind is Parameter:
            self._add_plain(x, (x.requires_grad, x.is_leaf, kind))
            return True
        if kind in _SETTINGS:
            self.key += kind, x or repr(x)  # 0.0 equals -0.0
            return True
        if kind is slice:
            self.key.append(slice)
            return self.add(x.start) and self.add(x.stop) and self.add(x.step)
        if kind is tuple or kind is list:
            self.key += kind, len(x)
            return all(map(self.add, x))
        if x is Ellipsis:
            self.key.append(x)
            return True
        return False

    def _add_sharded(self, x: ShardedTensor) -> bool:
        local, axis = x._local, x._axis
        kind = type(local)
        if kind is not Tensor and kind is not Parameter:
            return False
        if axis is not self.axis:
            if self.axis is not None or axis.stores or axis.by_sample or axis.pretends or axis.residual is not None:
                return False
            self.axis = axis
        strides = x._strides
        if strides is not None and type(strides) is not tuple:
            strides = remembered(x)
        self._add_plain(local, (local.requires_grad, local.is_leaf, x._dim, x._positions, strides))
        return True

    def _add_plain(self, x: Tensor, facts: Any) -> None:
        self.key += x.shape, x.stride(), x.dtype, x.device, facts
        for number, known in enumerate(self.tensors):
            if known is x:  # a rule may go by that
                self.key += "again", number
        self.tensors.append(x)

    def run(self, func: Any, args: Any, kwargs: Any, by_rule: Callable[..., Any]) -> Any:
        """What ``by_rule``, which runs the function by its rule, gives; `NotImplemented` included."""
        key, calls = tuple(self.key), self.axis.calls
        known: Program | bool | None = calls.get(key, False)
        if known is None or known is False:
            if known is False:  # what comes once, as an index that moves on, is not worth noting
                calls[key] = True
            return by_rule(func, args, kwargs)
        if known is True:
            result, calls[key] = self._noted(func, args, kwargs, by_rule)
            return result
        return known(*self.tensors)  # type: ignore[operator]

    def _noted(self, func: Any, args: Any, kwargs: Any, by_rule: Any) -> tuple[Any, Program | None]:
        """Its result, and what does it again."""
        names = [f"a{number}" for number in range(len(self.tensors))]
        tape = Tape(dict(zip(names, self.tensors, strict=True)))
        with tape:
            result = by_rule(func, args, kwargs)
        given = (*args, *kwargs.values())
        if result is NotImplemented or tape.unclear or Memory.count or any(result is x for x in given):
            return result, None
        try:
            return result, program(names, tape.items, tape.described(result))
        except UnclearError:
            return result, None


def is_unwatched() -> bool:
    """Whether nothing but rules looks at the functions that are called."""
    state = RunState.current
    watched = state.names.on or state.shows_memory or Memory.count or thread.listener is not None
    return not (watched or is_any_mode() or in_functorch())


def surroundings(x: Tensor) -> tuple[Any, ...]:
    """What a rule may go by besides its arguments, of which ``x`` is one."""
    kind = x.device.type
    may_cast = torch.amp.is_autocast_available(kind)  # not on "meta", where shapes alone are tried
    cast = torch.get_autocast_dtype(kind) if may_cast and torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, RunState.current.shared


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call as the table knows it; None where something else looks at it, or may."""
    if not _repeat[func] or "out" in kwargs or is_told_to(func, args, kwargs) or not is_unwatched():
        return None
    call = Call(func)
    for x in args:
        if not call.add(x):
            return None
    for name, x in kwargs.items():
        call.key.append(name)
        if not call.add(x):
            return None
    if call.axis is None:
        return None
    call.key += surroundings(call.tensors[0])
    return call
