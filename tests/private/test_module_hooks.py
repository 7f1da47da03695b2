"""Hooks on the calls of modules and on the gradients there."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.private.graph import node_of
from lightning_par.private.leaf_hooks import number_of_leaf_hooks
from lightning_par.private.module_hooks import (
    HOOKS,
    BackwardHook,
    backward_hook,
    backward_hooks_on_all,
    begins_module,
    dicts_of_hooks,
    drop_forward_hooks,
    handles_made,
    hang,
    has_hooks,
    has_partial_hooks,
    hooks_on,
    hooks_on_all,
    is_module_end,
    marks_module_ends,
    may_have_hooks,
    module_that_marks_ends,
    number_of_backward_hooks,
    number_of_hooks,
    users_hooks,
    users_of,
)
from lightning_par.private.transforms import is_wrapped


def test_hooks_of_a_module_are_seen() -> None:
    module = nn.Linear(1, 1)
    assert not has_hooks(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert has_hooks(module) and all(may_have_hooks([module]))
        handle.remove()
    assert not has_hooks(module)
    for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
        handle = register(lambda *args: None)
        assert number_of_backward_hooks(module) == 1 and not has_hooks(module) and all(may_have_hooks([module]))
        handle.remove()
    assert not number_of_backward_hooks(module) and not any(may_have_hooks([module]))


def test_hooks_on_modules_and_on_all_of_them_are_found() -> None:
    module, seen = nn.Linear(1, 1), lambda *args: None
    assert not hooks_on(module) and not hooks_on_all()
    handles = [module.register_forward_hook(seen), module.register_full_backward_hook(seen)]
    assert hooks_on(module) == [seen, seen] and number_of_hooks(module) == 1
    assert number_of_leaf_hooks(module.weight) == 0
    module.weight.register_hook(seen)
    module.weight.register_post_accumulate_grad_hook(seen)
    assert number_of_leaf_hooks(module.weight) == 2
    handles += [nn.modules.module.register_module_forward_hook(seen)]
    assert hooks_on_all() == [seen]
    for handle in handles:
        handle.remove()
    assert not hooks_on(module) and not hooks_on_all()
    module.register_forward_hook(functools.partial(hooks_on_all))  # of ours
    module.weight.register_hook(is_wrapped)
    assert not has_hooks(module) and number_of_leaf_hooks(module.weight) == 2


class Hook:
    def __call__(self, *args: object) -> None:
        """Sees a call."""


def test_hooks_of_a_class_are_dropped_of_a_copy_too() -> None:
    module = nn.Linear(1, 1)
    module.register_forward_hook(Hook(), always_call=True)
    kept = module.register_forward_hook(functools.partial(hooks_on_all), with_kwargs=True)
    for one in (copy.deepcopy(module), module):
        drop_forward_hooks(one, Hook)
        assert [*one._forward_hooks] == [kept.id]
        assert all({*hooks} <= {kept.id} for hooks in dicts_of_hooks(one))


_KINDS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


@pytest.mark.parametrize("kind", (*_KINDS, "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_post_hook"))
def test_each_hook_is_in_a_dict_of_its_module(kind: str) -> None:
    module = nn.Linear(1, 1)

    def hook(*args: Any) -> None: ...

    getattr(module, f"register_{kind}")(hook)
    assert [[*vars(module)[name].values()] for name in HOOKS if vars(module)[name]] == [[hook]]


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_are_hung_off_and_on(everywhere: bool) -> None:
    module, of_user = nn.Linear(1, 1), list[Any]()
    dicts, made = dicts_of_hooks(None if everywhere else module), handles_made()
    ours: Any = functools.partial(lambda *args: None)
    ours.func.__module__ = "lightning_par.somewhere"
    home: Any = nn.modules.module if everywhere else module
    kinds = [kind.replace("hook", "") for kind in _KINDS] if not everywhere else ()
    names = [f"register_{kind}hook" for kind in kinds] or [
        f"register_module_{kind}" for kind in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook")
    ]

    def hook(*args: Any) -> None:
        of_user.append(args)

    handles = [getattr(home, name)(x) for name in names for x in (hook, ours)]
    try:
        assert handles_made() == made + len(handles)
        held = users_hooks(dicts)
        hang(dicts, tuple({} for _ in dicts))
        assert not any(users_hooks(dicts)) and [x for held in dicts for x in users_of(held)] == []
        module(torch.ones(1, requires_grad=True)).backward()
        assert not of_user
        hang(dicts, held)
        assert users_hooks(dicts) == held and sum(map(len, dicts)) >= len(handles)
        module(torch.ones(1, requires_grad=True)).backward()
        assert len(of_user) == len(names)
        assert len(backward_hooks_on_all()) == everywhere * 2  # both of ours and the user's
    finally:
        for handle in handles:
            handle.remove()


def test_modules_make_their_backward_hooks_of_what_stands_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Hook(BackwardHook):
        def __init__(self, *args: Any) -> None:
            made.append(args)
            super().__init__(*args)

    assert getattr(*backward_hook()) is BackwardHook
    monkeypatch.setattr(*backward_hook(), Hook)
    module, seen = nn.Linear(1, 1), list[Any]()
    module.register_full_backward_hook(lambda *args: seen.append(args))
    out = module(torch.ones(1, 1, requires_grad=True))
    assert marks_module_ends(type(out.grad_fn)._forward_cls) and not marks_module_ends(torch.autograd.Function)
    out.sum().backward()
    assert len(made) == len(seen) == 1 and made[0][0] is module


def test_who_asks_for_the_ends_of_a_module_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    begins: list[bool | None] = []

    def grad_fn(x: torch.Tensor) -> Any:
        frame = sys._getframe(1)
        asked.append((module_that_marks_ends(frame), is_module_end(node_of(x))))
        begins.append(begins_module(frame))
        return node_of(x)

    monkeypatch.setattr(torch.Tensor, "grad_fn", property(grad_fn), raising=False)
    module = nn.Linear(1, 1)
    module.register_full_backward_hook(lambda *args: None)
    out = module(torch.ones(1, 1, requires_grad=True))
    assert (module, True) in asked and (module, False) not in asked
    told = [x for x in begins if x is not None]
    assert (told[0], told[-1]) == (True, False)
    asked.clear()
    assert out.grad_fn is not None and asked == [(None, True)] and not is_module_end(None)


def test_the_deprecated_kind_of_hook_is_told_from_the_other() -> None:
    for register, partial in (("register_backward_hook", True), ("register_full_backward_hook", False)):
        module = nn.Linear(1, 1)
        assert not has_partial_hooks(module)
        getattr(module, register)(lambda *args: None)
        assert has_partial_hooks(module) == partial
