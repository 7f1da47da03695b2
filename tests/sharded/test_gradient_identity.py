"""The gradient of a weight that lies in parts is one object, as on one device: `p.grad is p.grad`."""

from __future__ import annotations

import gc
import weakref

import torch

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.tensor import ShardedTensor


def _weight() -> ShardedTensor:
    local = torch.ones(3, 2, requires_grad=True)
    weight = ShardedTensor(local, 0, Positions.of([0, 0, 0]), Axis("tensor", (0,), 0, None))
    (local * 2).sum().backward()
    return weight


def test_a_gradient_that_somebody_has_is_read_again() -> None:
    weight = _weight()
    grad = weight.grad
    assert grad is not None and grad is weight.grad and grad.to(dtype=None) is weight.grad
    grad.mul_(2)
    assert weight.grad is grad and float(weight.grad.sum()) == 24


def test_what_is_set_as_the_gradient_is_the_gradient() -> None:
    weight = _weight()
    assert weight.grad is not None
    mine = weight.grad * 3
    weight.grad = mine
    assert weight.grad is mine
    mine.zero_()
    assert float(weight.grad.sum()) == 0


def test_a_new_gradient_is_another_object() -> None:
    weight = _weight()
    grad = weight.grad
    weight.grad = None
    assert weight.grad is None
    (weight._local * 5).sum().backward()
    assert weight.grad is not grad and weight.grad is not None and float(weight.grad.sum()) == 30


def test_a_gradient_that_was_read_is_let_go_with_its_weights() -> None:
    weight = _weight()
    grad = weight.grad
    assert isinstance(grad, ShardedTensor)
    held, whole = weakref.ref(grad._local), weakref.ref(grad)
    weight.grad = None
    del grad
    gc.collect()
    assert held() is None and whole() is None
