"""The gradients of a pipeline's step are scaled on the device, which nobody asks for the factor."""

from __future__ import annotations

import torch
from torch import nn

from lightning_par.pipeline.run.delivery import deliver
from tests.gpu_rules import waits
from tests.gpu_rules.ranks import StrictPool


def _delivered() -> tuple[list[float], int]:
    weights = [nn.Parameter(torch.zeros(2, 2, device="cuda")), nn.Parameter(torch.zeros(4, device="cuda"))]
    shared = torch.ones(4, device="cuda")  # as autograd leaves them to a weight that was seen through a view
    grads = [shared.view(2, 2), shared]
    loss = deliver(torch.ones((), device="cuda"), list(zip(weights, grads, strict=True)), scale=2.0)
    with waits.counted() as counter:
        (6 * loss).backward()
    found = [x for p in weights if p.grad is not None for x in p.grad.flatten().tolist()]
    return found, waits.blocking(counter).total()


def test_gradients_that_share_memory_are_scaled_once_each_without_a_wait(pool: StrictPool) -> None:
    assert pool.run(1, _delivered) == [([3.0] * 8, 0)]
