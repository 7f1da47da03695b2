"""Hooks on a parameter that is sharded, made whole and sharded again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.leaf_hooks import hooks_of, number_of_leaf_hooks
from lightning_par.sharded.tensor import full, leaf
from lightning_par.tensor.apply import shard_module, unshard_module
from lightning_par.tensor.plan import Split, TensorPlan

AXIS = Axis("tensor", ranks=(0,), rank=0, group=None)
PLAN = TensorPlan(1, (Split(("weight",), (4, 4), 0, "colwise", Positions.of([0] * 4)),))


class Hooked:
    """A parameter with hooks that tell when they run, each in its turn."""

    def __init__(self) -> None:
        self.linear, self.ran = nn.Linear(4, 4, bias=False), list[str]()
        weight = self.linear.weight
        self.weight = weight
        self.mask = weight.register_hook(self.masked)
        self.watch = weight.register_hook(lambda grad: self.tell("watch"))
        weight.register_post_accumulate_grad_hook(lambda leaf: self.tell("after" if leaf is weight else "other"))

    def tell(self, name: str) -> None:
        self.ran.append(name)

    def masked(self, grad: Tensor) -> Tensor:
        self.tell("mask")
        return grad.tril()

    def train(self) -> tuple[list[str], Tensor]:
        self.ran.clear()
        self.weight.grad = None
        (self.linear.weight * 2).sum().backward()
        assert self.weight.grad is not None
        return list(self.ran), full(self.weight.grad)


def test_hooks_run_once_however_often_the_parameter_is_sharded_and_made_whole() -> None:
    hooked = Hooked()
    want = hooked.train()
    for _ in range(3):
        for change in (lambda: shard_module(hooked.linear, PLAN, AXIS), lambda: unshard_module(hooked.linear)):
            change()
            ran, grad = hooked.train()
            assert ran == want[0] == ["mask", "watch", "after"]
            torch.testing.assert_close(grad, want[1])


def test_a_hook_comes_and_goes_while_the_parameter_is_sharded() -> None:
    hooked = Hooked()
    shard_module(hooked.linear, PLAN, AXIS)
    late = hooked.weight.register_hook(lambda grad: hooked.tell("late"))
    hooked.watch.remove()
    for _ in range(2):
        unshard_module(hooked.linear)
        assert hooked.train()[0] == ["mask", "late", "after"]
        shard_module(hooked.linear, PLAN, AXIS)
        assert hooked.train()[0] == ["mask", "late", "after"]
    late.remove()
    hooked.mask.remove()
    assert hooked.train()[0] == ["after"]
    unshard_module(hooked.linear)
    assert hooked.train()[0] == ["after"]


def test_who_has_hooks_is_known_of_the_parameter_in_whatever_form() -> None:
    hooked = Hooked()
    known = number_of_leaf_hooks(hooked.weight)
    shard_module(hooked.linear, PLAN, AXIS)
    late = hooked.weight.register_hook(lambda grad: hooked.tell("late"))
    assert number_of_leaf_hooks(hooked.weight) == known + 1
    part = leaf(hooked.weight)
    assert number_of_leaf_hooks(part) > 0
    for hooks in (*hooks_of(hooked.weight),):
        hooks.clear()
    assert number_of_leaf_hooks(hooked.weight) == number_of_leaf_hooks(part) == 0
    late.remove()


def test_a_frozen_parameters_hooks_run_once_it_is_thawed() -> None:
    hooked = Hooked()
    hooked.weight.requires_grad_(False)
    shard_module(hooked.linear, PLAN, AXIS)
    assert not hooked.weight.requires_grad
    hooked.weight.requires_grad_(True)
    assert hooked.train()[0] == ["mask", "watch", "after"]
