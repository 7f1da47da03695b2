"""What a pipeline can't do is refused at once, on all ranks, with the user's own names and numbers and a way out.

Elsewhere: cuts of all kinds without processes (`test_stage_plan`), what a step may not store (`test_effects`).
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long


class Net(LightningModule):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), norm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d)


class Contrastive(Net):
    """Every sample of the batch is a negative of the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = F.normalize(self(batch), dim=-1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class FreezesAround(Net):
    """Of two calls of a layer one trains it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.norm.requires_grad_(False)
        h = self.norm(h)
        self.norm.requires_grad_(True)
        return self.down(self.norm(h))


class FreezesLater(Net):
    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.up.weight.requires_grad = False
        return self(x).pow(2).mean()


class HooksWeight(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.down.weight.register_hook(lambda grad: 2 * grad)
        return super().training_step(batch, batch_idx)


class KeepsAtTheStart(Net):
    def on_fit_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        away = sum((p - kept).square().sum() for p, kept in zip(self.parameters(), self.kept, strict=True))
        return super().training_step(batch, batch_idx) + away


class HooksBackward(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.down.register_full_backward_hook(lambda layer, grads, outer: (2 * grads[0],))
        return super().training_step(batch, batch_idx)


class Fetches(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self(next(dataloader_iter)[0]).square().mean()


class Prunes(Net):
    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured")]


class Rescales(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x))
        self.norm.weight.data.mul_(0.9)
        return self.down(h)


class RescalesLater(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.down.weight.data.add_(torch.rand_like(self.down.weight))
        return super().forward(x)


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if h.sum() > 0:  # on the first stage
            h = 2 * h
        return self.down(self.norm(h))


class Scales(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.norm(h / float(h.detach().abs().max())))


class Torn(Net):
    """Writes into a view in the second stage, where the whole tensor comes from the first one, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        left = h[:, :8]
        y = self.norm(torch.cat([left, left], 1))
        left += 1.0
        return self.down(h + y)


class AddsOne(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return super().forward(x)


class WritesBatch(Net):
    """A module of the first stage writes into the batch, which the second one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = AddsOne(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))) + x


class Later(Net):
    """Only its second batch asks for a value of another stage."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.trainer.global_step == 1:
            h = h * h.max().item()
        return self.down(self.norm(h))


class EmptyBatch(Net):
    """Leaves out all samples of the second batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[:0] if self.trainer.global_step == 1 else batch


def line(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"test_input.py:{first + next(i for i, one in enumerate(lines) if text in one)}"


def run(module: Callable[[], LightningModule], **options: Any) -> str:
    """What was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = Trainer(
                accelerator="cpu",
                devices=int(os.environ["WORLD_SIZE"]),
                strategy=PipelineParallelStrategy(**options),
                max_steps=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module(), DataLoader(torch.randn(8, 8), batch_size=4))  # type: ignore[arg-type]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


WHO = "PipelineParallelStrategy over 2 ranks with schedule"
ELSEWHERE = "use TensorParallelStrategy"
REFUSED: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], list[str]]] = {
    "sizes": (
        Net,
        dict(pipeline_parallel_size=2, data_parallel_size=2),
        ["data_parallel_size=2 * pipeline_parallel_size=2 = 4, but the Trainer starts 2 processes"],
    ),
    "unknown schedule": (
        Net,
        dict(schedule="1F1B"),
        [
            "There is no schedule '1F1B'; there are 'gpipe', '1f1b', 'interleaved_1f1b', 'interleaved_zero_bubble', "
            "'zbv'"
        ],
    ),
    "no microbatches": (Net, dict(microbatches=0), ["microbatches must be a positive int or 'auto', got 0"]),
    "too few modules for a schedule": (
        Net,
        dict(schedule="interleaved_1f1b"),
        [f"{WHO} 'interleaved_1f1b' needs 4 stages, but Net has only 3 modules", "up, norm, down", "Use fewer devices"],
    ),
    "too few stages for a schedule": (
        Net,
        dict(schedule="zbv", stages={"up": 0, "norm": 0, "down": 1}),
        [
            "stages={'up': 0, 'norm': 0, 'down': 1} names 2 stages",
            "Schedule 'zbv' has two stages a rank: stages=2 must be 2 * ranks = 4",
        ],
    ),
    "too many stages": (Net, dict(stages=["norm", "down"]), ["stages=['norm', 'down'] names 3 stages", "ranks=2"]),
    "a glob that matches nothing": (
        Net,
        dict(stages={"uqp": 0, "[nd]*": 1}),
        ["stages names 'uqp', which matches no module that the step of Net calls. Did you mean 'up'?"],
    ),
    "a module left out": (
        Net,
        dict(stages={"up": 0, "down": 1}),
        ["stages gives 'norm' no stage: it names 'up': 0, 'down': 1. Add 'norm' or a pattern that matches it."],
    ),
    "samples mix in a module": (
        Normed,
        dict(microbatches=2),
        [
            "microbatches=2: the samples of a batch need one another",
            "'norm",
            "Write microbatches='auto', which takes 1",
        ],
    ),
    "samples mix in the loss": (
        Contrastive,
        dict(microbatches=2),
        ["microbatches=2: the samples of a batch need one another: `matmul`", "microbatches='auto'"],
    ),
    "manual optimization": (
        Manual,
        dict(microbatches=2),
        ["microbatches=2: Manual optimizes by hand (automatic_optimization = False)", "Or write microbatches='auto'"],
    ),
    "a step that fetches its batches": (
        Fetches,
        {},
        ["training_step takes `dataloader_iter`", "Write `training_step(self, batch, batch_idx)`, or"],
    ),
    "pruning": (
        Prunes,
        {},
        ["ModelPruning replaces weights by masked ones while it trains", "Use TensorParallelStrategy, or prune the"],
    ),
    "a parameter that is written into in each microbatch": (
        Rescales,
        dict(microbatches=2),
        [line(Rescales.forward, "mul_"), "'norm.weight' is written into at each run", "microbatches='auto'"],
    ),
    "a view of a value of another stage": (
        Torn,
        dict(stages=["norm"], microbatches=2),
        [line(Torn.forward, "left += 1.0"), "a value from another device is written into here", "x = x + y"],
    ),
    "a module that writes into the batch": (
        WritesBatch,
        dict(microbatches=2),
        [line(WritesBatch.forward, "self.down"), "a tensor is used here into which a module wrote in place", "x.clone"],
    ),
    "copies of weights from on_fit_start, in the step": (
        KeepsAtTheStart,
        {},
        [line(KeepsAtTheStart.training_step, "(p - kept)"), "such as on_fit_start, made of the", "Make it in `setup`"],
    ),
    "a hook on a parameter, of the step": (
        HooksWeight,
        dict(microbatches=2),
        [line(HooksWeight.training_step, "register_hook"), "Register it before, as in on_fit_start or __init__"],
    ),
    "a hook on a module's gradients, of the step": (
        HooksBackward,
        dict(microbatches=2),
        ["The step registers a hook on the gradients of a Linear", "register it in on_fit_start or __init__"],
    ),
    "a layer that the step freezes for a call": (
        FreezesAround,
        dict(microbatches=2),
        [line(FreezesAround.forward, "(False)"), "changes whether a parameter requires a gradient", ELSEWHERE[4:]],
    ),
    "an empty batch": (EmptyBatch, {}, ["training_step: the batch is empty", "0 samples"]),
}


