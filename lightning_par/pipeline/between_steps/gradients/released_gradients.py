"""Gradients of the step before, which nobody looks at any more."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_par.pipeline.between_steps.optim.adopted_optimizers import who_zeroes


def spent_gradients(module: Any, optimizers: list[Optimizer]) -> list[Tensor]:
    """The parameters whose gradients Lightning zeroes after the step that begins, with no code of the user's between.

    The backwards of a pipeline run within the step. Gradients that are dropped before it make room for the new ones;
    else there would be two of each.

    Args:
        module: the LightningModule, in a fit.
        optimizers: of the trainer.
    """
    trainer = module.trainer
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
        return []
    watchers = [(module, "optimizer_zero_grad"), *((x, "on_before_zero_grad") for x in (module, *trainer.callbacks))]
    if any(not is_lightnings(getattr(owner, name)) for owner, name in watchers):
        return []
    groups = [group for one in map(who_zeroes, optimizers) if one is not None for group in one.param_groups]
    return [*chain.from_iterable(group["params"] for group in groups)]


def is_lightnings(method: Any) -> bool:
    """Whether a hook does nothing but what Lightning does."""
    package, _, rest = getattr(method, "__module__", "").partition(".")
    return package in ("lightning", "pytorch_lightning") and rest.endswith(("core.module", "core.hooks", ".callback"))
