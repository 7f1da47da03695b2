"""Where Lightning keeps loaders and the batches that it fetched."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_par.private.loaders import WORKERS_SET_HANDLERS, data_source, mode_of, note_fetched, request_loader
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


def test_workers_call_what_sets_their_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this name, and as it is in the process that forked them."""
    called = multiprocessing.get_context("fork").SimpleQueue()
    monkeypatch.setattr(*WORKERS_SET_HANDLERS, lambda: called.put(os.getpid()))
    assert len([*DataLoader(torch.arange(2), num_workers=1, multiprocessing_context="fork")]) == 2
    assert called.get() != os.getpid()
