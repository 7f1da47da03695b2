"""Where Lightning keeps loaders and the batches that it fetched."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_par.private.loaders import (
    WORKERS_SET_HANDLERS,
    HandedOut,
    attach_loader,
    data_source,
    is_stateful,
    iterators_of,
    mode_of,
    note_fetched,
    processed,
    request_loader,
    without_states,
)
from lightning_par.private.trainer import resumes
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@both
def test_the_trainers_loops_tell_where_their_loaders_come_from(namespace: Namespace) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    states = namespace.from_pytorch("trainer.states", "TrainerFn")
    trainer = trainer_class(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    for state in states:
        trainer.state.fn = state
        source = data_source(trainer)
        assert source.is_defined()
        assert type(request_loader(namespace, source)) is torch.utils.data.DataLoader
        # An attribute of the instance takes the place of the method, as the look at the first batch needs.
        source.dataloader = lambda: "ours"
        assert request_loader(namespace, source) == "ours"
    assert resumes(trainer) is False


@both
def test_a_combined_loader_tells_its_mode(namespace: Namespace) -> None:
    combined = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")
    assert mode_of(combined([[1], [2]], "max_size")) == "max_size"


@both
def test_a_loader_that_begins_anew_has_another_iterator(namespace: Namespace) -> None:
    combined_loader = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")
    loader = iter(combined_loader([DataLoader(range(3)), DataLoader(range(1))], "max_size_cycle"))  # type: ignore[arg-type]
    next(loader)
    first, second = iterators_of(loader)
    next(loader)
    assert iterators_of(loader)[0] is first and iterators_of(loader)[1] is not second


@both
def test_hooks_are_given_what_a_step_fetched(namespace: Namespace) -> None:
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    seen: list[Any] = []

    class Fetching(boring):  # type: ignore[misc, valid-type]
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            note_fetched(dataloader_iter, "ours")
            return self.layer(batch).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    namespace.from_pytorch("trainer", "Trainer")(
        max_steps=2, limit_val_batches=0, enable_checkpointing=False, **options
    ).fit(Fetching())
    assert seen == ["ours", "ours"]


@both
def test_the_fit_loop_gets_what_is_handed_out_each_time_that_it_asks(namespace: Namespace) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    combined_loader = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")
    asked: list[Any] = []

    class Given(boring):  # type: ignore[misc, valid-type]
        def train_dataloader(self) -> Any:
            return [super().train_dataloader(), super().train_dataloader()]

    def change(loaders: Any) -> Any:
        asked.append(loaders)
        return combined_loader(loaders, "min_size")

    trainer = trainer_class(
        max_epochs=3, limit_train_batches=1, limit_val_batches=0, accelerator="cpu", devices=1,
        reload_dataloaders_every_n_epochs=1, **options,
    )  # fmt: skip
    handed_out = HandedOut(trainer, change)
    module = Given()
    module.training_step = lambda batch, batch_idx: boring.training_step(module, batch[0], batch_idx)
    trainer.fit(module)
    assert len(asked) == 3 and all(len(loaders) == 2 for loaders in asked)
    assert mode_of(trainer.fit_loop._combined_loader) == "min_size"
    handed_out.end()
    source = trainer.fit_loop._data_source
    assert "dataloader" not in vars(source)
    source.dataloader = lambda: "another's"
    again = HandedOut(trainer, lambda loaders: f"ours of {loaders}")
    assert source.dataloader() == "ours of another's"
    again.end()
    assert source.dataloader() == "another's"


@both
def test_states_of_loaders_are_kept_and_put_back(namespace: Namespace) -> None:
    class Stateful(list):  # type: ignore[type-arg]
        at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    combined = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")([Stateful(), [1]], "max_size")
    assert [is_stateful(namespace, loader) for loader in combined.flattened] == [True, False]
    combined._load_state_dicts([{"at": 3}])
    assert combined.flattened[0].at == 3 and combined._state_dicts() == [{"at": 3}]
    combined.__class__ = without_states(type(combined))
    assert combined._state_dicts() == []
    combined._load_state_dicts([{"at": 4}])
    assert combined.flattened[0].at == 3


@both
def test_a_loader_is_prepared_as_the_fit_loop_prepares_it(namespace: Namespace) -> None:
    trainer = namespace.from_pytorch("trainer", "Trainer")(
        logger=False, enable_checkpointing=False, accelerator="cpu", devices=1
    )
    loader = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    trainer.strategy.process_dataloader = lambda given: [given]
    assert processed(namespace, trainer, loader) == [loader]


def test_workers_call_what_sets_their_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this name, and as it is in the process that forked them."""
    called = multiprocessing.get_context("fork").SimpleQueue()
    monkeypatch.setattr(*WORKERS_SET_HANDLERS, lambda: called.put(os.getpid()))
    assert len([*DataLoader(torch.arange(2), num_workers=1, multiprocessing_context="fork")]) == 2
    assert called.get() != os.getpid()


@both
def test_a_trainer_that_does_not_run_has_a_loader(namespace: Namespace) -> None:
    module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
    trainer = namespace.from_pytorch("trainer", "Trainer")(accelerator="cpu", devices=1, logger=False, max_epochs=3)
    trainer.strategy.connect(module)
    attach_loader(trainer, module, DataLoader([1, 2], batch_size=None))  # type: ignore[arg-type]
    assert module.trainer is trainer and trainer.estimated_stepping_batches == 6
