"""Hooks of a module that read and write weights and gradients between two steps: what a dry run counts of them, against
real ranks, by purpose."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, dry_run, ledger
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": STAGES,
    "tensor": {"tensor_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
    "stages_whole": STAGES | {"microbatches": 1},
}
OF_THE_RUN = ("batch", "has_batch", "effects", "aliases")
"""Purposes of what is told of the step itself, and of whether something still looks at a copy."""


class Twins(L.LightningModule):
    """A network and its average, each of which may be on a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - self.teacher(batch[0]).detach()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Averages(Twins):
    def on_train_batch_end(self, *args: Any) -> None:
        for p, q in zip(self.net.parameters(), self.teacher.parameters()):
            q.data = 0.9 * q.data + 0.1 * p.data


class AveragesInPlace(Twins):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for p, q in zip(self.net.parameters(), self.teacher.parameters()):
            q.mul_(0.9).add_(p, alpha=0.1)


class Loads(Twins):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        held = self.teacher.state_dict()
        self.teacher.load_state_dict({name: (x + held[name]) / 2 for name, x in self.net.state_dict().items()})


class LogsNorms(Twins):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))


class ClipsByHand(Twins):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        nn.utils.clip_grad_value_(self.parameters(), 0.1)


class Decays(Twins):
    def on_after_backward(self) -> None:
        for p in self.net.parameters():
            assert p.grad is not None
            p.grad = p.grad + 0.01 * p.detach()


class LogsWeights(Twins):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", torch.stack([p.detach().norm() for p in self.net.parameters()]).sum())


KINDS = [Averages, AveragesInPlace, Loads, LogsNorms, ClipsByHand, Decays, LogsWeights]
ROWS = [(kind, layout) for kind in KINDS for layout in LAYOUTS]
BATCH = [torch.ones(4, 8)]


class _Step(L.Callback):
    """What moves from the start of the second batch to that of the third."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.open = ledger()
            self.moved = self.open.__enter__()
        elif batch_idx == 2:
            self.open.__exit__(None, None, None)


def _real(kind: type[Twins], layout: dict[str, Any]) -> tuple[dict[Any, float], dict[Any, int]]:
    step = _Step()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(verify=False, **layout), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[step], use_distributed_sampler=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(kind(), DataLoader([BATCH] * 3, batch_size=None))  # type: ignore[arg-type]
    sent: dict[Any, float] = defaultdict(float)
    for transfer in step.moved.transfers:
        sent[transfer.axis, transfer.purpose] += transfer.sent
    return dict(sent), dict(step.moved.counts())


@slow(but=["LogsNorms-stages", "LogsNorms-tensor"])
@pytest.mark.parametrize(("kind", "layout"), ROWS, ids=[f"{kind.__name__}-{layout}" for kind, layout in ROWS])
def test_a_dry_run_counts_what_hooks_ask_of_other_ranks(kind: type[Twins], layout: str, pool: Pool) -> None:
    for rank, (sent, messages) in enumerate(pool.run(2, _real, kind, LAYOUTS[layout])):
        dried = dry_run(kind, BATCH, LAYOUTS[layout], devices=2, rank=rank)
        assert _of_hooks(dried.sent) == _of_hooks(sent)
        assert _of_hooks(dried.messages) == _of_hooks(messages)


def _of_hooks(found: Any) -> dict[Any, float]:
    return {key: count for key, count in found.items() if key[1] not in OF_THE_RUN}
