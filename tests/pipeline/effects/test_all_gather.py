"""``self.all_gather`` in a pipeline's step goes over the replicas: to each stage as to one that has the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import HybridParallelStrategy, dry_run
from lightning_par.mesh.replicas import PURPOSE
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.second_step import SecondStep
from tests.helpers.slow import long, slow

C, SAMPLES = 6, 12
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "data": ({"data_parallel_size": 2}, 2),
    "tensor": ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 4),
    "pipeline": ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
    "pipeline-zbv": ({"data_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "zbv"}, 4),
    "pipeline-fsdp": ({"data_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel": "fsdp"}, 4),
    "pipeline-tensor": ({"data_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 8),
    "placement": (
        {"data_parallel_size": 2, "placement": {"layers.0": 0, "layers.2": 1, "layers.4": 1, "layers.5": 0}},
        4,
    ),
}


class Contrastive(LightningModule):
    """Its negatives are those of all replicas; with ``grads``, gradients go back to where these come from."""

    def __init__(self, grads: bool) -> None:
        super().__init__()
        self.grads = grads
        self.layers = nn.Sequential(
            nn.Linear(C, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, C)
        )

    def _loss(self, batch: Tensor) -> Tensor:
        given = self.all_gather(batch).reshape(-1, C)
        hidden = self.layers[:2](batch)
        z = F.normalize(self.layers[2:](hidden), dim=1)
        all_hidden = self.all_gather(hidden, sync_grads=self.grads).flatten(0, 1)
        all_z = self.all_gather({"z": z}, sync_grads=self.grads)["z"].reshape(-1, C)
        own = batch @ given.T > 0.5
        self.log("largest", self.all_gather(z.detach().abs().max()).max(), reduce_fx="max")
        counted = self.all_gather({"samples": len(batch), "share": 0.5, "is_last": True})  # numbers, too
        self.log("counted", counted["samples"].double().sum() + counted["share"].sum() + counted["is_last"].sum())
        self.log("reduced", self.trainer.strategy.reduce(z.detach().abs().mean()))
        return (z @ all_z.T - own.to(z.dtype)).square().mean() + (hidden * all_hidden.mean(0)).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


def _train(layout: dict[str, Any], devices: int, grads: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    seed_everything(0, verbose=False)
    data = torch.randn(SAMPLES, C, dtype=torch.float64)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=HybridParallelStrategy(**layout), max_epochs=2,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Contrastive(grads)
    trainer.fit(module, DataLoader(data, batch_size=3), DataLoader(data, batch_size=3))
    logged = {name: x.detach().clone() for name, x in trainer.callback_metrics.items()}
    weights = trainer.strategy.lightning_module_state_dict()  # all of them on the first rank
    return {name: x.clone() for name, x in weights.items()}, logged


def _by_hand(grads: bool) -> dict[str, Tensor]:
    """What two copies of the model come to, with the samples that Lightning gives each."""
    seed_everything(0, verbose=False)
    data = torch.randn(SAMPLES, C, dtype=torch.float64)
    module = Contrastive(grads).double()
    samplers = [DistributedSampler(data, 2, replica, seed=0) for replica in range(2)]  # type: ignore[arg-type]
    for epoch, step in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [data[[*sampler]][3 * step : 3 * step + 3] for sampler in samplers]
        wanted = [(x @ torch.cat(batches).T > 0.5).double() for x in batches]
        hidden = [module.layers[:2](x) for x in batches]
        zs = [F.normalize(module.layers[2:](x), dim=1) for x in hidden]
        all_z, all_hidden = (torch.cat(x) if grads else torch.cat(x).detach() for x in (zs, hidden))
        loss = sum((z @ all_z.T - own).square().mean() for z, own in zip(zs, wanted)) / 2
        loss = loss + sum((x * all_hidden.mean(0)).mean() for x in hidden) / 2
        module.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.5 * p.grad  # type: ignore[operator]
    return module.state_dict()


@long("pipeline-True")
@slow(but=["pipeline-True", "data-True"])
@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_gather_of_one_another(pool: Pool, name: str, grads: bool) -> None:
    layout, devices = LAYOUTS[name]
    expected = _by_hand(grads)
    _, logged = pool.run(2, _train, LAYOUTS["data"][0], 2, grads)[0]
    found = pool.run(devices, _train, layout, devices, grads)
    torch.testing.assert_close(found[0][0], expected, rtol=0, atol=1e-12)
    for _, values in found:
        torch.testing.assert_close(values, logged, rtol=0, atol=1e-12)


def _sent(layout: dict[str, Any], devices: int) -> tuple[float, int]:
    second = SecondStep()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=HybridParallelStrategy(**layout), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[second],
    )  # fmt: skip
    trainer.fit(Contrastive(True), DataLoader(torch.randn(SAMPLES, C), batch_size=3))
    found = [x.sent for x in second.moved.transfers if (x.axis, x.purpose) == ("data", PURPOSE)]
    return sum(found), len(found)


@long()
@slow(but=["data"])
@pytest.mark.parametrize("name", ["data", "tensor", "pipeline", "placement"])
def test_a_dry_run_counts_what_is_gathered(pool: Pool, name: str) -> None:
    layout, devices = LAYOUTS[name]
    for rank, (sent, messages) in enumerate(pool.run(devices, _sent, layout, devices)):
        dried = dry_run(lambda: Contrastive(True), torch.randn(3, C), layout, devices=devices, rank=rank)
        assert dried.sent["data", PURPOSE] == sent > 0
        assert sum(count for key, count in dried.messages.items() if key[:2] == ("data", PURPOSE)) == messages


class _Centred(nn.Module):
    """A layer that is given the LightningModule."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(C, C), [module]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - self.held[0].all_gather(y.detach().mean(0)).reshape(-1, C).mean(0)  # type: ignore[no-any-return]


