"""Looking up the rule of a torch function, and gathering where there is none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.tensors import view_base
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded import aliases
from lightning_par.sharded.aliases import Memory
from lightning_par.sharded.functions import ARRAYS, MEMORY_KINDS, METADATA, sets_data
from lightning_par.sharded.functions import writes as writes
from lightning_par.sharded.local_calls import form, repeated_calls
from lightning_par.sharded.packed_parameters import has_own_functions
from lightning_par.sharded.rules import raw_memory, several_axes, stored_weights
from lightning_par.sharded.rules.alias import kept, read_only, shown
from lightning_par.sharded.rules.gather_report import on_gather as on_gather
from lightning_par.sharded.rules.gather_report import user_line as user_line
from lightning_par.sharded.rules.gathered import announce_gather as announce_gather
from lightning_par.sharded.rules.gathered import run_in_transform
from lightning_par.sharded.rules.gathered import run_whole as run_whole
from lightning_par.sharded.rules.gathered import sharded_again as sharded_again
from lightning_par.sharded.rules.several_axes import Mix
from lightning_par.sharded.rules.stored_weights import Gathering
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, moves
from lightning_par.sharded.tensor_names import TensorNames
from lightning_par.trial.memo import Memo

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}

# Names that torch knows for one parameter, and the rules' name for it.
_ALIASES = {
    "axis": "dim", "keepdims": "keepdim", "other": "b", "mat2": "b", "vec": "b", "split_size_or_sections": "split_size",
    "split_sizes": "split_size", "indices_or_sections": "chunks", "sections": "chunks", "tensor": "b", "axis0": "dim0",
    "axis1": "dim1",
}  # fmt: skip


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the torch functions and methods of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` by its rule, or on gathered arguments."""
    found = _rules[func]
    if found is _metadata or found is _data or found is _set_data:
        return found(func, *args, **kwargs)
    call = None if found is _array else repeated_calls.call_of(func, args, kwargs)
    if call is not None:  # nothing of what follows looks at it
        result = call.run(func, args, kwargs, on_parts)
        if result is NotImplemented:
            result = run_whole(func, args, kwargs)
        return shown(result, {}) if Memory.count else result
    if found is _memory and (memory := _memory(func, *args)) is not NotImplemented:
        return memory
    if _writers[func] or "out" in kwargs:
        form.forget(args, kwargs)
    if _writers[func]:
        aliases.count_write(args)
        RunState.current.wrote()
    names = RunState.current.names
    result = _named(names, func, args, kwargs) if names.on else _shared(func, args, kwargs)
    return _of_parts(result, args) if found is _array else result


