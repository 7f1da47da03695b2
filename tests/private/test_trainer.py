"""What a Trainer and its callbacks keep to themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.private.trainer import (
    about_to_begin_batch,
    dummy_experiment,
    is_entry_point,
    restores_a_run,
    resumes,
    throughputs,
)
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@both
def test_a_resumed_run_is_recognised(namespace: Namespace, tmp_path: Path) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    told: list[bool] = []

    class Telling(boring):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:  # called when the model is set up
            told.append(resumes(self.trainer))
            return super().configure_optimizers()

    options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    options["default_root_dir"] = tmp_path  # other tests may write to the current folder
    for epochs, path in ((1, None), (2, str(tmp_path / "last.ckpt"))):
        trainer = trainer_class(max_epochs=epochs, limit_train_batches=1, limit_val_batches=0, **options)
        trainer.fit(Telling(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert told == [False, True]


@both
def test_the_load_of_what_an_entry_point_was_given_is_recognised(namespace: Namespace, tmp_path: Path) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    told: list[bool] = []

    class Telling(namespace.from_pytorch("strategies", "SingleDeviceStrategy")):  # type: ignore[misc]
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            told.append(restores_a_run(sys._getframe()))
            return super().load_checkpoint(*args, **kwargs)

    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = trainer_class(strategy=Telling("cpu"), fast_dev_run=1, **options)
    trainer.fit(model := boring())
    trainer.save_checkpoint(path := tmp_path / "last.ckpt")
    trainer.validate(model, ckpt_path=path)
    trainer.strategy.load_checkpoint(path)
    assert told == [True, False]


@both
def test_a_throughput_monitor_counts_by_ranks_and_flops(namespace: Namespace) -> None:
    monitor = namespace.from_pytorch("callbacks", "ThroughputMonitor")(batch_size_fn=len)
    trainer = namespace.from_pytorch("trainer", "Trainer")(accelerator="cpu", devices=1, logger=False)
    trainer.state.stage = namespace.from_pytorch("trainer.states", "RunningStage").VALIDATING
    monitor.setup(trainer, None, "validate")
    (throughput,) = throughputs(monitor)
    assert throughput.world_size == 1 and throughput.available_flops is None


@both
def test_every_method_of_an_experiment_that_does_nothing_is_one(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []
    monkeypatch.setattr(dummy_experiment(namespace), "nop", lambda self, *args, **kwargs: handed.append((args, kwargs)))
    experiment = namespace.from_fabric("loggers.logger", "_DummyExperiment")()
    experiment.add_histogram("weight", 1, step=2)
    assert handed == [(("weight", 1), {"step": 2})]


@both
def test_the_training_loop_asks_how_many_ranks_there_are_before_each_batch(namespace: Namespace) -> None:
    """And for nothing else of a strategy's, between the hooks of two batches."""
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    asked: list[bool] = []

    class Asked(namespace.from_pytorch("strategies", "SingleDeviceStrategy")):  # type: ignore[misc]
        @property
        def world_size(self) -> int:
            asked.append(about_to_begin_batch(sys._getframe(1)))
            return 1

        @world_size.setter
        def world_size(self, value: int) -> None:
            pass

    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = trainer_class(strategy=Asked("cpu"), max_epochs=1, limit_train_batches=3, limit_val_batches=0, **options)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trainer.fit(boring())
    finally:
        torch.distributed.destroy_process_group()
    assert sum(asked) >= 3 and not about_to_begin_batch(None)


@both
def test_all_code_of_a_run_is_called_within_one_function(namespace: Namespace) -> None:
    seen: list[int] = []

    class Looks(namespace.from_pytorch("demos.boring_classes", "BoringModel")):  # type: ignore[misc]
        def training_step(self, *args: Any) -> Any:
            frame: Any = sys._getframe()
            frames = []
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
            seen.append(sum(map(is_entry_point, frames)))
            return super().training_step(*args)

    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = namespace.from_pytorch("trainer", "Trainer")(accelerator="cpu", devices=1, max_steps=1, **options)
    trainer.fit(Looks())
    assert seen == [1]
