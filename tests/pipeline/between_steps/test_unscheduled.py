"""Training steps that no schedule can be made for run unit by unit, and what they train is one device's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy, LayerPlacementStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, loader, trained, trainer


class ByHand(Net):
    """Of one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss_by_hand(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
        self.log("train", loss.detach(), on_epoch=True)

    def loss_by_hand(self, batch: Any) -> Tensor:
        return self.loss(batch)


class Adversaries(Net):
    """A Wasserstein GAN with a gradient penalty: two optimizers, toggled, and gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(0.2), nn.LayerNorm(16), nn.Linear(16, 1))

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1).type_as(real)
        x = (share * real + (1 - share) * fake).requires_grad_()
        scores = self.critic(x)
        (gradient,) = torch.autograd.grad(scores, x, torch.ones_like(scores), create_graph=True)
        return (gradient.norm(2, dim=1) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()  # type: ignore[misc]
        real = F.one_hot(batch[1], 10).type_as(batch[0])
        self.toggle_optimizer(two)
        fake = self(torch.randn_like(batch[0])).detach()
        loss = self.critic(fake).mean() - self.critic(real).mean() + 10 * self.penalty(real, fake)
        two.zero_grad()
        self.manual_backward(loss)
        two.step()
        self.untoggle_optimizer(two)
        self.log("critic", loss.detach())
        if batch_idx % 2 == 0:
            self.toggle_optimizer(one)
            loss = -self.critic(self(torch.randn_like(batch[0]))).mean()
            one.zero_grad()
            self.manual_backward(loss)
            one.step()
            self.untoggle_optimizer(one)

    def configure_optimizers(self) -> Any:
        own = [*self.net.parameters(), *self.head.parameters()]
        return torch.optim.Adam(own, 0.01, (0.5, 0.9)), torch.optim.Adam(self.critic.parameters(), 0.01, (0.5, 0.9))


class Sharpness(ByHand):
    """Steps from where the weights are perturbed by their gradients, as SAM does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
            moves = {p: p.grad * (0.05 / norm) for p in self.parameters() if p.grad is not None}
            for p, move in moves.items():
                p.add_(move)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, move in moves.items():
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


class Weighs(ByHand):
    """The loss goes by weights themselves, by one that is the step's own, and by random numbers in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.net.insert(1, nn.Dropout(0.3))

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        decay = sum((p.square().sum() for p in self.net.parameters()), torch.zeros(()))
        return F.cross_entropy(self.scale * self(x), y) + 1e-2 * torch.rand(()).type_as(x) * decay


class UsesWeights(ByHand):
    """The loss goes by what the step itself computes with a layer's weight and the batch."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, _ = batch
        return self.loss(batch) + F.linear(x, self.net[0].weight).square().mean() + (x @ self.net[0].weight.t()).mean()


class Keeps(ByHand):
    """The loss goes by what hooks on layers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        for name, layer in (("hidden", self.net[1]), ("last", self.net[3])):
            layer.register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, layer: nn.Module, given: Any, made: Tensor) -> None:
        self.kept[name] = made

    def loss_by_hand(self, batch: Any) -> Tensor:
        self.kept.clear()
        return self.loss(batch) + self.kept["hidden"].square().mean() + self.kept["last"].abs().mean()


class Eats(nn.Linear):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return super().forward(x)


class Writes(ByHand):
    """The step writes into what a layer has made, which a hook keeps, and a layer into a view of that."""

    def __init__(self) -> None:
        super().__init__()
        self.eats = Eats(8, 8)
        self.net[0].register_forward_hook(lambda layer, given, made: setattr(self, "made", made))

    def loss_by_hand(self, batch: Any) -> Tensor:
        h = self.net[0](batch[0])
        h += 1.0
        left = h[:, :3]
        left *= 2.0
        middle = h[:, 4:8]
        eaten = self.eats(h[:, 2:10])
        y = F.relu_(self.net[3](self.net[2](self.net[1](h))))
        return F.cross_entropy(self.head(y + eaten), batch[1]) + middle.square().mean() + self.made.abs().mean()


class Aliased(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.view(-1)


class WritesAliases(ByHand):
    """The step writes into what a layer returns beside its view."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Aliased(8, 8)

    def loss_by_hand(self, batch: Any) -> Tensor:
        y, flat = self.pair(self.net(batch[0]))
        y += 1.0
        return F.cross_entropy(self.head(y), batch[1]) + flat.square().mean()


class Assigns(ByHand):
    """Gives weights other memory."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        for p in (self.net[0].weight, self.head.bias):
            p.data = p.data * 0.9
        self.head.weight.requires_grad = False
        loss = self.loss(batch)
        self.head.weight.requires_grad = True
        self.net[2].bias.data = torch.full_like(self.net[2].bias, 0.1)
        return loss


class Branches(Net):
    """Goes by a value of an early layer, and calls a layer as often as another one says."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[0](x)
        if h.sum() > 0:
            h = h * 2.0
        for layer in self.net[1:]:
            h = layer(h)
        while h.square().mean().item() > 0.5:
            h = h / 2 + self.net[3](h) / 8
        return self.head(h)


class Penalized(Net):
    """Gradients of the loss by the batch, as a penalty."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self(x), batch[1])
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        self.log("penalty", gradient.square().sum().detach())
        return loss + gradient.square().sum()


class Now(Net):
    """Asks for a gradient in every second batch alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self(x), batch[1])
        if batch_idx % 2:
            self.log("saliency", torch.autograd.grad(loss, x, retain_graph=True)[0].abs().mean())
        return loss


