"""Tensors of the batch: written into unseen by autograd, and drawn for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import full
from lightning_par.tensor.residual_stream import ResidualAxis
from tests.helpers.thread_ranks import SequenceThreadAxis, run_ranks


def scaled(c: Tensor) -> None:
    c.data.mul_(2)


def at_a_slice(c: Tensor) -> None:
    d = c.data
    d[:, 0] = 3.0


def through_an_earlier_view(c: Tensor) -> None:
    c[:, :, :2].data.add_(1)


def copied_into(c: Tensor) -> None:
    c.data.copy_(c.detach() * 3)


def replaced(c: Tensor) -> None:
    c.data = c.data * 2


def results(x: Any, write: Callable[[Tensor], None] | None, again: bool) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of a layer that used ``x`` before and, maybe, after the write."""
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    c = x.clone()
    h = F.linear(c, weight).sin() * c.sum(-1, keepdim=True)
    if write is not None:
        write(c)
    if again:
        h = h + F.linear(c, weight)
    loss = full(h.pow(2).sum())
    loss.backward()
    assert weight.grad is not None
    return loss.detach(), weight.grad


def on_ranks(axis: Any, x: Tensor, write: Callable[[Tensor], None], again: bool) -> tuple[Tensor, Tensor]:
    positions = axis.spread(x.shape[1])
    loss, gradient = results(BatchTensor(x.clone(), 1, positions, axis), write, again)
    return loss, axis.all_reduce_(gradient, "test") / axis.size  # of a loss that each rank has whole


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("write", [scaled, at_a_slice, through_an_earlier_view, copied_into, replaced])
def test_backward_and_later_uses_see_what_was_written_through_data(write: Callable[..., None], again: bool) -> None:
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = results(x, write, again)
    kept = write is replaced and not again  # what was saved keeps the old memory
    assert torch.allclose(expected[1], results(x, None, again)[1]) == kept
    for found in run_ranks(2, on_ranks, x, write, again, kind=SequenceThreadAxis):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def _draws(axis: Any, x: Tensor) -> list[Tensor]:
    streams = RunState.current.streams
    masks = []
    for _ in range(2):  # the first meets the function for the first time in this process
        torch.manual_seed(0)
        streams.begin_step(0, 0)
        batch = BatchTensor(x, 1, axis.spread(x.shape[1]), axis)
        masks.append(F.dropout(F.dropout(batch, 0.37) @ torch.eye(4, requires_grad=True), 0.37).full_tensor())
    return masks


def test_a_step_draws_the_same_whatever_this_process_has_met() -> None:
    for first, second in run_ranks(2, _draws, torch.ones(2, 8, 4), kind=SequenceThreadAxis):
        assert torch.equal(first == 0, second == 0)


def test_an_axis_that_shares_out_tokens_knows_a_length_that_an_earlier_run_has_met() -> None:
    for _ in range(2):
        axis = ResidualAxis(Axis("tensor", ranks=(0, 1), rank=0, group=None))
        ids = BatchTensor(torch.arange(27).view(3, 9), 1, axis.spread(9), axis)  # type: ignore[arg-type]
        ids[:, :-1]
        assert axis.lengths == {9, 8}
