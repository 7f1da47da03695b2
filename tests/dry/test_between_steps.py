"""Hooks of a module that read and write weights and gradients between two steps: what a dry run counts of them, against
real ranks, by purpose."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, dry_run, ledger
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": STAGES,
    "tensor": {"tensor_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
    "stages_whole": STAGES | {"microbatches": 1},
    "stages_tensor": STAGES | {"tensor_parallel_size": 2},
    "stages_fsdp": STAGES | {"data_parallel": "fsdp"},
}
PRODUCTS = ("stages_tensor", "stages_fsdp")


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


class Vector(Twins):
    """Weights become views of one vector, which their ranks share memory with, and the others copy."""

    def on_train_batch_end(self, *args: Any) -> None:
        vector_to_parameters(parameters_to_vector(self.net.parameters()) * 0.99, self.net.parameters())


class Keeps(Twins):
    """Has what was made the data of weights, and gradients, which goes on as these do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = [torch.ones(p.shape) for p in self.net.parameters()]
        for p, grad in zip(self.net.parameters(), self.grads):
            p.grad = grad

    def on_train_batch_end(self, *args: Any) -> None:
        self.datas = [p.detach() * 0.9 + p.detach().mean() for p in self.net.parameters()]
        for p, data in zip(self.net.parameters(), self.datas):
            p.data = data


class Views(Twins):
    """Gradients become views of one vector, which nobody keeps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        vector, start = parameters_to_vector([p.grad for p in self.net.parameters()]), 0
        for p in self.net.parameters():
            p.grad = vector[start : start + p.numel()].view_as(p)
            start += p.numel()


class Zeroes(Twins):
    """Gives weights memory that has values."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.zeros = torch.zeros(8, 8)
        self.net[0][0].weight.data = self.zeros  # type: ignore[index, operator, union-attr]


class GivesGradients(Twins):
    """Gives gradients memory that is kept, which the clip writes into then."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = [torch.ones(p.shape) for p in self.net.parameters()]
        for p, grad in zip(self.net.parameters(), self.grads):
            assert p.grad is not None
            p.grad.data = grad
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)


class Counts(Twins):
    """Has what goes by its count on the stage of one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = AveragedModel(self.net).requires_grad_(False)  # type: ignore[assignment]

    def on_train_batch_end(self, *args: Any) -> None:
        self.teacher.update_parameters(self.net)  # type: ignore[operator]


class CountsByLayer(Twins):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            layer.register_buffer("count", torch.tensor(3.0))

    def on_train_batch_end(self, *args: Any) -> None:
        for layer in self.net:
            layer.count = layer.count + 1
            layer.count.mul_(2)
            if layer.count < 8:
                raise ValueError("nothing was counted")