class Freezes(Net):
    """Trains a layer in one of its calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.net.requires_grad_(False)
        h = self.net(x)
        self.net.requires_grad_(True)
        return self.head(h + self.net(x))


class Hooks(Net):
    """Halves a gradient, and reads those of before."""

    seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        last = self.head.weight.grad
        self.log("before", torch.zeros(()) if last is None else last.norm())
        handle = self.head.weight.register_hook(lambda gradient: gradient / 2)
        h = self.net(batch[0])
        h.retain_grad()
        loss = F.cross_entropy(self.head(h), batch[1])
        self.kept, self.handle = h, handle
        return loss

    def on_after_backward(self) -> None:
        self.log("kept", self.kept.grad.norm())  # type: ignore[union-attr]
        self.handle.remove()


class Copies(Net):
    """Measures itself by a copy of a layer that it makes in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.net(batch[0])
        with torch.no_grad():
            target = copy.deepcopy(self.head)(h.detach()).softmax(-1)
        return F.cross_entropy(self.head(h), batch[1]) + F.cross_entropy(self.head(2 * h), target)


MODULES: dict[str, Callable[[], Net]] = {
    kind.__name__: kind
    for kind in (
        ByHand,
        Adversaries,
        Sharpness,
        Weighs,
        UsesWeights,
        Keeps,
        Writes,
        Assigns,
        Branches,
        Penalized,
        Now,
        Freezes,
        Hooks,
        Copies,
    )  # fmt: skip
}
LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "pipeline": (2, partial(HybridParallelStrategy, pipeline_parallel_size=2)),
    "zbv": (2, partial(HybridParallelStrategy, pipeline_parallel_size=2, schedule="zbv")),
    "placement": (2, partial(LayerPlacementStrategy, "balanced")),
    "tensor": (
        4,
        partial(HybridParallelStrategy, pipeline_parallel_size=2, tensor_parallel_size=2, draws="one_device"),
    ),
    "residual": (
        4,
        partial(
            HybridParallelStrategy,
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            shard_residual=True,
            draws="one_device",
        ),
    ),
}
CELLS = [
    f"{kind}-{layout}"
    for layout in LAYOUTS
    for kind in MODULES
    if kind != "Hooks" or layout not in ("tensor", "residual")
]


def _fit(kind: str, layout: str) -> Any:
    return trained(MODULES[kind](), loader(12), LAYOUTS[layout][1], max_epochs=2)


@long("Branches-pipeline", "Keeps-tensor", "UsesWeights-pipeline")
@slow(
    but=[
        *(f"{kind}-pipeline" for kind in [*MODULES][::4]),
        "Adversaries-placement",
        "Keeps-tensor",
    ]
)
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_without_a_schedule_is_one_devices(cell: str, pool: Pool) -> None:
    kind, layout = cell.split("-")
    check(pool, _fit, kind, layout, world=LAYOUTS[layout][0])


def _replicas(kind: str, copies: int) -> Any:
    strategy = partial(HybridParallelStrategy, pipeline_parallel_size=2, data_parallel="fsdp")
    alone = partial(HybridParallelStrategy)
    return trained(MODULES[kind](), loader(16), strategy if copies == 4 else alone, max_epochs=2)["weights"]


@long("Adversaries")
@slow(but=["Adversaries", "Penalized"])
@pytest.mark.parametrize("kind", ["Adversaries", "Assigns", "ByHand", "Sharpness", "UsesWeights", "Penalized", "Now"])
def test_with_replicas_it_is_that_of_replicas_alone(kind: str, pool: Pool) -> None:
    expected = pool.run(2, _replicas, kind, 2)[0]
    for found in pool.run(4, _replicas, kind, 4):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def _writes_aliases() -> None:
    """Here alone ranks could go on with other values than one device."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        strategy = HybridParallelStrategy(pipeline_parallel_size=2)
        trainer(must_split=False, strategy=strategy).fit(WritesAliases(), loader(8))


def test_writes_into_aliases_that_other_ranks_do_not_have_are_an_error_on_all(pool: Pool) -> None:
    pool.run(2, _writes_aliases)


def _told(kind: str, **layout: Any) -> list[str]:
    t = trainer(must_split=False, strategy=HybridParallelStrategy(**layout))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        t.fit(MODULES[kind](), loader(8))
    return [str(one.message) for one in told if "layer by layer" in str(one.message)]


@long("Branches-the step reads a value that depends on")
@pytest.mark.parametrize(
    ("kind", "reason"), [("Branches", "the step reads a value that depends on"), ("ByHand", "ByHand optimizes by hand")]
)
def test_the_reason_is_told_once(kind: str, reason: str, pool: Pool) -> None:
    first, second = pool.run(2, _told, kind, pipeline_parallel_size=2)
    assert second == [] and len(first) == 1
    assert "training_step runs layer by layer" in first[0] and reason in first[0]


@pytest.mark.parametrize(
    ("kind", "reason"), [("Penalized", "torch.autograd.grad within a step"), ("ByHand", "optimizes by hand")]
)
def test_where_microbatches_are_asked_for_it_is_refused(kind: str, reason: str, pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as refused:
        pool.run(2, _told, kind, pipeline_parallel_size=2, microbatches=2)
    assert "microbatches=2: " in str(refused.value) and reason in str(refused.value)
    assert "Or write microbatches='auto', which takes 1 here, with which the step runs layer by" in str(refused.value)
