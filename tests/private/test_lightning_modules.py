"""What Lightning hangs on a LightningModule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_par.private.compiler import as_written
from lightning_par.private.lightning_modules import (
    ATTRIBUTES,
    HPARAMS,
    STEPS,
    before_batch_transfer,
    give_device,
    give_trainer,
    trainer_of,
    uncompile,
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
def test_a_module_says_that_it_is_where_it_is_told(namespace: Namespace) -> None:
    with torch.device("meta"):
        module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
        module.inner = type(module)()
    give_device(module, torch.device("cpu"))
    assert module.device == module.inner.device == torch.device("cpu") and module.layer.weight.is_meta


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


@both
@pytest.mark.parametrize("times", [1, 2])
def test_a_compiled_module_that_a_trainer_took_is_as_it_was_written(namespace: Namespace, times: int) -> None:
    module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
    replaced = module.test_step = lambda batch, batch_idx: None  # of the user's own
    assert uncompile(module, namespace) is None
    for _ in range(times):  # `from_compiled` compiles what it compiled again
        namespace.from_pytorch("utilities.compile", "from_compiled")(torch.compile(module, backend="eager"))
    compiled = {name: vars(module)[name] for name in ("forward", *STEPS)}
    assert all(as_written(step) is not step for step in compiled.values())
    graphs = list[Any]()
    compiler = uncompile(module, namespace)
    assert compiler is not None and module._compiler_ctx is None
    assert module.test_step is replaced and not {"forward", *STEPS} - {"test_step"} & vars(module).keys()
    assert compiler(lambda x: graphs.append(x) or 2 * x)(torch.ones(1)) == 2