def _named(names: TensorNames, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `dispatch`, where tensors are named: what is made of a weight has its name."""
    before = names.current
    names.current = names.name_among((*args, *kwargs.values())) or before
    try:
        return _shared(func, args, kwargs)
    finally:
        names.current = before


def _shared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `dispatch`; what shares memory on one device is the same before and after it."""
    if Memory.count:
        return kept(_dispatched, func, args, kwargs)
    result = _dispatched(func, args, kwargs)
    return shown(result, {}) if Memory.count else result


def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if RunState.current.shows_memory:
        result = raw_memory.in_memory(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if Gathering.count and not in_functorch():  # first: whole, it may still be split over the tensor axis
        return stored_weights.run(func, args, kwargs, _by_axes)
    return _by_axes(func, args, kwargs)


def _by_axes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if Mix.count and several_axes.needed(args, kwargs):
        return several_axes.by_axis(func, args, kwargs)
    return by_rule(func, args, kwargs)


def by_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `dispatch`, where the arguments are sharded over one axis alone."""
    if _rules[func] is not _metadata and in_functorch():
        return run_in_transform(func, args, kwargs)
    result = on_parts(func, args, kwargs)
    return run_whole(func, args, kwargs) if result is NotImplemented else result


def on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` by its rule; `NotImplemented` where there is none for these arguments."""
    found = _rules[func]
    if found is None or found is not _metadata and any(map(has_own_functions, (*args, *kwargs.values()))):
        return NotImplemented
    state = RunState.current
    caller, state.running = state.running, func  # a rule may call functions that have rules of their own
    try:
        return found(func, *args, **kwargs) if not kwargs else _with_keywords(found, func, args, kwargs)
    finally:
        state.running = caller


def _with_keywords(found: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a rule whose parameters may have other names than torch's."""
    names, takes_all = _keywords[found]
    if not args and "condition" not in kwargs:
        first = next((name for name in ("input", "tensor", "tensors") if name in kwargs and name not in names), None)
        if first is not None:
            args = (kwargs[first],)
            kwargs = {name: value for name, value in kwargs.items() if name != first}
    if takes_all:
        kwargs = {_ALIASES[name] if name in ("axis", "keepdims") else name: x for name, x in kwargs.items()}
    else:
        kwargs = {name if name in names else _ALIASES.get(name, name): x for name, x in kwargs.items()}
        if not kwargs.keys() <= names:
            return NotImplemented
    return found(func, *args, **kwargs)


def _parameters_of(found: Rule) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(found).parameters.values()
    return frozenset(p.name for p in parameters), any(p.kind is p.VAR_KEYWORD for p in parameters)


def _resolve(func: Any) -> Rule | None:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _attribute(getattr(func.__self__, "__name__", ""))
    if sets_data(func):
        return _set_data
    module = getattr(func, "__module__", None) or ""
    # torch.fft and torch.special reuse names for other functions; torch.nn.init draws what one device would.
    if module.startswith(("torch.fft", "torch.special", "torch.nn.init")):
        return None
    return RULES.get(name)


_rules: Memo[Any, Rule | None] = Memo(_resolve)
_writers: Memo[Any, bool] = Memo(lambda func: writes(getattr(func, "__name__", "")))  # whether it writes in place
_keywords = Memo(_parameters_of)  # a rule's parameters, and whether it takes any others


def _attribute(name: str) -> Rule:
    if name in ("T", "mT", "H", "mH"):
        return lambda func, x: _turned(name, x)
    if name == "_base":
        return lambda func, x: view_base(x._local)
    if name in ("real", "imag"):
        return lambda func, x: x.with_local(getattr(x._local, name))
    if name == "data":
        return _data
    return _metadata


def _turned(name: str, x: ShardedTensor) -> Any:
    if name in ("H", "mH") and x.is_complex():
        return NotImplemented
    if name in ("mT", "mH"):
        return x.transpose(-2, -1)
    return x.permute(*reversed(range(x.ndim)))


@rule("is_contiguous", *MEMORY_KINDS)
def of_local_part(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> bool:
    """Whether the local part is: `view` goes by that, and a copy to another device."""
    result: bool = func(x._local, *args, **kwargs)
    return result


@rule(*METADATA, "stride", "storage_offset")
def _metadata(func: Any, *args: Any, **kwargs: Any) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _data(func: Any, x: ShardedTensor) -> ShardedTensor:
    return x.own_data()


def _set_data(func: Any, x: Tensor, value: Tensor) -> Any:
    if not isinstance(x, ShardedTensor):  # whose memory is the whole of what is sharded
        return NotImplemented
    x.set_own_data(value)
    return None


@rule(*raw_memory.ASKS)
def _memory(func: Any, x: ShardedTensor) -> Any:
    return raw_memory.memory_asked_for(func, x)


@rule(*ARRAYS)
def _array(func: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _of_parts(array: Any, args: tuple[Any, ...]) -> Any:
    """An ``array`` of a weight that is in parts is of a copy."""
    of_weight = isinstance(array, np.ndarray) and isinstance(args[0], Tensor) and RunState.current.is_of_weight(args[0])
    return read_only(array) if of_weight else array


@rule("is_same_size")
def is_same_size(func: Any, x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape


def gathered(x: ShardedTensor) -> Tensor:
    """All of ``x`` for the rule that runs, reported as a gather unless it is there already."""
    if moves(x):
        running = RunState.current.running
        x._axis.about_to_gather(running, x)
        on_gather(running, [x])
    return collectives.gather(x._local, x._dim, x._positions, x._axis) if moves(x) else x.full_tensor()


# What rules are written with.


def is_same(func: Any, *others: Any) -> bool:
    """Whether ``func`` is one of ``others``, or runs that in its place, as one does that tensors without values can't
    run (`lightning_par.trial.fake_functions.OnOnes`)."""
    func = getattr(func, "in_place_of", func)
    return any(func is other for other in others)


def view(local: Tensor, dim: int, positions: Positions, axis: Axis) -> ShardedTensor:
    """The sharded tensor of ``local``; ``dim`` may count from the end."""
    return ShardedTensor(local, dim % local.ndim, positions, axis)


def enter(x: Any, axis: Axis) -> Any:
    """A plain argument of a function that runs on local tensors: its gradient is summed over the axis."""
    return axis.entered(x) if isinstance(x, Tensor) else x


def aligned(x: Tensor, dim: int, positions: Positions, axis: Axis) -> Tensor | None:
    """This rank's part of ``x`` cut along ``dim`` (negative) as ``positions`` say, or all of it where it broadcasts.

    None where ``x`` has another size there, or is sharded otherwise; along the sequence it is then sharded anew.
    """
    if isinstance(x, ShardedTensor):
        if x._dim - x.ndim == dim and x._axis is axis and x._positions.agree(positions):
            return x._local
        if x._axis is not axis or axis.spread(x.shape[x._dim]) is None:
            return None
        x = gathered(x)
    if x.ndim < -dim or x.shape[dim] == 1:
        return enter(x, axis)
    return collectives.scatter(x, dim % x.ndim, positions, axis) if x.shape[dim] == positions.size else None
