"""What a Trainer and Lightning's strategies say to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy
from lightning_par.private.strategies import (
    give_checkpoint_io,
    given_anew,
    given_checkpoint_io,
    launched_by,
    layer_sync,
    takes_module,
)
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@pytest.mark.parametrize("kind", [TensorParallelStrategy, PipelineParallelStrategy])
def test_a_strategy_is_given_to_one_trainer_after_another(kind: Any) -> None:
    strategy, trainers = kind(), []
    for _ in range(2):
        trainers.append(Trainer(accelerator="cpu", devices=1, precision="64-true", strategy=strategy, logger=False))
        assert trainers[-1].strategy is strategy and trainers[-1].accelerator is strategy.accelerator
        assert strategy.precision_plugin is trainers[-1].precision_plugin


@both
def test_a_strategy_is_given_and_launched_as_decorated(namespace: Namespace) -> None:
    base = namespace.from_pytorch("strategies", "DDPStrategy")
    launcher = namespace.from_pytorch("strategies.launchers.launcher", "_Launcher")

    class Launcher(launcher):  # type: ignore[misc, valid-type]
        is_interactive_compatible = True

        def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            return "launched"

        def kill(self, signum: int) -> None: ...

    @given_anew
    @launched_by(lambda strategy: Launcher())
    class Strategy(base):  # type: ignore[misc, valid-type]
        pass

    options = dict(accelerator="cpu", devices=2, logger=False, strategy=Strategy())
    for _ in range(2):
        trainer = namespace.from_pytorch("trainer", "Trainer")(**options)
        assert trainer.strategy.launcher.launch(None) == "launched" and type(trainer.strategy.launcher) is Launcher


@both
def test_a_strategy_has_the_plugins_that_the_user_gave(namespace: Namespace) -> None:
    io, sync = (namespace.from_pytorch("plugins", name)() for name in ("TorchCheckpointIO", "TorchSyncBatchNorm"))
    options = dict(accelerator="cpu", devices=2, logger=False, strategy="ddp")
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    strategy = trainer_class(plugins=[io, sync], **options).strategy
    assert given_checkpoint_io(strategy) is strategy.checkpoint_io is io and layer_sync(strategy) is sync
    strategy = trainer_class(sync_batchnorm=True, **options).strategy
    assert given_checkpoint_io(strategy) is None and type(layer_sync(strategy)) is type(sync)
    give_checkpoint_io(strategy, io)
    assert strategy.checkpoint_io is io
    assert layer_sync(trainer_class(**options).strategy) is None


@both
def test_a_strategy_is_told_of_a_module_before_it_is_asked_whether_it_runs_compiled_ones(namespace: Namespace) -> None:
    base = namespace.from_pytorch("strategies", "ParallelStrategy")
    module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
    taken = list[Any]()

    def take(strategy: Any, given: Any) -> None:
        taken.append(given)
        if given is not None:
            namespace.from_pytorch("utilities.compile", "to_uncompiled")(given)
            raise InterruptedError  # before any rank is started

    @takes_module(take)
    class Strategy(namespace.from_pytorch("strategies", "DDPStrategy")):  # type: ignore[misc]
        pass

    assert issubclass(Strategy, base)
    options = dict(accelerator="cpu", devices=1, logger=False, strategy=Strategy(), enable_checkpointing=False)
    trainer = namespace.from_pytorch("trainer", "Trainer")(**options)
    assert trainer.strategy.lightning_module is None
    for entry in ("fit", "validate", "test", "predict"):
        with pytest.raises(InterruptedError):
            getattr(trainer, entry)(torch.compile(module, backend="eager"))
    assert taken[-4:] == [module] * 4
