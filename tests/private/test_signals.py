"""What a Trainer does about signals, and how far its loops are."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.private import signals
from lightning_par.private.trainer import about_to_begin_batch
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace
from tests.endurance.signal_job import Loader
from tests.helpers.slow import slow

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)
OPTIONS: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
OPTIONS.update(enable_model_summary=False, num_sanity_val_steps=0)
RUNS: dict[str, tuple[dict[str, Any], str | None]] = {
    "epochs": (dict(max_epochs=3), None),
    "steps": (dict(max_steps=10, max_epochs=-1), None),
    "often": (dict(max_epochs=3, val_check_interval=2), None),
    "always": (dict(max_epochs=3, val_check_interval=1), None),
    "windows": (dict(max_epochs=3, accumulate_grad_batches=2, val_check_interval=2), None),
    "across": (dict(max_steps=10, max_epochs=-1, val_check_interval=3, check_val_every_n_epoch=None), None),
    "no-validation": (dict(max_epochs=3, limit_val_batches=0), None),
    "plateau": (dict(max_epochs=3, val_check_interval=2), "step"),
}


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Run:
    """A run on one device that can be stopped as a strategy does it.

    Args:
        namespace: its Lightning.
        options: of the Trainer.
        plateau: the interval of a scheduler by a metric, None for one that goes by steps.
        path: gets the checkpoint.
    """

    def __init__(self, namespace: Namespace, options: dict[str, Any], plateau: str | None, path: Path) -> None:
        self.namespace, self.options, self.plateau, self.path = namespace, options, plateau, path

    def module(self) -> Any:
        plateau = self.plateau

        class Net(self.namespace.from_pytorch("core", "LightningModule")):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layer, self.seen = nn.Linear(3, 1, dtype=torch.float64), []

            def loss(self, batch: Tensor) -> Tensor:
                return (self.layer(batch) - batch.sum(-1, keepdim=True)).square().mean()

            def training_step(self, batch: Tensor) -> Tensor:
                return self.loss(batch)

            def validation_step(self, batch: Tensor) -> None:
                self.log("loss", self.loss(batch))

            def on_validation_end(self) -> None:
                self.seen.append(float(self.trainer.callback_metrics["loss"]))

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
                if plateau is None:
                    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
                    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
                config = {"scheduler": scheduler, "monitor": "loss", "interval": plateau, "strict": False}
                return {"optimizer": optimizer, "lr_scheduler": config}

        return Net()

    def fit(self, batch: int | None = None, validation: tuple[int, int] | None = None, resume: bool = False) -> Any:
        """Train; what came out, None where it was stopped.

        Args:
            batch: before which it is stopped, or as soon after it as it can.
            validation: the same, of training batches before and of batches within the validation behind them.
            resume: from where it was stopped.
        """
        path, stop = self.path, self.namespace.from_pytorch("utilities.exceptions", "SIGTERMException")

        class Stopped(self.namespace.from_pytorch("strategies", "SingleDeviceStrategy")):  # type: ignore[misc]
            @property
            def world_size(self) -> int:
                trainer = None if self.lightning_module is None else self.lightning_module._trainer
                if batch is None or not about_to_begin_batch(sys._getframe(1)):
                    return 1
                if trainer.fit_loop.total_batch_idx + 1 >= batch and not signals.is_accumulating(trainer):
                    again = signals.validates_once_more(trainer)
                    if not (again and signals.steps_plateau_again(trainer)):
                        if again:
                            signals.count_one_step_less(trainer)
                        self.stop()
                return 1

            @world_size.setter
            def world_size(self, value: int) -> None:
                pass

            def validation_step(self, *args: Any, **kwargs: Any) -> Any:
                trainer = self.lightning_module.trainer
                done = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.completed
                if validation == (trainer.fit_loop.total_batch_idx + 1, done):
                    signals.begin_validation_anew(trainer)
                    self.stop()
                return super().validation_step(*args, **kwargs)

            def stop(self) -> None:
                self.lightning_module.trainer.save_checkpoint(path)
                raise stop

        trainer = self.namespace.from_pytorch("trainer", "Trainer")(strategy=Stopped("cpu"), **OPTIONS, **self.options)
        module, data = self.module(), torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).double()
        try:
            resumed = str(path) if resume else None
            trainer.fit(module, Loader(data, batch_size=4), DataLoader(data[:6], batch_size=2), ckpt_path=resumed)
        except stop:
            return None
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        steps = trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped
        return module.layer.weight.tolist(), rate, steps, module.seen


@slow(but=["plateau-pytorch_lightning"])
@both
@pytest.mark.parametrize("name", [*RUNS])
def test_a_run_resumes_from_between_any_two_batches(
    name: str, namespace: Namespace, group: None, tmp_path: Path
) -> None:
    run = Run(namespace, *RUNS[name], tmp_path / "stopped.ckpt")
    whole, stops = run.fit(), 0
    for batch in range(1, 12):
        if run.fit(batch=batch) is None:
            again, stops = run.fit(resume=True), stops + 1
            assert again[:3] == whole[:3], batch
            assert again[3] == whole[3][len(whole[3]) - len(again[3]) :], batch
    assert stops > 7


@slow(but=["epochs-lightning.pytorch"])
@both
@pytest.mark.parametrize("name", ["epochs", "steps", "often", "always", "windows", "plateau"])
def test_a_run_resumes_from_within_validation(name: str, namespace: Namespace, group: None, tmp_path: Path) -> None:
    run = Run(namespace, *RUNS[name], tmp_path / "stopped.ckpt")
    whole, stops = run.fit(), 0
    for place in [(batch, done) for batch in range(1, 13) for done in range(3)]:
        if run.fit(validation=place) is None:
            again, stops = run.fit(resume=True), stops + 1
            assert again[:3] == whole[:3], place
            assert again[3] == whole[3][len(whole[3]) - len(again[3]) :], place
    assert stops >= 6


@both
def test_the_trainers_handlers_are_replaced(namespace: Namespace) -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[Any] = []

    class Seeing(namespace.from_pytorch("demos.boring_classes", "BoringModel")):  # type: ignore[misc]
        def on_train_start(self) -> None:
            found.extend((signal.getsignal(signal.SIGTERM), self.trainer.received_sigterm))
            signals.tell_sigterm(self.trainer)
            found.append(self.trainer.received_sigterm)
            self.trainer.should_stop = True
            self.trainer._signal_connector.received_sigterm = False

    trainer = namespace.from_pytorch("trainer", "Trainer")(accelerator="cpu", devices=1, max_steps=1, **OPTIONS)
    called: list[int] = []

    def register() -> dict[int, Any]:
        called.append(1)
        return {signal.SIGTERM: before}

    signals.register_by(trainer, register)
    trainer.fit(Seeing())
    assert called == [1] and found == [before, False, True]
    assert signal.getsignal(signal.SIGTERM) == before
    signals.register_as_lightning(trainer)
    found.clear()
    trainer.fit(Seeing())
    assert len(called) == 1 and found[0] != before
    assert signal.getsignal(signal.SIGTERM) == before


@both
def test_a_run_under_slurm_looks_for_what_it_resumes_from(namespace: Namespace, tmp_path: Path) -> None:
    trainer = namespace.from_pytorch("trainer", "Trainer")(default_root_dir=tmp_path, accelerator="cpu", **OPTIONS)
    assert Path(signals.hpc_save_path(trainer)).parent == tmp_path
    assert signals.hpc_save_path(trainer).endswith(".ckpt")
