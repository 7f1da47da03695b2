"""What hooks that run before the first step do to its module, told by their code."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from lightning_par.python_state.code_names import functions_in, names_of
from lightning_par.python_state.user_code import is_users_code, packages_of
from lightning_par.strategies.entry_points import start_hooks

_HANG = frozenset(
    "register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook "
    "register_hook register_post_accumulate_grad_hook".split()
)


def hang_hooks(module: Any) -> bool:
    """Whether the start hooks of ``module``, or what they call, name what hangs hooks on layers, or on gradients of
    weights: a step that runs without these may do something else. Of a hook that is no function of Python's it may be.
    """
    packages = packages_of(module)
    waiting, met = start_hooks(module), set[types.CodeType]()
    if not all(isinstance(x, types.FunctionType) for x in waiting):
        return True
    while waiting:
        function = waiting.pop()
        if function.__code__ in met:
            continue
        met.add(function.__code__)
        waiting += _closed_over(function)  # of a decorator, a library's, too: the function that it is put on
        if not is_users_code(function.__globals__.get("__name__"), packages):
            continue
        names = names_of(function.__code__)
        if not names.words.isdisjoint(_HANG):
            return True
        named = [function.__globals__.get(name) for name in names.globals]
        waiting += [x for x in named if isinstance(x, types.FunctionType)]
        waiting += [f for x in named if isinstance(x, type) for f in _methods(x)]
        waiting += [f for name, f in _named_methods(type(module)) if name in names.attributes]
    return False


def _closed_over(function: types.FunctionType) -> Iterator[types.FunctionType]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty yet
            if isinstance(cell.cell_contents, types.FunctionType):
                yield cell.cell_contents


def _named_methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for base in kind.__mro__:
        yield from ((name, f) for name, value in vars(base).items() for f in functions_in(value))


def _methods(kind: type) -> list[types.FunctionType]:
    return [f for _, f in _named_methods(kind)]
