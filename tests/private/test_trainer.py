"""What a Trainer and its callbacks keep to themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_par.private.trainer import (
    about_to_begin_batch,
    around_restore,
    around_turns,
    asked_checkpoint,
    before_validations,
    begin_epoch,
    begin_evaluation,
    checkpoint_of_run,
    dummy_experiment,
    go_on_after_batch,
    is_dummy_experiment,
    is_entry_point,
    met_a_skipped_step,
    restores_a_run,
    resumes,
    throughputs,
)
from lightning_par.resume.progress import after_batch
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
    assert is_dummy_experiment(experiment) and not is_dummy_experiment(namespace)


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


@both
def test_another_checkpoint_is_restored_than_was_asked_for(namespace: Namespace, tmp_path: Path) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    module_class = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    options |= dict(accelerator="cpu", devices=1, limit_val_batches=0, default_root_dir=tmp_path)
    trainer = trainer_class(max_steps=2, **options)
    trainer.fit(module_class())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    seen: list[Any] = []

    class Asking(module_class):  # type: ignore[misc, valid-type]
        def setup(self, stage: str) -> None:
            seen.append(asked_checkpoint(self.trainer))

    def choose(path: Any, weights_only: bool | None) -> Any:
        seen.append((path, weights_only))
        return tmp_path / "two.ckpt"

    def then(checkpoint: dict[str, Any] | None) -> None:
        assert checkpoint is not None and trainer.global_step == 0
        seen.append(checkpoint["global_step"])

    trainer = trainer_class(max_steps=3, **options)
    around_restore(trainer, choose, then)
    trainer.fit(Asking(), weights_only=True, ckpt_path="last")
    assert trainer.global_step == 3 and seen == ["last", (None, True), 2]
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.ckpt_path = tmp_path / "two.ckpt"
    trainer.fit(Asking())
    assert seen[3:] == [tmp_path / "two.ckpt"], "once"


@both
def test_the_path_that_a_run_will_load_is_known_in_its_hooks(namespace: Namespace, tmp_path: Path) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    module_class = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    options |= dict(accelerator="cpu", devices=1, limit_val_batches=0, limit_train_batches=3)
    seen: list[Any] = []

    class Asking(module_class):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            seen.append(checkpoint_of_run(self.trainer))

    trainer = trainer_class(max_steps=1, **options)
    trainer.fit(Asking())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer_class(max_steps=2, **options).fit(Asking(), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert seen == [(None, None), (tmp_path / "one.ckpt", True)] and checkpoint_of_run(trainer) == (None, None)


@both
def test_a_restored_loop_is_told_that_it_begins_an_epoch(namespace: Namespace, tmp_path: Path) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    module_class = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    options |= dict(accelerator="cpu", devices=1, limit_val_batches=0, limit_train_batches=3, default_root_dir=tmp_path)
    trainer = trainer_class(max_steps=3, **options)
    trainer.fit(module_class())
    trainer.save_checkpoint(tmp_path / "epoch.ckpt")

    class Counting(module_class):  # type: ignore[misc, valid-type]
        batches: list[int]
        begins: bool

        def on_train_start(self) -> None:
            if self.begins:
                begin_epoch(self.trainer)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.batches.append(batch_idx)

    for begins, batches in ((True, [0, 1, 2]), (False, [3, 0, 1])):  # by itself it runs a batch too many of the epoch
        module = Counting()
        module.batches, module.begins = [], begins
        trainer_class(max_steps=6, **options).fit(module, ckpt_path=tmp_path / "epoch.ckpt")
        assert module.batches == batches


@both
def test_what_follows_a_batch_is_done_by_a_restored_loop(namespace: Namespace, tmp_path: Path) -> None:
    """Of a checkpoint that the last batch's hooks wrote: validate, end the epoch, and count it."""
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    module_class = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    options |= dict(accelerator="cpu", devices=1, limit_train_batches=3, num_sanity_val_steps=0)
    options["default_root_dir"] = tmp_path

    class Telling(module_class):  # type: ignore[misc, valid-type]
        def __init__(self, restored: bool) -> None:
            super().__init__()
            self.restored, self.did = restored, list[str]()

        def on_train_start(self) -> None:
            if self.restored:
                go_on_after_batch(self.trainer)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.restored or batch_idx < 2 or self.current_epoch:
                return
            self.trainer.save_checkpoint(tmp_path / "last.ckpt")
            checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
            checkpoint["loops"]["fit_loop"] = after_batch(checkpoint["loops"]["fit_loop"])
            torch.save(checkpoint, tmp_path / "last.ckpt")

        def on_validation_end(self) -> None:
            self.did.append(f"validated {self.trainer.fit_loop.epoch_loop.val_loop.batch_progress.total}")

        def on_train_epoch_start(self) -> None:
            self.did.append(f"epoch {self.current_epoch}")

    for validation in (0, 2):
        whole, module = Telling(False), Telling(True)
        for each, path in ((whole, None), (module, tmp_path / "last.ckpt")):
            trainer = trainer_class(max_epochs=2, limit_val_batches=validation, **options)
            trainer.fit(each, ckpt_path=path)
            counts = trainer.fit_loop.epoch_progress.current
            assert trainer.global_step == 6 and counts.ready == counts.processed == 2
        assert module.did == whole.did[1:], "the first epoch had begun"


