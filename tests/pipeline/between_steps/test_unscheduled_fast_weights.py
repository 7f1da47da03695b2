"""Steps without a schedule that compute with weights which they make themselves, as in learning to learn."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, loader, trained
from tests.pipeline.between_steps.test_unscheduled import LAYOUTS, ByHand


class Functional(ByHand):
    """Learns weights from which one gradient step leads to good ones, of the second order."""

    create_graph = True

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        fast = dict(self.named_parameters())
        for _ in range(2):
            loss = F.cross_entropy(functional_call(self, fast, (x[::2],)), y[::2])
            gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=self.create_graph)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients)}
        return F.cross_entropy(functional_call(self, fast, (x[1::2],)), y[1::2])


class FirstOrder(Functional):
    create_graph = False


class Automatic(Net):
    """Likewise, with the loss's backward left to Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Functional.loss_by_hand(self, batch)  # type: ignore[arg-type]
        self.log("train", loss.detach())
        return loss

    create_graph = True


class Linears(ByHand):
    """With functions of copies of weights."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        fast = [p.clone() for p in (*self.net.parameters(), *self.head.parameters())]
        for _ in range(2):
            loss = F.cross_entropy(self.run(fast, x[::2]), y[::2])
            gradients = torch.autograd.grad(loss, fast, create_graph=True)
            fast = [p - 0.1 * g for p, g in zip(fast, gradients)]
        return F.cross_entropy(self.run(fast, x[1::2]), y[1::2])

    def run(self, w: list[Tensor], x: Tensor) -> Tensor:
        h = F.layer_norm(F.linear(F.gelu(F.linear(x, w[0], w[1])), w[2], w[3]), (8,), w[4], w[5])
        return F.linear(h, w[6], w[7])


class Cloned(ByHand):
    """Copies of weights in their place, of which some are the weights themselves, and gradients of these gradients."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        fast = {name: p.clone() if "weight" in name else p for name, p in self.net.named_parameters()}
        inner = functional_call(self.net, fast, (x[::2],)).square().mean()
        gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        faster = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients)}
        h = functional_call(self.net, faster, (x[1::2],))
        return F.cross_entropy(self.head(h), y[1::2]) + inner


class Leaves(ByHand):
    """Copies that are leaves, by `detach` or `deepcopy`, whose own gradients go into the loss, as in first-order
    learning to learn."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        fast = {name: p.detach().clone().requires_grad_() for name, p in self.net.named_parameters()}
        for _ in range(2):
            inner = functional_call(self.net, fast, (x,)).square().mean()
            gradients = torch.autograd.grad(inner, list(fast.values()))
            fast = {name: (p - 0.1 * g).detach().requires_grad_() for (name, p), g in zip(fast.items(), gradients)}
        twin = deepcopy(self.net)
        others = torch.autograd.grad(twin(x).square().mean(), list(twin.parameters()))
        near = [(p - q.detach()).square().sum() for p, q in zip(self.net.parameters(), fast.values())]
        return self.loss(batch) + sum(near) + sum((p * g).sum() for p, g in zip(self.net.parameters(), others))


class ByHead(ByHand):
    """Of the last layer alone."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.net(x)
        weight, bias = self.head.weight, self.head.bias
        for _ in range(2):
            loss = F.cross_entropy(F.linear(h[::2], weight, bias), y[::2])
            one, other = torch.autograd.grad(loss, (weight, bias), create_graph=True)
            weight, bias = weight - 0.1 * one, bias - 0.1 * other
        return F.cross_entropy(F.linear(h[1::2], weight, bias), y[1::2])


class PartsCalled(ByHand):
    """Layers with weights of the step's own."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        noise = {name: p * (1 + 0.1 * p.detach().sign()) for name, p in self.net.named_parameters()}
        return F.cross_entropy(self.head(functional_call(self.net, noise, (x,))), y)


class Frozen(ByHand):
    """Copies that are leaves, of which no gradient comes."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        teacher, detached = deepcopy(self.net).requires_grad_(False), deepcopy(self.net)
        h = self.net(x)
        return F.cross_entropy(self.head(h), y) + F.mse_loss(h, 0.5 * (teacher(x) + detached(x).detach()))


class TrainsACopy(ByHand):
    """Whose gradients are the copy's own, beside a loss that has others."""

    def loss_by_hand(self, batch: Any) -> Tensor:
        return self.loss(batch) + deepcopy(self.net)(batch[0]).square().mean()


class TrainsALeaf(ByHand):
    def loss_by_hand(self, batch: Any) -> Tensor:
        x, y = batch
        weight = torch.nn.Parameter(self.head.weight.detach().clone())
        return self.loss(batch) + F.cross_entropy(F.linear(self.net(x), weight), y)


MODULES: dict[str, Callable[[], Net]] = {
    kind.__name__: kind
    for kind in (Functional, FirstOrder, Automatic, Linears, Cloned, Leaves, ByHead, PartsCalled, Frozen)
}


def _fit(kind: str, layout: str) -> Any:
    return trained(MODULES[kind](), loader(12), LAYOUTS[layout][1], max_epochs=2)


CELLS = [f"{kind}-{layout}" for layout in LAYOUTS for kind in MODULES]


@long("Automatic-placement")
@slow(but=["Cloned-pipeline", "Automatic-placement", "Leaves-placement"])
@pytest.mark.parametrize("cell", CELLS)
def test_steps_with_weights_of_their_own_are_one_devices(cell: str, pool: Pool) -> None:
    kind, layout = cell.split("-")
    check(pool, _fit, kind, layout, world=LAYOUTS[layout][0])


FSDP = partial(HybridParallelStrategy, pipeline_parallel_size=2, data_parallel="fsdp")


def _refused(kind: str, layout: str) -> None:
    strategy = FSDP if layout == "fsdp" else LAYOUTS[layout][1]
    trained({"copy": TrainsACopy, "leaf": TrainsALeaf}[kind](), loader(12), strategy, max_epochs=1)


@slow(but=["pipeline-copy"])
@pytest.mark.parametrize("kind", ["copy", "leaf"])
@pytest.mark.parametrize("layout", ["pipeline", "placement", "tensor", "fsdp"])
def test_a_backward_into_copies_that_are_leaves_is_refused(kind: str, layout: str, pool: Pool) -> None:
    """They were none, silently."""
    with pytest.raises(RanksFailedError, match="for the `.grad` of a copy of weights"):
        pool.run(4 if layout in ("tensor", "fsdp") else 2, _refused, kind, layout, grace=5.0)
