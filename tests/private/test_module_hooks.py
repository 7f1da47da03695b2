"""Hooks on the calls of modules and on the gradients there."""

from __future__ import annotations

import copy
import functools

from torch import nn

from lightning_par.private.leaf_hooks import number_of_leaf_hooks
from lightning_par.private.module_hooks import (
    dicts_of_hooks,
    drop_forward_hooks,
    has_hooks,
    hooks_on,
    hooks_on_all,
    number_of_backward_hooks,
    number_of_hooks,
)
from lightning_par.private.transforms import is_wrapped


def test_hooks_of_a_module_are_seen() -> None:
    module = nn.Linear(1, 1)
    assert not has_hooks(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert has_hooks(module)
        handle.remove()
    assert not has_hooks(module)
    for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
        handle = register(lambda *args: None)
        assert number_of_backward_hooks(module) == 1 and not has_hooks(module)
        handle.remove()
    assert not number_of_backward_hooks(module)


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
