"""Views of a block's weights that user code keeps beyond the block's call are the weights, both ways, as on one device:
whenever they were kept first, whoever writes to which. And a graph from before a write refuses to go backward."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

WIDTH, LAYERS, STEPS = 6, 3, 6
FIRST = 3  # the call that keeps a view first: after optimizer's steps without any


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.kept: list[Any] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.is_time():
            self.kept.append(self.view())
        return x + self.scale * self.down(torch.tanh(self.up(x)))

    def is_time(self) -> bool:
        return self.training and self.calls == FIRST

    def view(self) -> Any:
        return self.down.weight.detach()[:3]


class OfData(Layer):
    def view(self) -> Any:
        return self.down.weight.data.t()


class Numpy(Layer):
    def view(self) -> Any:
        return self.down.weight.detach().numpy()[:3]


class Whole(Layer):
    def view(self) -> Any:
        return self.down.weight


class InEvaluation(Layer):
    def is_time(self) -> bool:
        return not self.training and not self.kept


class OfTwoSteps(Layer):
    def is_time(self) -> bool:
        return self.calls in (FIRST, FIRST + 1)


class WritesAfterUse(Layer):
    """Within the call, in a later step than that which keeps a view: its graph has the weight from before."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.calls == FIRST + 1:
            self.write()
        return y

    def write(self) -> None:
        with torch.no_grad():
            self.down.weight.mul_(0.9)


class WritesViewAfterUse(WritesAfterUse):
    def write(self) -> None:
        self.kept[0].mul_(0.9)


class WritesAfterData(WritesAfterUse):
    """Which was asked for before, so that values alone might tell."""

    def view(self) -> Any:
        return self.down.weight.data.clone()

    def write(self) -> None:
        self.seen = float(self.down.weight.data.sum())
        super().write()


class WritesInEvaluation(InEvaluation):
    """And uses what it has kept in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            return y + sum(v.square().sum() for v in self.kept)
        self.down.weight.mul_(0.99)
        self.kept[0].mul_(0.99)
        return y


class Model(L.LightningModule):
    """Notes what it sees of views and weights."""

    layer = Layer

    def __init__(self, kind: type[Layer] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList((kind or self.layer)() for _ in range(LAYERS))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.seen: list[float] = []
        self.step = 0

    @property
    def views(self) -> list[Any]:
        return [x for layer in self.layers for x in layer.kept]

    def look(self) -> None:
        self.seen += [float(x.sum()) for x in self.views]
        self.seen += [float(layer.down.weight.detach().sum()) for layer in self.layers]

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.body(x).square().mean()

    def training_step(self, x: Tensor) -> Tensor:
        self.seen += [float(v.sum()) for v in self.views]
        return self.loss(x)

    def validation_step(self, x: Tensor) -> None:
        self.seen.append(float(self.body(x).sum()))

    def on_train_batch_end(self, *args: Any) -> None:
        self.look()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class EvaluatesInInferenceMode(Model):
    """As Lightning does on GPUs."""

    def validation_step(self, x: Tensor) -> None:
        with torch.inference_mode():
            super().validation_step(x)


# Who writes to the weight: a view is what it is then.


class UserWrites(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer.down.weight.mul_(0.9)
        self.look()


class UserWritesData(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        for layer in self.layers:
            layer.down.weight.data.copy_(layer.down.weight.data * 0.5)
        self.look()


class UserAssignsData(Model):
    """The view stays of what the weight was."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.step == FIRST + 1:
            for layer in self.layers:
                layer.down.weight.data = layer.down.weight.data * 0.5
        self.look()


class Loads(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.step == FIRST + 1:
            self.layers[0].load_state_dict({k: x * 0.5 for k, x in self.layers[0].state_dict().items()})
        self.look()


class ByHand(Model):
    def __init__(self, kind: type[Layer] | None = None) -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def training_step(self, x: Tensor) -> Any:
        self.go_backward(self.loss(x))

    def go_backward(self, loss: Tensor, **kwargs: Any) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss, **kwargs)
        optimizer.step()  # type: ignore[union-attr]
        self.look()


class LBFGS(Model):
    """Which writes between calls of its closure."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


# Who writes to the view: the weight is what it is then.


class Writes(Model):
    def shrink(self) -> None:
        for x in self.views:
            x *= 0.9

    def on_train_batch_end(self, *args: Any) -> None:
        self.shrink()
        self.look()


class WritesBefore(Writes):
    def on_train_batch_end(self, *args: Any) -> None:
        self.look()

    def on_train_batch_start(self, *args: Any) -> None:
        self.shrink()


class WritesBeforeOptimizer(WritesBefore):
    def on_train_batch_start(self, *args: Any) -> None: ...

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.shrink()


class WritesBetweenCalls(WritesBeforeOptimizer):
    """While gathers of other blocks are under way."""

    def on_before_optimizer_step(self, *args: Any) -> None: ...

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            for later in self.layers[number:][1:2]:
                for view in later.kept:
                    view *= 0.9
            x = layer(x)
        return x


class WritesBeforeSaving(Writes):
    def on_train_batch_end(self, *args: Any) -> None:
        self.shrink()
        self.seen += [float(x.sum()) for x in self.state_dict().values()]


class WritesAtTheEnd(WritesBeforeOptimizer):
    def on_before_optimizer_step(self, *args: Any) -> None: ...

    def on_train_end(self) -> None:
        self.shrink()


class WritesToOne(Writes):
    """The other views are of the same weight."""

    def shrink(self) -> None:
        for layer in self.layers:
            for view in layer.kept[:1]:
                view *= 0.9


class WritesOneRow(Writes):
    """That one rank alone stores."""

    def shrink(self) -> None:
        for x in self.views:
            x[0] = 0.25


# Graphs from before a write.


class WritesBeforeBackward(Writes):
    def training_step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        self.shrink()
        return loss


class TwoBackwards(ByHand):
    """The second after the optimizer's step."""

    def training_step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        self.go_backward(loss, retain_graph=True)
        self.manual_backward(loss)


