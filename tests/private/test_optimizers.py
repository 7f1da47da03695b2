"""What an optimizer and a gradient scaler keep to themselves."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_par.private.optimizers import (
    found_infs,
    has_step_hooks,
    move_optimizers,
    note_overflow_flag,
    scheduler_marks,
)
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@both
def test_optimizers_move(namespace: Namespace) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    move_optimizers(namespace, [optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["momentum_buffer"].is_meta


def test_hooks_of_an_optimizers_step_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not has_step_hooks(optimizer)
    own = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    for register in (*own, register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *args: None)
        assert has_step_hooks(optimizer)
        handle.remove()
        assert not has_step_hooks(optimizer)


def test_a_scaler_shows_the_overflows_it_met() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for grad, found in ((float("inf"), 1.0), (1.0, 0.0)):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(())).item()
        parameter.grad = torch.full((2,), grad)
        scaler.unscale_(optimizer)
        (flag,) = found_infs(scaler, optimizer)
        assert flag.item() == found
        flag.fill_(1.0)  # what is written there is what the scaler decides by
        scaler.step(optimizer)
        assert parameter.tolist() == [1.0, 1.0]
        scaler.update()


def test_a_scaler_without_gradients_takes_a_flag_from_outside() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(())).item()
    scaler.unscale_(optimizer)
    assert found_infs(scaler, optimizer) == []
    note_overflow_flag(scaler, optimizer, torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_a_scheduler_marks_the_step_that_it_wraps() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not scheduler_marks(optimizer.step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    marks = scheduler_marks(optimizer.step)
    assert marks

    def step(*args: object) -> None: ...

    optimizer.step = step  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="overridden"):
        scheduler.step()
    vars(step).update(marks)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = step  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*overridden")
        scheduler.step()
