"""Gradients themselves, `p.grad`, that objects of the user keep from one step to the next."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import Net, check, loader, trained

PIPELINE = {"pipeline_parallel_size": 2}


class Keeper:
    def __init__(self) -> None:
        self.grads: dict[str, Tensor] = {}


class Keeps(Net):
    """Measures those of the last step, which a clip has changed since."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.keeper = how, Keeper()
        if how == "in a hook":
            for name, p in self.named_parameters():
                p.register_post_accumulate_grad_hook(partial(self.keep, name))

    def keep(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        self.keeper.grads[name] = p.grad.clone() if self.how == "a copy in the step" else p.grad

    def on_after_backward(self) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self.log("kept", sum((grad.abs().sum() for grad in self.keeper.grads.values()), zero))
        for name, p in self.named_parameters():
            if self.how != "in a hook":
                self.keep(name, p)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        kept = self.keeper.grads.get("head.bias")
        if kept is None or "step" not in self.how:
            return loss
        return loss + 0.1 * (self.head.bias * (kept.mul_(2) if "written" in self.how else kept)).sum()


def _fit(how: str, layout: dict[str, Any]) -> Any:
    return trained(Keeps(how), loader(), partial(HybridParallelStrategy, **layout), gradient_clip_val=0.01)


@slow("tensor-*", "pipeline-a copy in the step")
@pytest.mark.parametrize("how", ["between", "a copy in the step"])
@pytest.mark.parametrize("layout", [PIPELINE, {"tensor_parallel_size": 2}], ids=["pipeline", "tensor"])
def test_hooks_meet_those_that_they_have_kept(how: str, layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _fit, how, layout)


@slow(but=["step"])
@pytest.mark.parametrize("how", ["step", "written step"])
def test_a_pipelines_step_that_uses_one_is_refused(how: str, pool: Pool) -> None:
    with pytest.raises(
        RanksFailedError, match=r"test_kept_gradients.py:\d+: a step uses the gradient of 'head.bias' that a hook"
    ):
        pool.run(2, _fit, how, PIPELINE)


def test_a_hook_of_a_gradient_that_keeps_one_under_a_pipeline_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"stores the gradient of '[\w.]+' itself, `p.grad`, in self.keeper"):
        pool.run(2, _fit, "in a hook", PIPELINE)
