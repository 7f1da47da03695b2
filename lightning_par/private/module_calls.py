"""What the call of a module runs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from lightning_par.private.compiler import is_compiled_wrapper
from lightning_par.private.module_hooks import hooks_on_all, may_have_hooks

CALL = "_compiled_call_impl"
"""Where a module keeps what is called instead of it, if anything."""

METHODS = frozenset("""
_call_impl inner _wrapped_call_impl state_dict _save_to_state_dict load_state_dict load _load_from_state_dict
""".split())  # fmt: skip
"""The code, by its names, that runs when a module is called, saved or loaded."""


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What ``module(...)`` runs now: the user's compiled call, or forward with its hooks."""
    compiled = module._compiled_call_impl
    return module._call_impl if compiled is None else compiled  # type: ignore[return-value]


def takes(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``module`` can be called so, or it can't be told, as where hooks may change what it is given.

    Example::

        assert not takes(torch.nn.Linear(2, 2), (torch.ones(2),), {"lengths": None})
    """
    if any(may_have_hooks([module])) or hooks_on_all():
        return True
    function = getattr(module.forward, "__func__", module.forward)
    if not isinstance(function, types.FunctionType) or hasattr(function, "__signature__"):
        return True
    # A decorator's function takes what it takes, whatever the one that it is put on does.
    signature = inspect.signature(module.forward, follow_wrapped=False)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def set_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` run ``call``, hooks and all left to it. `nn.Module.compile` uses the same attribute, which
    copies and pickles of the module leave behind; a replaced ``forward`` would be in them, and run the user's hooks."""
    module.__dict__[CALL] = call


def set_inner_call(module: torch.nn.Module, make: Callable[[Callable[..., Any]], Any]) -> None:
    """Let ``module(...)`` run what ``make`` makes of its call. One that was set before and has an ``original`` stays
    around it, and decides whether that runs."""
    outer = get_call(module)
    if is_within_call(module):
        outer.original = make(outer.original)  # type: ignore[union-attr]
    else:
        set_call(module, make(plain_call(module)))


def is_within_call(module: torch.nn.Module) -> bool:
    """Whether what ``module(...)`` runs decides whether the module's own call runs, as `set_inner_call` has it."""
    return hasattr(get_call(module), "original")


def drop_calls(module: torch.nn.Module, kind: type) -> None:
    """Undo `set_inner_call`, where that made one of ``kind``, which has an ``original``."""
    call = get_call(module)
    inner = getattr(call, "original", None)
    if isinstance(call, kind):
        reset_call(module, inner)  # type: ignore[arg-type]
    elif isinstance(inner, kind):
        call.original = inner.original  # type: ignore[union-attr, attr-defined]


def get_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What `set_call` set."""
    return module.__dict__.get(CALL)


def reset_call(module: torch.nn.Module, before: Callable[..., Any]) -> None:
    """Undo `set_call`; ``before`` is what `plain_call` gave."""
    module.__dict__.pop(CALL, None)
    if before != module._call_impl:
        module.__dict__[CALL] = before


def forget_call(module: torch.nn.Module) -> None:
    """Let ``module(...)`` run what is not compiled, as the copy of a module must: what is compiled runs the first."""
    module.__dict__.pop(CALL, None)
    if is_compiled_wrapper(module):
        module.__dict__["forward"] = module._orig_mod.__call__  # type: ignore[union-attr, operator]