@both
def test_an_evaluation_that_is_begun_counts_as_in_its_first_batch(namespace: Namespace) -> None:
    """As Lightning counts within the first batch of the second of two validations of three batches."""
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    seen: list[dict[str, Any]] = []

    class Watched(boring):  # type: ignore[misc, valid-type]
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                seen.append(self.trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict())
            return super().validation_step(batch, batch_idx)

    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = trainer_class(
        max_epochs=1, limit_train_batches=2, val_check_interval=1, limit_val_batches=3, num_sanity_val_steps=0,
        accelerator="cpu", devices=1, **options,
    )  # fmt: skip
    noted: list[int] = []
    ended = before_validations(trainer, lambda: noted.append(len(seen)))
    trainer.fit(Watched())
    ended()
    assert [*dict.fromkeys(noted)] == [0, 1] and "setup_data" not in vars(trainer.fit_loop.epoch_loop.val_loop)
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    assert len(seen) == 2 and progress.state_dict() != seen[1]
    begin_evaluation(progress, before=3)
    assert progress.state_dict() == seen[1]


@both
def test_the_turns_of_a_fit_are_told(namespace: Namespace) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    told: list[str] = []

    class Watched(boring):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, *args: Any) -> None:
            told.append("hook")

        def on_train_end(self) -> None:
            told.append("hook of the end")

    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = trainer_class(
        max_epochs=1, limit_train_batches=2, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0,
        accelerator="cpu", devices=1, **options,
    )  # fmt: skip
    note = told.append
    fit = trainer.fit_loop
    users = fit.epoch_loop.val_loop.run = Mock(wraps=fit.epoch_loop.val_loop.run)  # as tests do
    ended = around_turns(trainer, lambda: note("batch"), lambda: note("validation"), lambda: note("end"))
    trainer.fit(Watched())
    ended()
    assert told == ["hook", "batch", "batch", "hook", "batch", "validation", "batch", "end", "hook of the end"]
    assert users.call_count == 1 and fit.epoch_loop.val_loop.run is users
    assert not {"on_advance_end", "on_run_end"} & {*vars(fit), *vars(fit.epoch_loop)}


@both
def test_it_is_known_that_a_step_was_skipped(namespace: Namespace) -> None:
    """Where Lightning asks how many ranks there are, to refuse that."""
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    asked: list[bool] = []

    class Asked(namespace.from_pytorch("strategies", "SingleDeviceStrategy")):  # type: ignore[misc]
        @property
        def world_size(self) -> int:
            asked.append(met_a_skipped_step(sys._getframe(1)))
            return 1

        @world_size.setter
        def world_size(self, value: int) -> None:
            pass

    class Skips(boring):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = trainer_class(strategy=Asked("cpu"), max_epochs=1, limit_train_batches=3, limit_val_batches=0, **options)
    trainer.fit(Skips())
    assert sum(asked) == 1 and not met_a_skipped_step(None)
