"""The plain copy that stands where one device has a view, and what functions do to tensors that share memory there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from lightning_par.private.pytree import tree_flatten, tree_map, tree_unflatten
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import write_count
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.aliases import Memory, innermost
from lightning_par.sharded.rules.gather_report import name_of, user_line
from lightning_par.sharded.rules.in_place import targets
from lightning_par.sharded.rules.strides import viewed
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.wrapped_tensors import is_wrapped

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Alias(Tensor):
    """A plain tensor that sees to it that what is written into it is seen where one device would see it.

    Args:
        plain: the tensor; what shares its memory is an `Alias`, too, and all else that functions make of it is plain.
    """

    _innermost: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> Alias:
        self: Alias = plain.as_subclass(cls)
        self._innermost = plain
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from lightning_par.sharded.rules.lookup import dispatch

        if is_wrapped(types):
            return NotImplemented
        lender = RunState.current.lender
        if lender is not None:
            result = lender.lent(func, args, kwargs or {}, sys._getframe(1))
            if result is not NotImplemented:
                return result
        if any(hasattr(kind, "positions") or hasattr(kind, "_held") for kind in types):
            return dispatch(func, args, kwargs or {})
        return kept(_plainly, func, args, kwargs or {})


def _plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def kept(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``run`` a function; memory that one device has once is the same everywhere before and after it.

    Raises:
        RuntimeError: an argument shares memory with what was written to, and could not be written.
    """
    tensors = list(_tensors((args, kwargs)))
    given = {id(x._innermost): x for x in tensors if type(x) is Alias}
    if given:
        args, kwargs = tree_map(lambda x: x._innermost if type(x) is Alias else x, (args, kwargs))
    if in_functorch():
        return run(func, args, kwargs)
    known = {id(x): (x, memory) for x in map(innermost, tensors) if (memory := Memory.of(x)) is not None}
    for _, memory in known.values():
        memory.settle(func)
    before = [(x, memory, _version(x), _version(memory.tensor())) for x, memory in known.values()]
    named = [innermost(x) for x in targets(func, args, kwargs)] if before else []
    result = run(func, args, kwargs)
    changed = {id(memory): (x, memory, known) for x, memory, version, known in before
               if version != _version(x) or (version is None and any(x is other for other in named))}  # fmt: skip
    _refuse_two(func, [memory for _, memory, _ in changed.values()])
    for x, memory, version in changed.values():
        memory.written(x, quiet=version == _version(memory.tensor()))
    if given and args and type(args[0]) in (Tensor, Parameter) and not changed:
        result = _as_viewed(func, args, kwargs, result)
    return shown(result, given)


def _as_viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """``result``, of which what is a copy on one device is one."""
    leaves, spec = tree_flatten(result)
    memory = memory_of(args[0])
    views = [number for number, x in enumerate(leaves) if type(x) is Tensor and memory_of(x) == memory]
    strides = viewed(func, args[0], args[1:], kwargs) if views else None
    if strides is None or len(strides) != len(leaves):
        return result
    for number in views:
        if strides[number] is None:
            leaves[number] = leaves[number].clone()
        elif leaves[number] is not args[0]:
            leaves[number]._strides = strides[number]
    return tree_unflatten(leaves, spec)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _version(x: Tensor | None) -> int | None:
    return None if x is None or x.is_inference() else write_count(x)


def _refuse_two(func: Any, memories: list[Memory]) -> None:
    tops = [memory.top() for memory in memories]
    if len(set(tops)) < len(tops):
        raise RuntimeError(
            f"`{name_of(func)}` at {user_line()} writes at once into several tensors that share memory on one device, "
            "and are copies here. Write them one after another."
        )


def shown(result: Any, given: dict[int, Alias]) -> Any:
    """What a function made, as the user is to see it."""
    if isinstance(result, (tuple, list)) and any(isinstance(x, Tensor) for x in result):
        return tree_map(lambda x: shown(x, given), result)
    if type(result) is not Tensor:
        return read_only(result) if given and isinstance(result, np.ndarray) else result
    if id(result) in given:
        return given[id(result)]
    memory = Memory.of(result)
    return result if memory is None or memory.copy is None or memory.copy.apart else Alias(result)


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An ``array`` of numpy of a copy that stands for other memory: what is written into it would be lost, and nobody
    sees it. One of its own memory, as of another dtype, is one device's."""
    if not array.flags.owndata:
        array.flags.writeable = False
    return array