class TwoBackwardsBeforeTheStep(ByHand):
    """Of a graph that has a weight itself."""

    def training_step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        for layer in self.layers:
            for whole in layer.kept:
                loss = loss + (whole * whole).sum()
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        for again in (True, False):
            self.manual_backward(loss, retain_graph=again)
        self.optimizers().step()  # type: ignore[union-attr]


class BackwardOfTheStepBefore(ByHand):
    before: Tensor | None = None

    def training_step(self, x: Tensor) -> Any:
        before, self.before = self.before, self.loss(x)
        self.go_backward(self.before, retain_graph=True)
        if before is not None:
            self.manual_backward(before)


class UserWritesBeforeBackward(ByHand):
    def training_step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        with torch.no_grad():
            self.layers[1].down.weight.mul_(0.5)
        self.go_backward(loss)


class DataWrittenBeforeBackward(ByHand):
    """Which autograd doesn't see: backward has the new values."""

    def training_step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        self.layers[1].down.weight.data.mul_(0.5)
        self.go_backward(loss)


class ActivationWritten(Model):
    def body(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x)).exp()
        y = self.layers[1](x * 1)
        x.detach().mul_(2)
        return y


class GraphOfAView(ByHand):
    def training_step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        of_views = sum((v.square().sum() * self.first.weight.sum() for v in self.views), loss * 0)
        self.go_backward(loss, retain_graph=True)
        if self.step > FIRST:
            self.manual_backward(of_views)


def _train(model: type[Model], kind: type[Layer], ranks: int, reshard: bool) -> Any:
    L.seed_everything(0, verbose=False)
    own = model(kind).double()
    x = torch.randn(STEPS, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kept: dict[str, Any] = {} if reshard else {"reshard_after_forward": False}
    strategy: Any = "auto" if ranks == 1 else HybridParallelStrategy(data_parallel="fsdp", **kept)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    batches: Any = DataLoader(x, batch_size=None)  # type: ignore[arg-type]
    try:
        trainer.fit(own, batches, DataLoader(x[:2], batch_size=None))  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return [x.numpy() for x in own.state_dict().values()], own.seen


OF_WEIGHTS = [
    *((model, Layer) for model in (Model, UserWrites, UserWritesData, UserAssignsData, Loads, ByHand, LBFGS)),
    *((Model, kind) for kind in (OfData, Numpy, InEvaluation, OfTwoSteps)),
    (UserWrites, InEvaluation),
]
OF_VIEWS = [
    *((Writes, kind) for kind in (Layer, OfData, Numpy, InEvaluation)),
    (EvaluatesInInferenceMode, WritesInEvaluation),
    *((model, Layer) for model in (WritesBefore, WritesBeforeOptimizer, WritesBetweenCalls, WritesBeforeSaving)),
    *((model, Layer) for model in (WritesAtTheEnd, WritesOneRow)),
    *((model, OfData) for model in (WritesBeforeOptimizer, WritesBetweenCalls)),
    (WritesToOne, OfTwoSteps),
]
OF_GRAPHS = [
    *((model, Layer) for model in (TwoBackwards, BackwardOfTheStepBefore, UserWritesBeforeBackward)),
    *((model, Layer) for model in (DataWrittenBeforeBackward, ActivationWritten, GraphOfAView)),
    *((WritesBeforeBackward, kind) for kind in (Layer, OfData)),
    *((TwoBackwardsBeforeTheStep, kind) for kind in (Layer, Whole)),
    *((Model, kind) for kind in (WritesAfterUse, WritesViewAfterUse, WritesAfterData)),
]


def _name(x: Any) -> str:
    return x.__name__ if isinstance(x, type) else "" if x else "keep"


QUICK = [
    *("UserWritesData-Layer-keep", "WritesBetweenCalls-Layer-", "WritesToOne-OfTwoSteps-", "GraphOfAView-Layer-"),
    *("TwoBackwardsBeforeTheStep-Whole-keep", "EvaluatesInInferenceMode-WritesInEvaluation-"),
]  # fmt: skip


@long(but=["GraphOfAView-Layer-"])
@slow(but=QUICK)
@pytest.mark.parametrize("reshard", [True, False], ids=_name)
@pytest.mark.parametrize(("model", "kind"), OF_WEIGHTS + OF_VIEWS + OF_GRAPHS, ids=_name)
def test_kept_views_are_the_weights(pool: Pool, model: type[Model], kind: type[Layer], reshard: bool) -> None:
    (one,) = pool.run(1, _train, model, kind, 1, reshard)
    for theirs in pool.run(2, _train, model, kind, 2, reshard, timeout=60):
        if isinstance(one, str):
            assert "inplace operation" in one and "inplace operation" in theirs
            continue
        np.testing.assert_allclose(theirs[1], one[1], rtol=1e-9, atol=1e-9)
        for x, expected in zip(theirs[0], one[0], strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)
