"""Hooks on the calls of modules and on the gradients there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
import torch.utils.hooks
from torch import nn

BackwardHook = torch.utils.hooks.BackwardHook
"""What a module makes of its full backward hooks at each call."""


HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
"""The attributes in which a module keeps hooks."""


def backward_hook() -> tuple[Any, str]:
    """Where modules find the kind of `BackwardHook` that they make, a module and a name; torch offers no other place to
    see what their hooks are given."""
    return torch.nn.modules.module, "BackwardHook"


def marks_module_ends(function: Any) -> bool:
    """Whether an autograd function is the one by which `BackwardHook` finds a module's inputs and outputs again."""
    return function is torch.nn.modules._functions.BackwardHookFunction


def is_module_end(node: Any) -> bool:
    """Whether ``node`` of autograd's graph is where a module with full backward hooks begins or ends."""
    return node is not None and node.name() == "BackwardHookFunctionBackward"


def module_that_marks_ends(frame: FrameType) -> nn.Module | None:
    """The module whose `BackwardHook` asks in ``frame`` for the nodes at its ends; None where other code runs there."""
    hook = _asking_hook(frame)
    return None if hook is None else hook.module


def begins_module(frame: FrameType) -> bool | None:
    """Whether a `BackwardHook` asks in ``frame`` for the node where its module begins, for hooks that want both ends;
    None where it has none of these, or other code runs there."""
    hook = _asking_hook(frame)
    return hook.n_inputs == -1 if hook is not None and hook.user_hooks else None


def _asking_hook(frame: FrameType) -> Any:
    if frame.f_globals.get("__name__") != torch.utils.hooks.__name__:
        return None
    for place in (frame, frame.f_back):  # it may ask in a comprehension
        hook = None if place is None else place.f_locals.get("self")
        if isinstance(hook, torch.utils.hooks.BackwardHook):
            return hook
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether user code runs when ``module`` is called, beside its forward; torch has no public word for it."""
    return number_of_hooks(module) > 0


_of_module = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def may_have_hooks(modules: Iterable[nn.Module]) -> Iterator[bool]:
    """Of each module whether it has hooks on its calls or gradients, of whomever; asked of all in every step."""
    return map(any, map(_of_module, modules))


def hooks_on_all() -> list[Callable[..., Any]]:
    """The user's hooks on the calls of all modules there are, and on gradients there; torch can only register them."""
    from torch.nn.modules import module

    forward = (*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values())
    return [*forward, *backward_hooks_on_all()]


def number_of_hooks(module: nn.Module) -> int:
    """How many hooks of the user's see calls of ``module``."""
    return len(users_of(module._forward_hooks)) + len(users_of(module._forward_pre_hooks))


def users_of(hooks: dict[int, Any] | None) -> list[Any]:
    """Those that are not ours, which sync or gather; what stands for the user's has these as ``of_user``."""
    if not hooks:
        return []
    found = [*hooks.values()]
    names = [getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in found]
    return [x for x, name in zip(found, names) if not name.startswith("lightning_par.") or getattr(x, "of_user", None)]


def hooks_on(module: nn.Module) -> list[Callable[..., Any]]:
    """The user's hooks on ``module``, of its calls and of gradients."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for hooks in kinds for hook in users_of(hooks)]


def handles_made() -> int:
    """How many handles of hooks there were so far; torch counts them by no public name."""
    return torch.utils.hooks.RemovableHandle.next_id


def dicts_of_hooks(module: nn.Module | None) -> tuple[MutableMapping[int, Any], ...]:
    """Where a module keeps hooks on its calls and gradients, and what it knows of them; all modules' without one."""
    from torch.nn.modules import module as everywhere

    kinds = ("_global_forward", "_global_backward") if module is None else ("_forward", "_backward")
    held = vars(everywhere if module is None else module)
    return tuple(x for name, x in held.items() if name.startswith(kinds) and "hooks" in name and isinstance(x, dict))


def users_hooks(dicts: tuple[MutableMapping[int, Any], ...]) -> tuple[dict[int, Any], ...]:
    """What of the ``dicts`` of one module is of hooks of the user's."""
    hooks = {key: x for held in dicts for key, x in held.items() if not isinstance(x, bool)}
    users = {id(x) for x in users_of(hooks)}
    ours = {key for key, x in hooks.items() if id(x) not in users}
    return tuple({key: x for key, x in held.items() if key not in ours} for held in dicts)


def hang(dicts: tuple[MutableMapping[int, Any], ...], held: tuple[Mapping[int, Any], ...]) -> None:
    """Let the ``dicts`` of one module hold these hooks of the user's, and of ours those that they hold."""
    for into, users, new in zip(dicts, users_hooks(dicts), held, strict=True):
        ours = {key: x for key, x in into.items() if key not in users}
        into.clear()
        into.update({**new, **ours})


def number_of_backward_hooks(module: nn.Module) -> int:
    """How many hooks of the user's meet the gradients of the inputs or outputs of ``module``."""
    return len(users_of(module._backward_hooks)) + len(users_of(module._backward_pre_hooks))


def backward_hooks_on_all() -> list[Callable[..., Any]]:
    """As `hooks_on_all`, of those that meet gradients."""
    from torch.nn.modules import module

    return [*module._global_backward_pre_hooks.values(), *module._global_backward_hooks.values()]


def drop_forward_hooks(module: nn.Module, kind: type) -> None:
    """Take hooks of a class of ours off ``module``, be it a copy of the one that they were registered on; a handle
    knows that one alone."""
    for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, kind)]:
        for hooks in dicts_of_hooks(module):
            hooks.pop(key, None)


def has_partial_hooks(module: nn.Module) -> bool:
    """Whether ``module`` has a hook of the deprecated ``register_backward_hook``; torch tells by a flag."""
    return bool(module._backward_hooks) and not module._is_full_backward_hook
