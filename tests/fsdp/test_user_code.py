"""What training code does with weights beside calling blocks in turn: all as on one device, step by step."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

WIDTH, LAYERS, STEPS = 6, 3, 7


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.kept: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Keeps(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 2:
            self.kept.append(self.down.weight[:3, :WIDTH])
        return super().forward(x)


class KeepsAnew(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.down.weight[:3]]
        return super().forward(x) + sum(v.square().sum() for v in self.kept)


class KeepsMany(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 2:
            w, up = self.down.weight.detach(), self.up.weight.detach()
            self.kept += [w.t()[2:4], *up.unbind(0)[:2], self.up.bias.data, self.scale.detach().expand(3, WIDTH)]
        return super().forward(x) + sum((v.sum() for v in self.kept), 0.0)


class Fails(Layer):
    """Each second time, after it has used its weights."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.calls % 2:
            raise ValueError
        return x


class ReadsGradient(Layer):
    """Of the step before."""

    def forward(self, x: Tensor) -> Tensor:
        grad = self.up.weight.grad
        return super().forward(x if grad is None else x + grad.square().sum())


class WritesGradient(ReadsGradient):
    """And forgets some, and another one's."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.up.weight.grad is not None:
            self.up.weight.grad = self.up.weight.grad * 0.5
            self.down.weight.grad = None
        return x + sum(0 if p.grad is None else p.grad.square().sum() for p in self.parameters())


class Hooks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.down.bias.register_hook(lambda grad: grad + 0.01 * torch.arange(grad.shape[0]).to(grad))
        return super().forward(x)


class Recursive(Layer):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x)
        return self(x * 0.5, depth - 1) if depth else x


class Model(L.LightningModule):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(kind() for _ in range(LAYERS))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.seen: list[float] = []
        self.step = 0

    def see(self, *xs: Tensor) -> None:
        self.seen += [float(x.detach().sum()) for x in xs]

    @property
    def views(self) -> list[Tensor]:
        return [x for layer in self.layers for x in layer.kept]

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, x: Tensor) -> Any:
        self.step += 1
        loss = self.body(x).square().mean()
        self.see(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class WritesViews(Model):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for view in self.views:
            if view.is_contiguous():  # no expanded one
                view.mul_(0.9)
        self.see(*self.views)


class Checkpointed(WritesViews):
    how = False

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.how)  # type: ignore[assignment]
        return x


class CheckpointedReentrant(Checkpointed):
    how = True


class Tied(WritesViews):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__(kind)
        self.layers[2].down.weight = self.layers[0].down.weight


class OtherBlocksViews(Model):
    """Used outside of the call that they are of."""

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            for view in self.layers[number - 1].kept:
                x = x + view.sum(0)
        return x


class SkipsBlocks(Model):
    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x) if (self.step + number) % 3 else x
        return x


class Catches(Model):
    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            try:
                x = layer(x)
            except ValueError:
                x = x * 0.5
        return x


class WithAndWithoutGraph(Model):
    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().body(x)
            self.layers[1].up.weight.mul_(0.97)
        return super().body(x + y)


class GraphBetween(Model):
    """Weights that the graph has serve calls without one."""

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        with torch.no_grad():
            y = super().body(x)
            self.see(y, *(x.new_tensor(p.requires_grad) for p in self.parameters()))
        return super().body(x + y)


class ReadsNorms(Model):
    def training_step(self, x: Tensor) -> Any:
        norms = [layer.down.weight.norm() + layer.up.weight.abs().amax() for layer in self.layers]
        return super().training_step(x) + 0.01 * sum(norms)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.see(*(x.norm() for x in self.layers.parameters()), *(x.grad.norm() for x in self.layers.parameters()))


class WritesPlaces(Model):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        a, b, c = self.layers
        a.down.weight[1:4, 2:].copy_(b.down.weight[:3, 2:])
        b.up.weight.t()[0].zero_()
        c.up.weight.data[3] = a.up.weight.data[5]
        c.down.weight.view(-1)[7:19] = 0.1
        for part in a.up.weight.data.split([4, 5]):
            part.mul_(0.9)


class SwapsData(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        a, b = self.layers[0].up.weight, self.layers[1].up.weight
        if self.step % 2:
            a.data, b.data = b.data, a.data


class Freezes(WritesViews):
    def on_train_batch_start(self, *args: Any) -> None:
        self.layers[1].requires_grad_(self.step % 2 == 0)
        self.layers[0].up.requires_grad_(self.step % 3 != 0)


class TwoOptimizers(WritesViews):
    """That share blocks."""

    def __init__(self, kind: type[Layer]) -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        ups = [x for name, x in self.named_parameters() if "up" in name]
        rest = [x for name, x in self.named_parameters() if "up" not in name]
        return torch.optim.AdamW(ups, lr=0.05), torch.optim.SGD(rest, lr=0.05, momentum=0.9)

    def training_step(self, x: Tensor) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = super().training_step(x)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class StepsInBackward(TwoOptimizers):
    def on_fit_start(self) -> None:
        def hook(x: Tensor) -> None:
            assert x.grad is not None
            with torch.no_grad():
                x.add_(x.grad, alpha=-0.05)
            x.grad = None

        for x in self.parameters():
            x.register_post_accumulate_grad_hook(hook)

    def training_step(self, x: Tensor) -> None:
        self.manual_backward(Model.training_step(self, x))


class GradientsOfWeights(Model):
    """And of these again."""

    def training_step(self, x: Tensor) -> Any:
        loss = super().training_step(x)
        weights = [*self.parameters()]
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        self.see(*torch.autograd.grad(grads, weights, [torch.ones_like(g) for g in grads], retain_graph=True))
        return loss + 0.1 * sum(g.square().sum() for g in grads)


class BetweenSteps(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        with torch.inference_mode():
            self.see(self.body(x))
        self.see(*torch.autograd.grad(self.body(x).sum(), [self.layers[0].up.weight, self.first.weight]))


class Averages(Model):
    average: Any = None

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        if self.average is None:
            self.__dict__["average"] = copy.deepcopy(self.layers)
        for own, theirs in zip(self.average.parameters(), self.layers.parameters()):
            own.lerp_(theirs, 0.1)
        self.see(*(layer(torch.ones(2, WIDTH, dtype=torch.float64)) for layer in self.average))


class GoesBack(Model):
    best: Any = None

    def on_train_batch_start(self, *args: Any) -> None:
        if self.step == 2:
            self.best = copy.deepcopy(self.state_dict())
        if self.step == 5:
            self.load_state_dict(self.best)


def _train(model: type[Model], kind: type[Layer], ranks: int, reshard: bool, windows: int) -> Any:
    L.seed_everything(0, verbose=False)
    own = model(kind).double()
    x = torch.randn(STEPS, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kept: dict[str, Any] = {} if reshard else {"reshard_after_forward": False}
    split: dict[str, Any] = {"data_parallel": "fsdp", "tensor_parallel_size": ranks // 2}
    strategy: Any = "auto" if ranks == 1 else HybridParallelStrategy(**split, **kept)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        accumulate_grad_batches=windows,
    )  # fmt: skip
    trainer.fit(own, DataLoader(x, batch_size=None))  # type: ignore[arg-type]
    return [x.numpy() for x in own.state_dict().values()], own.seen


CASES = [
    *((model, Keeps) for model in (OtherBlocksViews, Freezes, TwoOptimizers, WritesViews)),
    *((model, kind) for model in (Checkpointed, CheckpointedReentrant) for kind in (Keeps, KeepsAnew)),
    *((Model, kind) for kind in (KeepsAnew, ReadsGradient, Recursive)),
    *((model, Layer) for model in (SkipsBlocks, WithAndWithoutGraph, GraphBetween, ReadsNorms, WritesPlaces)),
    *((model, Layer) for model in (SwapsData, StepsInBackward, GradientsOfWeights, BetweenSteps, Averages, GoesBack)),
    *((WritesViews, KeepsMany), (Tied, KeepsMany), (Catches, Fails)),
]
QUICK = ["WithAndWithoutGraph-Layer-keep", "GraphBetween-Layer-keep", "GradientsOfWeights-Layer-"]


def _name(x: Any) -> str:
    return x.__name__ if isinstance(x, type) else "" if x else "keep"


@long("GraphBetween-Layer-keep")
@slow(but=QUICK)
@pytest.mark.parametrize("reshard", [True, False], ids=_name)
@pytest.mark.parametrize(("model", "kind"), CASES, ids=_name)
def test_training_code_meets_weights_as_on_one_device(
    pool: Pool, model: type[Model], kind: type[Layer], reshard: bool
) -> None:
    _compare(pool, model, kind, reshard, 1)


@slow()
@pytest.mark.parametrize(
    ("model", "kind"), [(WritesViews, Keeps), (WritesPlaces, Layer), (Model, KeepsAnew)], ids=_name
)
def test_while_gradients_accumulate(pool: Pool, model: type[Model], kind: type[Layer]) -> None:
    _compare(pool, model, kind, True, 3)


@long()
@slow(but=["WritesGradient"])
@pytest.mark.parametrize("kind", [WritesGradient, Hooks, KeepsAnew, Recursive], ids=_name)
def test_where_weights_are_split_over_tensor_ranks_too(pool: Pool, kind: type[Layer]) -> None:
    _compare(pool, Model, kind, True, 3, ranks=4)


def _compare(pool: Pool, model: type[Model], kind: type[Layer], reshard: bool, windows: int, ranks: int = 2) -> None:
    (one,) = pool.run(1, _train, model, kind, 1, reshard, windows)
    for theirs in pool.run(ranks, _train, model, kind, ranks, reshard, windows, timeout=60):
        np.testing.assert_allclose(theirs[1], one[1], rtol=1e-9, atol=1e-9)
        for x, expected in zip(theirs[0], one[0], strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)