class _WithCentred(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(C, C), _Centred(self), nn.Tanh(), nn.Linear(C, C))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


def _logged(layout: dict[str, Any], devices: int) -> dict[str, Tensor]:
    seed_everything(0, verbose=False)
    data = torch.randn(SAMPLES, C, dtype=torch.float64)
    strategy: Any = HybridParallelStrategy(**layout) if layout else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_WithCentred(), DataLoader(data, batch_size=3), DataLoader(data, batch_size=3))
    return {name: x.detach().clone() for name, x in trainer.callback_metrics.items()}


@slow(but=["pipeline"])
@pytest.mark.parametrize(
    ("layout", "one"),
    [({"pipeline_parallel_size": 2}, {}), (LAYOUTS["pipeline"][0], LAYOUTS["data"][0])],
    ids=["pipeline", "data x pipeline"],
)
def test_a_layer_that_gathers_leaves_what_is_logged(pool: Pool, layout: Any, one: Any) -> None:
    replicas = len(one) + 1
    expected = pool.run(replicas, _logged, one, replicas)[0]
    assert {*expected} == {"loss", "val"}
    for values in pool.run(2 * replicas, _logged, layout, 2 * replicas):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)


class _OwnGroup(Contrastive):
    def setup(self, stage: str) -> None:
        self.group = dist.new_group([0, 2])

    def _loss(self, batch: Tensor) -> Tensor:
        z = self.layers(batch)
        return (z - self.all_gather(z.detach(), group=self.group).mean(0)).square().mean()  # type: ignore[no-any-return]


def _gathers_over_a_group() -> None:
    layout, devices = LAYOUTS["pipeline"]
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=HybridParallelStrategy(**layout), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_OwnGroup(False), DataLoader(torch.randn(SAMPLES, C), batch_size=3))


def test_a_group_of_the_users_own_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="is called within a step, of which each rank of the"):
        pool.run(4, _gathers_over_a_group)