class LogsMoments(Twins):
    """Asks the optimizer, of which some ranks have nothing."""

    def on_train_batch_end(self, *args: Any) -> None:
        states = self.optimizers().state  # type: ignore[union-attr]
        self.moments = torch.stack([states[p]["momentum_buffer"].norm() for p in self.net.parameters()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class Stores(Twins):
    """The step stores what hooks take, which all ranks have then, and appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        made = self.net(batch[0])
        loss = (made - self.teacher(batch[0]).detach()).square().mean()
        self.last = loss.detach()
        self.losses.append({"loss": self.last, "made": made.detach()})
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.last.shape == () and self.losses.pop()["made"].shape == BATCH[0].shape
        for p in self.net.parameters():
            p.data.mul_(self.last)


class Copies(Twins):
    """Adds a copy of the network to itself."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.snapshot = copy.deepcopy(self.net)


class Hears(Twins):
    """Stores what a layer makes, in a hook of its own."""

    def on_fit_start(self) -> None:
        def hear(module: nn.Module, given: Any, made: Tensor) -> None:
            self.made = made.detach()

        self.teacher[3].register_forward_hook(hear)


KINDS = [
    Vector,
    Keeps,
    Views,
    Zeroes,
    GivesGradients,
    Counts,
    CountsByLayer,
    LogsMoments,
    Stores,
    Copies,
    Averages,
    AveragesInPlace,
    Loads,
    LogsNorms,
    ClipsByHand,
    Decays,
    LogsWeights,
]
MISSED = [(Stores, "stages_whole")]
"""Of which a dry run counts more than is sent: 4 bytes of a value that is kept twice."""
ROWS = [(kind, layout) for kind in KINDS for layout in LAYOUTS if (kind, layout) not in MISSED]
FAST = "LogsNorms-stages LogsNorms-tensor Vector-stages Counts-stages Stores-stages Zeroes-tensor Counts-stages_tensor"
BATCH = [torch.ones(4, 8)]


class _Step(L.Callback):
    """What moves from the start of the second batch to that of the third."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.open = ledger()
            self.moved = self.open.__enter__()
        elif batch_idx == 2:
            self.open.__exit__(None, None, None)


def _real(
    kind: Callable[[], Twins], layout: dict[str, Any], devices: int = 2
) -> tuple[dict[Any, float], dict[Any, int]]:
    step = _Step()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=HybridParallelStrategy(verify=False, **layout), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[step], use_distributed_sampler=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(kind(), DataLoader([BATCH] * 3, batch_size=None))  # type: ignore[arg-type]
    sent: dict[Any, float] = defaultdict(float)
    for transfer in step.moved.transfers:
        sent[transfer.axis, transfer.purpose] += transfer.sent
    return dict(sent), dict(step.moved.counts())


@long(but=["Zeroes-tensor"])
@slow(but=FAST.split())
@pytest.mark.parametrize(("kind", "layout"), ROWS, ids=[f"{kind.__name__}-{layout}" for kind, layout in ROWS])
def test_a_dry_run_counts_what_hooks_ask_of_other_ranks(kind: type[Twins], layout: str, pool: Pool) -> None:
    devices = 4 if layout in PRODUCTS else 2
    for rank, (sent, messages) in enumerate(pool.run(devices, _real, kind, LAYOUTS[layout], devices)):
        dried = dry_run(kind, BATCH, LAYOUTS[layout], devices=devices, rank=rank)
        assert dried.sent == sent
        assert dried.messages == messages


class OneMemory(Twins):
    """Makes one memory of two weights that are split along different dims."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[1][0].weight.data = self.net[0][0].weight.data  # type: ignore[index, union-attr]


def test_weights_that_cannot_share_memory_are_refused_as_in_a_run() -> None:
    with pytest.raises(NotImplementedError, match=r"were made one memory, as `a\.data = b\.data` does"):
        dry_run(OneMemory, BATCH, LAYOUTS["tensor"], devices=2)


def test_what_a_layers_hook_stores_is_sent_by_the_rank_of_the_layer() -> None:
    found = dry_run(Hears, BATCH, STAGES, devices=2, rank=1)
    assert found.sent["pipeline", "state of units"] == BATCH[0].numel() * 4


class Refused(Twins):
    """Its step keeps what a run refuses, behind what the first rank runs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        if self.way == "weight":
            self.old = self.net[0][0].weight  # type: ignore[index, union-attr]
        elif self.way == "function":
            self.function = lambda: loss
        else:
            self.log("vector", loss.expand(3))
        return loss


REFUSED = {
    "weight": r"The step assigns modules or parameters: self\.old",
    "function": r"self\.function can't be sent to the other ranks of the pipeline: Can't pickle local object",
    "vector": r"the tensor must have a single element",
}


@long(but=["vector"])
@pytest.mark.parametrize("way", REFUSED)
def test_what_a_step_must_not_keep_is_refused_on_all_ranks_as_in_a_run(way: str) -> None:
    for rank in range(2):
        with pytest.raises((TypeError, ValueError), match=REFUSED[way]):
            dry_run(lambda: Refused(way), BATCH, STAGES, devices=2, rank=rank)


@slow()
@pytest.mark.parametrize("way", REFUSED)
def test_a_run_refuses_them_so(way: str, pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=REFUSED[way]):
        pool.run(2, _real, partial(Refused, way), STAGES)
