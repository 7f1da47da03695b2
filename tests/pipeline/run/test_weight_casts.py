"""In mixed precision a stage copies each weight once a step, and computes what copies of each microbatch give."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline.run.weight_casts import WeightCasts
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.sharded.functions import operator_of
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

WIDTH, LAYERS, MICROBATCHES = 8, 4, 4


class Copies(TorchDispatchMode):
    """Counts casts of what is as large as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if operator_of(func) == "_to_copy" and result.dtype == torch.bfloat16 and args[0].shape == (WIDTH, WIDTH):
            self.count += 1
        return result


def _losses(weight: Tensor, parts: tuple[Tensor, ...], casts: WeightCasts, kept: bool) -> None:
    with casts.kept({"weight": weight}) if kept else nullcontext():
        losses = []
        for part in parts:
            with casts.context():
                with torch.no_grad():  # a copy that is made here has a gradient later
                    F.linear(part, weight)
                losses.append(F.linear(part, weight).square().mean())
        for loss in losses:
            loss.backward()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("within", [False, True], ids=["outermost", "within another context"])
def test_copies_are_kept_for_a_step_and_no_longer(within: bool, kept: bool) -> None:
    with torch.autocast("cpu", enabled=False) if within else nullcontext():
        _check_copies(kept)
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


def _check_copies(kept: bool) -> None:
    weight, parts = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.randn(8, WIDTH).chunk(4)
    casts = WeightCasts("cpu", MixedPrecision("bf16-mixed", "cpu").forward_context)
    assert casts.lowers
    for _ in range(2):
        with Copies() as copies:
            _losses(weight, parts, casts, kept)
        assert copies.count == (1 if kept else 2 * len(parts))
    found, weight.grad = weight.grad, None
    for _ in range(2):
        _losses(weight, parts, casts, False)
    assert weight.grad is not None and found is not None and torch.equal(found, weight.grad)


def test_a_weight_that_is_written_into_meanwhile_is_an_error() -> None:
    weight, casts = nn.Parameter(torch.ones(2, 2)), WeightCasts("cpu", nullcontext)
    assert not casts.lowers
    with pytest.raises(RuntimeError, match="'layer.weight' was written into"), casts.kept({"layer.weight": weight}):
        with torch.no_grad():
            weight.mul_(2)


class Module(L.LightningModule):
    """A stack of layers.

    Args:
        kind: "plain"; "reused": the first layer is called twice; "tied": a weight is looked up in, and multiplied with;
            "checkpointed": layers are computed again in backward; "recurrent": one takes its weights at each place.
    """

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.recurrent = nn.GRU(WIDTH, WIDTH) if kind == "recurrent" else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.kind == "checkpointed" else layer(x))
        if self.recurrent is not None:
            x = self.recurrent(x.unsqueeze(-2).expand(-1, 5, -1).transpose(0, 1))[0].sum(0)
        if self.kind == "reused":
            x = self.layers[-1](x)
        return F.linear(x, self.embedding.weight) if self.kind == "tied" else x

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(Callback):
    """Casts of weights in the last step."""

    def __init__(self) -> None:
        self.copies = Copies()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.copies.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.batch_idx == 2:
            self.copies.__exit__(None, None, None)


def _fit(kind: str, schedule: str, keeps: bool, precision: Any = "bf16-mixed") -> tuple[int, dict[str, Tensor]]:
    torch.manual_seed(0)
    before, counts = WeightCasts.kept, Counts()
    if not keeps:
        WeightCasts.kept = lambda self, weights: nullcontext()  # type: ignore[method-assign, assignment, return-value]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, strategy = Module(kind), PipelineParallelStrategy(schedule=schedule, microbatches=MICROBATCHES)
            trainer = Trainer(
                accelerator="cpu", devices=2, max_steps=3, strategy=strategy, precision=precision, callbacks=[counts],
                logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, DataLoader(torch.arange(12) % WIDTH, batch_size=4))
    finally:
        WeightCasts.kept = before  # type: ignore[method-assign]
    return counts.copies.count, module.state_dict()


@slow(but=["gpipe-plain"])
@pytest.mark.parametrize("kind", ["plain", "reused", "tied", "checkpointed", "recurrent"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_a_stage_copies_a_weight_once_and_computes_the_same(schedule: str, kind: str, pool: Pool) -> None:
    kept, apart = (pool.run(2, _fit, kind, schedule, keeps) for keeps in (True, False))
    for (_, weights), (_, others) in zip(kept, apart, strict=True):
        assert all(torch.equal(x, others[name]) for name, x in weights.items())
    counts = [sum(count for count, _ in ranks) for ranks in (kept, apart)]
    again = 2 if kind == "checkpointed" else 1
    weights = LAYERS + (kind in ("reused", "tied"))
    if schedule == "gpipe":
        # where a weight is used twice, its gradients would be summed up in low precision
        once = kind not in ("reused", "recurrent")
        assert counts == [weights if once else weights * MICROBATCHES, weights * MICROBATCHES * again]
    else:
        assert counts[0] <= counts[1]
