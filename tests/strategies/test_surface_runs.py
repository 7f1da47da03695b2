"""Every entry point of the Trainer, alone and in sequence, and the module between runs."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import Net, check, loader, metrics, trainer, weights


def _alone(entry: str) -> Any:
    t, module = trainer(), Net()
    result = getattr(t, entry)(module, loader(seed=1))
    return {"result": result, "metrics": metrics(t), "weights": weights(module)}


@slow("test")
@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_an_entry_point_alone(pool: Pool, entry: str) -> None:
    check(pool, _alone, entry)


def _in_sequence() -> Any:
    module = Net()
    objects = dict(module.named_parameters())
    t = trainer(max_epochs=1)
    seen: dict[str, Any] = {}
    t.fit(module, loader(), loader(8, 1))
    assert all(p is objects[name] for name, p in module.named_parameters())
    seen["fit"] = metrics(t), weights(module)
    seen["plain call"] = module(_x()).detach()
    seen["test"] = t.test(module, loader(8, 2), verbose=False)
    seen["predict"] = t.predict(module, loader(8, 2))
    t.fit_loop.max_epochs = 2
    t.fit(module, loader(), loader(8, 1))
    seen["second fit"] = metrics(t), weights(module), t.global_step
    other = trainer(max_epochs=1)
    seen["validate"] = other.validate(module, loader(8, 1), verbose=False)
    other.fit(module, loader())
    seen["other trainer"] = weights(module), other.global_step
    assert all(p is objects[name] for name, p in module.named_parameters())
    return seen


def _x() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)


def test_entry_points_in_sequence(pool: Pool) -> None:
    check(pool, _in_sequence)
    check(pool, _in_sequence_two_optimizers)


def _in_sequence_two_optimizers() -> Any:
    module = Net()
    for _ in range(2):
        t = trainer()
        t.fit(module, loader())
    return weights(module), {str(i): s for i, s in sorted(t.optimizers[0].state_dict()["state"].items())}


def _handled_after_fit() -> Any:
    module = Net()
    trainer().fit(module, loader())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    whole = io.BytesIO()
    torch.save(module, whole)
    copied = copy.deepcopy(module)
    fresh = Net().double()
    fresh.load_state_dict(module.state_dict())
    seen = {"saved": torch.load(file), "copied": weights(copied), "fresh": weights(fresh)}
    seen["float"] = weights(copied.float())
    # A plain step after it.
    loss = module.double().loss(next(iter(loader(seed=3))))
    loss.backward()
    seen["gradients"] = {name: p.grad for name, p in module.named_parameters()}
    seen["vector"] = nn.utils.parameters_to_vector(module.parameters()).detach()
    return seen


def test_after_fit_the_module_is_plain(pool: Pool) -> None:
    check(pool, _handled_after_fit)


class Moves(Callback):
    """Calls a method of the module in the middle of a fit."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        before = list(pl_module.parameters())
        if self.how == "cpu":
            pl_module.cpu()
        elif self.how == "to":
            pl_module.to("cpu")
        elif self.how == "double":
            pl_module.double()
        elif self.how == "round trip":
            pl_module.float().double()
        elif self.how == "apply":
            pl_module._apply(lambda x: x * 1.0)
        elif self.how == "half precision copy":
            copied = copy.deepcopy(pl_module).float()
            self.dtype = {p.dtype for p in copied.parameters()}
        elif self.how == "requires_grad":
            pl_module.requires_grad_(False).requires_grad_(True)
        elif self.how == "zero_grad":
            pl_module.zero_grad()
        elif self.how == "init":
            pl_module.apply(lambda m: nn.init.constant_(m.bias, 0.1) if isinstance(m, nn.Linear) else None)
        elif self.how == "eval":
            pl_module.eval().train()
        assert all(a is b for a, b in zip(before, pl_module.parameters()))


def _moved(how: str) -> Any:
    module = Net()
    t = trainer([Moves(how)], max_epochs=2)
    t.fit(module, loader())
    return weights(module), metrics(t)


@slow(but=["init"])
@pytest.mark.parametrize(
    "how",
    ["cpu", "to", "double", "round trip", "apply", "half precision copy", "requires_grad", "zero_grad", "init", "eval"],
)
def test_a_module_is_moved_in_the_middle_of_a_fit(pool: Pool, how: str) -> None:
    check(pool, _moved, how)


class Fails(Callback):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise self.error("on purpose")


def _fails(error: type[BaseException]) -> Any:
    module = Net()
    t = trainer([Fails(error)])
    try:
        t.fit(module, loader())
    except BaseException as caught:
        return type(caught).__name__, str(caught), sorted({type(p).__name__ for p in module.parameters()})
    return None


def test_an_exception_stays_what_it_was(pool: Pool) -> None:
    for name, text, _ in pool.run(2, _fails, ValueError):
        assert (name, text) == ("ValueError", "on purpose")


def _fails_then_used() -> str:
    module = Net()
    t = trainer([Fails(ValueError)])
    try:
        t.fit(module, loader())
    except ValueError:
        pass
    module.cpu()
    held = {type(p) for p in module.parameters()}
    if ShardedTensor not in held:
        return "whole"
    t = trainer()
    t.fit(module, loader())
    return "whole" if all(type(p) is nn.Parameter for p in module.parameters()) else "sharded"


def test_a_module_may_be_trained_again_after_an_exception(pool: Pool) -> None:
    assert pool.run(2, _fails_then_used) == ["whole", "whole"]


def _other_namespace() -> Any:
    import pytorch_lightning as pl

    from lightning_par.pl import TensorParallelStrategy

    class Other(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 10))
            self.split = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.split |= any(isinstance(p, ShardedTensor) for p in self.parameters())
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    world = int(os.environ["WORLD_SIZE"])
    strategy = TensorParallelStrategy(tensor_parallel_size=2) if world > 1 else "auto"
    t = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Other()
    t.fit(module, loader())
    assert module.split == (world > 1)
    return weights(module), {name: x.clone() for name, x in t.callback_metrics.items()}, t.predict(module, loader(8))


def test_the_other_lightning_package(pool: Pool) -> None:
    check(pool, _other_namespace)


def _held_graph(backward: bool) -> Any:
    module = Net().double()
    loss = module.loss(next(iter(loader(seed=4))))  # tried by hand before the fit, and kept
    if backward:
        loss.backward()
        module.zero_grad()
    trainer().fit(module, loader())
    return float(loss), weights(module)


def test_a_loss_of_before_the_fit_may_be_kept_after_its_backward(pool: Pool) -> None:
    check(pool, _held_graph, True)
    with pytest.raises(RanksFailedError, match=r"net.2.weight can't be split .* Detach or delete what was computed"):
        pool.run(2, _held_graph, False)
