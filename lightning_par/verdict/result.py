"""What a run of the Trainer saw, of all that a layout must not change; written down by a callback."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.sharded.tensor import ShardedTensor


@dataclass
class Result:
    """What one rank saw. On ranks other than the first, ``initial``, the gradients and ``checkpoint`` may have gaps."""

    rank: int = 0
    replica: int = 0
    precision: str = ""
    names: dict[str, str] = field(default_factory=dict)  # "optimizer.id" -> the parameter's name
    buffers: list[str] = field(default_factory=list)  # their names
    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)  # one a batch
    step_metrics: list[dict[str, Tensor]] = field(default_factory=list)  # `callback_metrics` after each batch
    metrics: dict[str, Tensor] = field(default_factory=dict)  # `callback_metrics` after the fit
    learning_rates: list[list[float]] = field(default_factory=list)  # one list a batch
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, before they are clipped
    clipped: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    checkpoint: dict[str, Any] = field(default_factory=dict)
    predictions: list[Any] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)  # the module's own state dict once all is over
    draws: bool = False  # whether a step drew random numbers
    undropped: list[str] = field(default_factory=list)  # modules whose dropout was turned off


class Keep:
    """Writes down what happens: a callback, once it is joined to the ``Callback`` of a Lightning.

    Args:
        folder: all ranks share it, for checkpoints.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.result = Result()
        self.stepped = False
        self._generator: Tensor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0}
        self.result.rank, self.result.replica = trainer.global_rank, sampler["rank"]
        self.result.initial = detached(trainer.strategy.lightning_module_state_dict())
        self.result.buffers = [name for name, _ in pl_module.named_buffers()]
        names = {id(p): name for name, p in pl_module.named_parameters()}
        for i, optimizer in enumerate(trainer.optimizers):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.result.names |= {f"{i}.{k}": names.get(id(p), "?") for k, p in enumerate(params)}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._generator = torch.get_rng_state()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.result.draws |= self._generator is not None and not torch.equal(self._generator, torch.get_rng_state())
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else torch.zeros(())
        self.result.losses.append(detached(loss) * trainer.accumulate_grad_batches)
        self.result.step_metrics.append(detached(trainer.callback_metrics))
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.result.learning_rates.append([group["lr"] for group in groups if "lr" in group])
        if trainer.global_step and not self.stepped:
            self.stepped = True
            self.after_first_step(trainer, pl_module)

    def after_first_step(self, trainer: Any, pl_module: Any) -> None:
        """Called once, after the batch with the first optimizer step."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.result.checkpoint = self.save(trainer, "last.ckpt")

    def save(self, trainer: Any, name: str) -> dict[str, Any]:
        """The checkpoint that the run would write now; empty on ranks other than the first."""
        trainer.save_checkpoint(self.folder / name)
        if not trainer.is_global_zero:
            return {}
        return torch.load(self.folder / name, weights_only=False)


class KeepGradients(Keep):
    """`Keep`, with the gradients of the first step before and after they are clipped, whatever the optimizer is."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.stepped:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self.result.gradients |= _gradients(pl_module, mine)

    def after_first_step(self, trainer: Any, pl_module: Any) -> None:
        self.result.clipped = _gradients(pl_module)


def _gradients(module: Any, ids: set[int] | None = None) -> dict[str, Tensor]:
    """Whole gradients of what this rank holds, by name. All ranks must call it."""
    named = [(name, p) for name, p in module.named_parameters() if ids is None or id(p) in ids]
    return {name: _whole(p.grad) for name, p in named if p.grad is not None}


def _whole(x: Tensor) -> Tensor:
    while isinstance(x, ShardedTensor) or hasattr(x, "full_tensor"):  # FSDP's DTensors, too
        x = x.full_tensor("state") if isinstance(x, ShardedTensor) else x.full_tensor()
    return x.detach().clone()


def detached(value: Any) -> Any:
    """A copy of nested tensors; their types stay, so that a value that is no plain tensor is found out."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: detached(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [detached(v) for v in value]
    return value