def _refused(name: str) -> str:
    module, options, _ = REFUSED[name]
    return run(module, **options)


@long("an empty batch")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_is_refused_alike_on_all_ranks_at_once(name: str, pool: Pool) -> None:
    first, second = pool.run(2, _refused, name)
    assert first == second and first.startswith(("ValueError: ", "TypeError: ", "NotImplementedError: "))
    for part in REFUSED[name][2]:
        assert part in first


class Penalty(Net):
    """A hook keeps a tensor that the loss goes by, from the second step on."""

    mean: Tensor | None = None
    penalty: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        mean = output.mean()
        if self.mean is not None:
            self.penalty = (mean - self.mean).square()
        self.mean = mean.detach()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.penalty = 0.0
        return super().training_step(batch, batch_idx) + self.penalty


def test_a_gradient_for_what_a_hook_keeps_later_is_refused(pool: Pool) -> None:
    errors = pool.run(2, run, Penalty)
    assert any("The loss goes by what a hook of 'up' or its own code stores in self" in error for error in errors), (
        errors
    )


def _too_many_ranks() -> str:
    return run(Net)


def test_more_ranks_than_modules(pool: Pool) -> None:
    (error,) = set(pool.run(4, _too_many_ranks))
    assert "PipelineParallelStrategy over 4 ranks with schedule '1f1b' needs 4 stages, but Net has only 3" in error
    assert "up, norm, down" in error


def test_arguments_are_checked_when_the_strategy_is_made() -> None:
    with pytest.raises(ValueError, match="microbatches must be a positive int or 'auto', got True"):
        PipelineParallelStrategy(microbatches=True)
    with pytest.raises(TypeError, match="stages must be a dict .* or a list of module names, got str"):
        PipelineParallelStrategy(stages="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="There is no schedule 'gpipes'"):
        PipelineParallelStrategy(schedule="gpipes")  # type: ignore[arg-type]


@long("Contrastive")
@pytest.mark.parametrize("module", [Normed, Contrastive])
def test_auto_takes_one_microbatch_where_samples_mix(module: Callable[[], LightningModule], pool: Pool) -> None:
    assert pool.run(2, run, module) == ["", ""]


@long(but=["FreezesLater"])
@pytest.mark.parametrize("module", [RescalesLater, Branches, Scales, Later, FreezesLater])
def test_a_batch_without_a_schedule_is_trained_nevertheless(module: Callable[[], LightningModule], pool: Pool) -> None:
    assert pool.run(2, run, module) == ["", ""]
