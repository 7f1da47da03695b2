"""A small model trained for a few steps, with what one of its steps took."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from tests.gpu_rules import report, waits
from tests.gpu_rules.layouts import LAYOUTS
from tests.gpu_rules.queues import synchronize
from tests.gpu_rules.waits import Waits
from tests.helpers.accelerator import accelerator, devices
from tests.helpers.models import MODELS

STEPS = 4


@dataclass
class Trained:
    """What `train` gives.

    Attributes:
        losses: of each step.
        weights: at the end, whole.
        waits: of the third step, from the end of the second on.
        entries: that the third step put into queues: collectives, messages, and batches.
        groups: how many process groups this rank is in.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    waits: Waits
    entries: int
    groups: int


class OneStep(Callback):
    """Watches the step after ``steps`` of them, with all that lies between two steps."""

    def __init__(self, after: int = 2) -> None:
        self.after = after
        self.losses: list[Tensor] = []
        self.entries = 0
        self.waits: Waits = Waits()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        step = len(self.losses) + 1
        if step == self.after + 1:
            self.counting.__exit__(None, None, None)
            self.entries = len(report.current().issued) - self.before
        self.losses.append(outputs["loss"].detach())
        if step == self.after:
            self.before = len(report.current().issued)
            self.counting = waits.counted()
            self.waits = self.counting.__enter__()


def train(layout: str | None, case: str = "gpt_tied", sync: bool = False, **options: Any) -> Trained:
    """Train ``case`` of the models under ``layout``, None for one device, on this rank.

    Args:
        layout: a name in `LAYOUTS`.
        case: a name in `MODELS`.
        sync: whether each block waits for the device before it runs, as an allocator that must free memory does.
        options: of the Trainer.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(1234)
    module, step = MODELS[case].module(), OneStep()
    for name, block in module.named_modules():
        if sync and re.fullmatch(r"blocks\.\d+", name):
            block.register_forward_pre_hook(lambda *_: synchronize())
    where: dict[str, Any] = dict(devices=1)
    if layout is not None:
        from lightning_par import HybridParallelStrategy, LayerPlacementStrategy

        arguments = LAYOUTS[layout]
        strategy = LayerPlacementStrategy if "placement" in arguments else HybridParallelStrategy
        where = dict(**devices(), strategy=strategy(**arguments))
    trainer = Trainer(
        accelerator=accelerator(),
        callbacks=[step],
        max_steps=STEPS,
        **{**where, **_DEFAULTS, **options},
    )
    batches = DataLoader(MODELS[case].data(0), MODELS[case].batch_size)  # type: ignore[arg-type,var-annotated]
    trainer.fit(module, batches)
    weights = {name: x.detach().cpu().clone() for name, x in module.state_dict().items()}
    groups = len(report.current().groups)
    return Trained([float(loss) for loss in step.losses], weights, step.waits, step.entries, groups)


_DEFAULTS: dict[str, Any] = dict(
    precision="64-true", gradient_clip_val=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, use_distributed_sampler=False,
)  # fmt: skip


def differences(one: Trained, other: Trained) -> float:
    """The largest distance of a weight, by the largest weight."""
    largest = max(x.abs().max().item() for x in one.weights.values())
    return max((one.weights[name] - x).abs().max().item() for name, x in other.weights.items()) / largest
