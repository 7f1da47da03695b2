"""A step of a module, as the strategy was asked to run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.python_state.nested_tensors import tensors_in

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """A step of a module, as the strategy was asked to run it.

    Args:
        module: the LightningModule.
        name: of the method.
        batch: the whole batch.
        rest: what the method takes beside the batch.
        context: entered around the step, for precision.
        grad: whether gradients will be asked for.
        device: where parameters live, or would live.
        shared: objects that a copy of the module shares with it.
        starts: whether hooks that Lightning has not called yet are called on copies before they run the step.
        untried: of a plan, which takes little memory: what its trials left out that a run would find out. None: it is a
            run's.
        lent: values of buffers that other ranks hold, by the id of what stands for them here, for a trial of the step.
    """

    module: nn.Module
    name: str
    batch: Any
    rest: tuple[Any, ...]
    context: Context
    grad: bool
    device: torch.device
    shared: tuple[Any, ...] = ()
    starts: bool = False
    untried: list[str] | None = None
    lent: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples in the batch: the size of its first tensor; 0 where it has none."""
        return next((x.shape[0] for x in tensors_in(self.batch) if x.ndim), 0)

    @property
    def by_hand(self) -> bool:
        """Whether it runs its backwards and optimizers itself."""
        return self.grad and optimizes_by_hand(self.module)


def optimizes_by_hand(module: nn.Module) -> bool:
    """Whether the ``training_step`` of ``module`` runs its backwards and optimizers itself."""
    return not getattr(module, "automatic_optimization", True)


def call_step(module: nn.Module, step: Step) -> Any:
    """What the method of ``module`` returns, which is that of ``step`` or a copy of it."""
    return getattr(module, step.name)(step.batch, *step.rest)


def loss_in(result: Any) -> Tensor | None:
    """The loss that a training step returned."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    return result if isinstance(result, Tensor) else None
