"""What a block's code may do with its weights, which are whole around its call: all as on one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, ledger
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

WIDTH, LAYERS = 6, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class WritesData(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.clamp_(-0.2, 0.2)
        self.down.weight.data = self.down.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class WritesUnderNoGrad(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Hooks(Layer):
    """A hook that stays with the weight, as on one device."""

    handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.handle = self.handle or self.up.bias.register_hook(lambda g: g * 0.5)
        return super().forward(x)


class Escapes(Layer):
    """What the loss uses later, of activations and of weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.up(x)
        self.kept = [self.down.weight]
        return super().forward(x)


class KeepsParameter(Layer):
    """Under another name, which makes it a tied weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.other = self.down.bias
        return super().forward(x) + self.other


class KeepsInList(Layer):
    """From the first step on: there it is later what the weight is then."""

    def __init__(self) -> None:
        super().__init__()
        self.list: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.list:
            self.list.append(self.down.weight)
        return super().forward(x) + self.list[0].square().sum()


class KeepsViews(Layer):
    """Of weights, from the first step on: they are what the weights are then, and have their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.list: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.list:
            self.list.append(self.down.weight[:3])
        return super().forward(x) + self.list[0].square().sum()


class KeepsDetached(KeepsViews):
    """As far as values go, those of each step."""

    def forward(self, x: Tensor) -> Tensor:
        self.list.append(self.down.weight.detach()[0])
        self.list.append(self.up.weight.data.t())
        now = torch.cat([x.flatten() for x in self.list]).square().mean()  # of any number alike
        return Layer.forward(self, x) * (1 + now)


class WritesToView(KeepsViews):
    """In each step to that of the first one."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.list:
            self.list.append(self.down.weight.detach()[:2])
        self.list[0].clamp_(-0.2, 0.2)
        return Layer.forward(self, x)


class KeepsWholeAndView(KeepsViews):
    """And a view beside a list of the weight itself that only this step has."""

    def forward(self, x: Tensor) -> Tensor:
        self.now = [self.up.weight]
        return super().forward(x) + self.now.pop()[:6].sum(0)[0]


class SparesSome(Layer):
    """By value: on one rank alone a weight is used."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.spare(x) if x.flatten()[0] > 0 else x


class ChecksInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Model(L.LightningModule):
    def __init__(self, kind: type[Layer], how: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        self.first, self.how = nn.Linear(WIDTH, WIDTH), how
        if how == "frozen":
            self.layers[1].requires_grad_(False)
            self.layers[2].up.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.how == "checkpointed" else layer(x)
        if self.how == "twice":
            for layer in self.layers:
                x = layer(x)
        return x

    def training_step(self, batch: Tensor) -> Tensor:
        if self.how == "read before" and self.trainer.global_step > 0:
            batch = batch * (1 + sum((x.list[0].square().sum() for x in self.layers), batch.new_zeros(())))
        if self.how == "penalty":
            batch = batch.requires_grad_()
        loss = self.body(batch).square().mean()
        if self.how == "penalty":
            (g,) = torch.autograd.grad(loss, batch, create_graph=True)
            loss = loss + g.square().sum()
        if self.how == "gradients of weights":
            (g,) = torch.autograd.grad(loss, self.layers[0].down.weight, retain_graph=True)
            loss = loss * (1 + g.shape[0])
        if isinstance(self.layers[0], Escapes):
            loss = loss + sum((x.inner.square().mean() + x.kept[0].square().sum() for x in self.layers), loss * 0)
        self.kept = loss if self.how == "keeps its graph" else None
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how == "read after":
            self.compare_views()

    def compare_views(self) -> None:
        for layer in self.layers:
            for view in layer.list[::2]:
                assert abs(float(view.sum() - layer.down.weight.detach()[0].sum())) < 1e-9

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.how == "two backwards":
            loss.backward(retain_graph=True)
        loss.backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _train(make: Callable[[], Model], ranks: int) -> tuple[dict[str, Tensor], int, list[str], int]:
    L.seed_everything(0, verbose=False)
    model = make().double()
    x = torch.randn(6, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tensor = max(ranks // 2, 1)
    own = x if ranks == 1 else x[int(os.environ["RANK"]) // tensor :: 2]
    split = {"tensor_parallel_size": tensor} if tensor > 1 else {}
    strategy: Any = "auto" if ranks == 1 else HybridParallelStrategy(data_parallel="fsdp", **split)
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[watch],
        accumulate_grad_batches=2 if ranks == 1 else 1,
    )  # fmt: skip
    trainer.fit(model, DataLoader(own, batch_size=None))  # type: ignore[arg-type]
    if isinstance(model.layers[0], KeepsDetached):
        model.compare_views()  # after the run, too
    return model.state_dict(), watch.messages, watch.without, watch.asked


class Watch(L.Callback):
    """Messages of weights in the last step, and which weights it leaves without a gradient."""

    def on_train_batch_start(self, *args: Any) -> None:
        self._open = ledger()
        self._moved = self._open.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._open.__exit__(None, None, None)
        self.messages = len(self._moved.select(purpose="parameters"))
        self.asked = len(self._moved.select(purpose="views"))
        self.without = [name for name, p in pl_module.named_parameters() if p.grad is None]


def _model(kind: type[Layer], how: str) -> Callable[[], Model]:
    return lambda: Model(kind, how)


def _run(kind: type[Layer], how: str, ranks: int) -> Any:
    return _train(_model(kind, how), ranks)


CASES = [
    *((kind, "") for kind in (WritesData, WritesUnderNoGrad, Hooks, Escapes, SparesSome, ChecksInside)),
    *((kind, "") for kind in (KeepsParameter, KeepsInList, KeepsViews, KeepsDetached)),
    *((kind, "") for kind in (WritesToView, KeepsWholeAndView)),
    *((KeepsDetached, how) for how in ("read before", "read after")),
    *((kind, how) for kind in (KeepsViews, KeepsDetached) for how in ("twice", "checkpointed", "two backwards")),
    *((Layer, how) for how in ("frozen", "checkpointed", "twice", "penalty", "gradients of weights", "two backwards")),
    (Layer, "keeps its graph"),
]


@long("WritesData-")
@slow(
    "KeepsViews-*",
    "KeepsDetached-*",
    "WritesToView-",
    "ChecksInside-",
    "Layer-twice",
    "Layer-frozen",
    "SparesSome-",
    "KeepsInList-",
    "KeepsWholeAndView-",
    "Layer-keeps its graph",
    "WritesUnderNoGrad-",
    "Layer-penalty",
    "Escapes-",
    "Layer-two backwards",
    "Layer-checkpointed",
)
@pytest.mark.parametrize(("kind", "how"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_blocks_code_meets_its_weights_as_on_one_device(pool: Pool, kind: type[Layer], how: str) -> None:
    ((expected, _, without, _),) = pool.run(1, _run, kind, how, 1)
    for state, _, theirs, asked in pool.run(2, _run, kind, how, 2, timeout=60):
        assert theirs == without
        assert asked == 1
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@long()
@slow("read before")
@pytest.mark.parametrize("how", ["read before", "read after"])
def test_views_of_weights_that_the_tensor_axis_splits_follow_too(pool: Pool, how: str) -> None:
    ((expected, *_),) = pool.run(1, _run, KeepsDetached, how, 1)
    for state, *_ in pool.run(4, _run, KeepsDetached, how, 4, timeout=60):
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("how", ["", "checkpointed"])
def test_a_block_has_at_most_three_messages_a_step(pool: Pool, how: str) -> None:
    for _, messages, *_ in pool.run(2, _run, Layer, how, 2):
        # forward, backward, sum; forward's gather of the last layer serves backward, unless it is checkpointed
        assert messages == 2 + 3 * LAYERS - (how == "")
