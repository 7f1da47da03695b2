"""What Lightning hangs on a LightningModule."""

from __future__ import annotations

import pytest

from lightning_par.private.lightning_modules import (
    ATTRIBUTES,
    HPARAMS,
    before_batch_transfer,
    give_trainer,
    trainer_of,
)
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@both
def test_a_module_has_what_a_run_sets(namespace: Namespace) -> None:
    module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
    module.save_hyperparameters()
    assert vars(module).keys() >= {*ATTRIBUTES, HPARAMS} and vars(module)[HPARAMS] is module.hparams


@both
def test_a_module_has_its_trainer(namespace: Namespace) -> None:
    module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
    trainer = namespace.from_pytorch("trainer", "Trainer")(accelerator="cpu", devices=1, logger=False)
    assert trainer_of(module) is None
    module.trainer = trainer
    assert trainer_of(module) is module.trainer and module.trainer.strategy is trainer.strategy
    give_trainer(module, "another")
    assert module.trainer == trainer_of(module) == "another"


@both
def test_the_users_hook_before_the_transfer_of_a_batch_is_called(namespace: Namespace) -> None:
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")

    class Doubling(boring):  # type: ignore[misc, valid-type]
        def on_before_batch_transfer(self, batch: int, dataloader_idx: int) -> int:
            return 2 * batch

    module = Doubling()
    trainer = namespace.from_pytorch("trainer", "Trainer")(accelerator="cpu", devices=1, logger=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._data_connector.attach_data(module)
    assert before_batch_transfer(module, 2) == 4
