"""Calls of functions on sharded tensors that come again, as in each layer of each step.

Which plain functions a rule runs on parts follows from what a call's key holds: the function, its settings, and of its
tensors shapes, strides, dtypes, positions, and what autograd and autocast do. So the second such call is noted, and
from the third on what was noted runs: no rule, no check, no arithmetic of positions. What is unclear stays with its
rule. The calls hang on the mesh axis, and end with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_par.mesh.listener import thread
from lightning_par.private import attention_kernels
from lightning_par.private.modes import is_any_autocast, number_of_modes
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.aliases import Memory, is_among
from lightning_par.sharded.functions import BY_ENTRY, MATRIX_PRODUCTS, PRECISIONS, REGROUPS, SLICES, TURNS, writes
from lightning_par.sharded.local_calls.form import PLAIN, form_of
from lightning_par.sharded.local_calls.program import program
from lightning_par.sharded.local_calls.tape import Tape, UnclearError
from lightning_par.sharded.rules.in_place import place_of_inplace
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.memo import Memo

Program = Callable[..., Any]
_FUNCTIONS = (
    BY_ENTRY | MATRIX_PRODUCTS | PRECISIONS | REGROUPS | SLICES | TURNS
    | {"softmax", "log_softmax", "layer_norm", "rms_norm", "scaled_dot_product_attention", "dropout", "contiguous"}
    | {"sum", "mean"}
)  # fmt: skip
_SETTINGS = frozenset((float, bool, str, type(None), torch.dtype, torch.device, torch.Size))


def _place_of_inplace(func: Any) -> int | None:
    """Which argument of ``func`` tells it to write, many where none does; None where it may not repeat."""
    name = getattr(func, "__name__", "")
    if name not in _FUNCTIONS or writes(name):
        return None
    place = place_of_inplace(func)
    return _MANY if place is None else place


_MANY = 1 << 30
_repeat: Memo[Any, int | None] = Memo(_place_of_inplace)
_may_cast: Memo[str, bool] = Memo(torch.amp.is_autocast_available)  # not on "meta", where shapes alone are tried


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

    def add(self, xs: Iterable[Any]) -> bool:
        """Whether the table may know calls that have ``xs``."""
        # It runs for each call of a step: in one piece, and the likely kinds first.
        key, tensors = self.key, self.tensors
        for x in xs:
            kind = type(x)
            if kind is ShardedTensor:
                local, form, axis = x._local, form_of(x), x._axis
                if form is None or axis is not self.axis and not self._lies_along(axis):
                    return False
                key.append(form)
            elif kind is int:
                key.append(x)
                continue
            elif kind in PLAIN:
                local = x
                key += (kind, x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf)
            else:
                if kind in _SETTINGS:  # with the kind: True equals 1
                    key += kind, x or repr(x)  # 0.0 equals -0.0
                elif not self._add_parts(kind, x):
                    return False
                continue
            for known in tensors:
                if known is local:  # a rule may go by that
                    key += "again", [other is local for other in tensors].index(True)
            tensors.append(local)
        return True

    def _add_parts(self, kind: type, x: Any) -> bool:
        self.key.append(kind)
        if kind is tuple or kind is list:
            self.key.append(len(x))
            return self.add(x)
        return x is Ellipsis or kind is slice and self.add((x.start, x.stop, x.step))

    def _lies_along(self, axis: Any) -> bool:
        """Whether the call may have a tensor that is sharded over ``axis``, which no other of it is so far."""
        if self.axis is not None or axis.stores or axis.by_sample or axis.pretends or axis.residual is not None:
            return False
        self.axis = axis
        return True

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
        tape, before = Tape(dict(zip(names, self.tensors, strict=True))), Memory.made_ever
        with tape:
            result = by_rule(func, args, kwargs)
        given, copies = (*args, *kwargs.values()), Memory.made_ever != before
        if result is NotImplemented or tape.unclear or copies or any(result is x for x in given):
            return result, None
        try:
            return result, program(names, tape.items, tape.described(result))
        except UnclearError:
            return result, None


def is_unwatched() -> bool:
    """Whether nothing but rules looks at the functions that are called."""
    state = RunState.current
    watched = state.names.on or state.shows_memory or thread.listener is not None
    return not (watched or number_of_modes() or in_functorch())


def surroundings(x: Tensor) -> tuple[Any, ...]:
    """What a rule may go by besides its arguments, of which ``x`` is one."""
    cast = None
    if is_any_autocast():
        kind = x.device.type
        cast = torch.get_autocast_dtype(kind) if _may_cast[kind] and torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, RunState.current.shared


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call as the table knows it; None where something else looks at it, or may."""
    place, state = _repeat[func], RunState.current
    if place is None or (
        # as `is_unwatched`, without a call: it is asked for each function of a step
        state.names.on or state.shows_memory or thread.listener or number_of_modes() or in_functorch()
    ):
        return None
    if len(args) > place and args[place] or kwargs and ("out" in kwargs or kwargs.get("inplace")):
        return None
    call = Call(func)
    if not call.add(args):
        return None
    if kwargs:
        call.key += kwargs
        if not call.add(kwargs.values()):
            return None
    if call.axis is None or Memory.count and is_among(call.tensors):
        return None
    call.key += surroundings(call.tensors[0])
    if func is scaled_dot_product_attention:
        call.key += attention_kernels.allowed()
    return call
