"""The trial run of a step leaves no trace, and goes past what a trial can't do."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_par import TensorParallelStrategy
from lightning_par.trial.module_copy import TrainerView
from lightning_par.trial.trial_run import record_step


class Average:
    """A user's own meter; not a module."""

    def __init__(self) -> None:
        self.values: list[Any] = []


class Busy(L.LightningModule):
    """Leaves something everywhere that a step can."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.meter, self.outputs, self.kept = Average(), [], {}
        self.net[0].register_forward_hook(lambda module, args, out: self.kept.update(hidden=out))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        optimizer = self.trainer.optimizers[0]
        self.logger.experiment.log_metrics({"lr": optimizer.param_groups[0]["lr"]})
        self.trainer.should_stop = True
        out = self.net(batch)
        self.meter.values.append(out)
        self.outputs.append(out)
        self.last = out + random.random() + float(np.random.rand()) + torch.rand(1)
        self.counter = getattr(self, "counter", 0) + 1
        self.log("value", out.mean().item())
        if out.sum() > 0:
            out = out * 2
        chosen = out[torch.where(out[:, 0] > 0)]
        return {"loss": chosen.mean() + self.lr_schedulers().get_last_lr()[0] * out.mean()}


def test_nothing_is_left_behind(tmp_path: Any) -> None:
    module = Busy()
    trainer = L.Trainer(logger=CSVLogger(tmp_path), accelerator="cpu", enable_progress_bar=False)
    module.trainer = trainer
    before = {name: x.clone() for name, x in module.state_dict().items()}
    attributes = set(vars(module))
    batch = torch.randn(6, 4)
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    recording = record_step(module, "training_step", batch, shared=(trainer,))
    assert recording.stopped is None, recording.stopped
    assert [event.name for event in recording.events].count("linear") == 2
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert set(vars(module)) == attributes and module.outputs == [] and module.kept == {} and module.meter.values == []
    assert not trainer.should_stop and not trainer.logger.experiment.metrics
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[2]
    assert (np.random.get_state()[1] == generators[1]).all()
    assert all(type(p) is nn.Parameter for p in module.parameters())


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.a(batch)
        bytes(x.untyped_storage())  # the memory, which a fake has not
        return self.b(x).sum()


def test_what_a_trial_can_not_do_ends_it_and_is_told() -> None:
    recording = record_step(Failing(), "training_step", torch.randn(2, 4))
    assert [event.name for event in recording.events].count("linear") == 1
    assert recording.stopped is not None and "test_trial_run.py" in recording.stopped


class Pair(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, layer in ((first, self.a), (second, self.b)):
            self.toggle_optimizer(optimizer)
            loss = layer(batch).sum()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.a, self.b)]


def test_tensors_can_be_copied_deeply_in_a_step() -> None:
    """Torch's own copy of a fake tensor copies its mode, too, and ends in a segmentation fault at times."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.scale = nn.Linear(4, 8), nn.Buffer(torch.ones(()))
            self.defaults = {"total": torch.zeros(())}

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x, layer = copy.deepcopy((batch, self.up))
            assert isinstance(layer.weight, nn.Parameter) and layer.weight is not self.up.weight
            assert layer.weight.fake_mode is self.up.weight.fake_mode  # type: ignore[attr-defined]
            total = copy.deepcopy(self.defaults)["total"] + copy.deepcopy(self.scale)
            return (self.up(x) * layer(x)).sum() + total

    recording = record_step(Copies(), "training_step", torch.ones(2, 4))
    assert recording.stopped is None
    assert [event.name for event in recording.events].count("linear") == 2


def test_manual_optimization_is_recorded_to_its_end() -> None:
    recording = record_step(Pair(), "training_step", torch.randn(3, 2))
    assert recording.stopped is None
    assert [event.name for event in recording.events].count("linear") == 2


class Typed(L.LightningModule):
    """Asserts what it is given, as who checks types does, and goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.net, self.rest = False, nn.Linear(4, 4), nn.Linear(4, 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer) and isinstance(optimizer, torch.optim.SGD)
        assert not isinstance(optimizer, torch.optim.Adam) and isinstance(self.trainer.optimizers[0], torch.optim.SGD)
        assert isinstance(self.logger, CSVLogger) and isinstance(self.trainer.logger, CSVLogger)
        x = self.net(batch)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            x = self.rest(x)
        optimizer.zero_grad()
        self.manual_backward(x.sum())
        optimizer.step()


def test_stand_ins_are_of_the_classes_that_they_stand_for(tmp_path: Any) -> None:
    module = Typed()
    strategy = TensorParallelStrategy(tensor_parallel_size=1)
    trainer = L.Trainer(strategy=strategy, logger=CSVLogger(tmp_path), accelerator="cpu", devices=1)
    module.trainer = trainer
    recording = record_step(module, "training_step", torch.randn(3, 4), shared=(trainer,))
    assert recording.stopped is None, recording.stopped
    assert [event.name for event in recording.events].count("linear") == 2


class Cyclic(nn.Module):
    """A hook keeps the graph that it is part of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.a(batch)
        kept = {"x": x}
        x.register_hook(lambda gradient: kept.update(gradient=gradient))
        return self.b(torch.autograd.grad(x.sum(), x, create_graph=True)[0] + x).sum()


def test_nothing_refers_to_the_parameters_after_a_trial() -> None:
    module = Cyclic()
    gc.disable()
    try:
        assert record_step(module, "training_step", torch.randn(2, 4)).stopped is None
        assert not any(map(weakref.getweakrefcount, module.parameters()))
        for parameter in module.parameters():  # as what is split is put in its place
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
    finally:
        gc.enable()


def test_a_list_of_the_users_on_the_trainer_is_left_as_it_was() -> None:
    trainer = SimpleNamespace(seen=[1])
    view = TrainerView(trainer)
    view.seen.append(2)
    assert view.seen == [1, 2] and trainer.seen == [1]


class Asks(nn.Module):
    """Goes by whether there is a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        made = self.net(batch)
        return made.sin() if made.requires_grad and torch.is_grad_enabled() else made.cos()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


@pytest.mark.parametrize(("step", "last"), [("training_step", "sin"), ("validation_step", "cos")])
@pytest.mark.parametrize("around", [True, False])
def test_autograd_is_on_where_a_run_has_it(step: str, last: str, around: bool) -> None:
    with torch.set_grad_enabled(around):
        names = [event.name for event in record_step(Asks(), step, torch.ones(2, 4)).events]
    assert last in names
