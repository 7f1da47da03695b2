"""Hooks on the gradient of a leaf."""

from __future__ import annotations

import torch

from lightning_par.private.leaf_hooks import hooked, hooks_of, number_of_leaf_hooks, put_hooks, set_hooks, take_hooks


def test_hooks_of_a_leaf_are_known() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def before(grad: torch.Tensor) -> None: ...

    def after(leaf: torch.Tensor) -> None: ...

    assert hooks_of(weight) == ({}, {}) and hooked([("w", weight)]) == []
    handles = weight.register_hook(before), weight.register_post_accumulate_grad_hook(after)
    found = hooks_of(weight)
    assert [[*hooks.values()] for hooks in found] == [[before], [after]] and hooked([("w", weight)]) == [("w", weight)]
    for handle in handles:
        handle.remove()
    assert found == ({}, {})


def test_hooks_left_behind_by_a_swap_run_again() -> None:
    weight, ran = torch.nn.Parameter(torch.ones(2)), list[str]()
    weight.register_hook(lambda grad: ran.append("before"))
    weight.register_post_accumulate_grad_hook(lambda leaf: ran.append("after"))
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.zeros(2)))
    weight.sum().backward()
    assert ran == []
    set_hooks(weight, hooks_of(weight))
    weight.sum().backward()
    assert ran == ["before", "after"]


def test_hooks_of_a_leaf_are_taken_off_for_a_while() -> None:
    weight, ran = torch.nn.Parameter(torch.ones(2)), list[str]()
    weight.register_hook(lambda grad: ran.append("before"))
    handle = weight.register_post_accumulate_grad_hook(lambda leaf: ran.append("after"))
    taken = take_hooks(weight)
    weight.sum().backward()
    assert ran == [] and number_of_leaf_hooks(weight) == 0
    put_hooks(taken)
    assert number_of_leaf_hooks(weight) == 2
    handle.remove()
    weight.sum().backward()
    assert ran == ["before"]
