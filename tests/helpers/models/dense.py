"""Feed-forward nets: layers used twice, branches, writes in place, weights without a layer, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models.bases import Classifier, Regression
from tests.helpers.models.case import Case
from tests.helpers.models.data import vectors


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))


def deep_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(),
        nn.Linear(24, 16),
        nn.Tanh(),
        nn.Linear(16, 24),
        nn.SiLU(inplace=True),
        nn.Linear(24, 3),
    )


def smooth_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Softplus(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def odd_mlp() -> nn.Module:
    """Three linear layers, widths that don't divide."""
    return nn.Sequential(nn.Linear(12, 15), nn.GELU(approximate="tanh"), nn.Linear(15, 7), nn.ELU(), nn.Linear(7, 5))


def hidden_mlp(*middle: nn.Module, width: int = 32) -> nn.Module:
    """Modules between the two layers of an MLP, where activations may be split."""
    return nn.Sequential(nn.Linear(12, width), *middle, nn.Linear(width, 5))


def batch_norm_mlp() -> nn.Module:
    return hidden_mlp(nn.BatchNorm1d(32), nn.ReLU())


def weight_norm_mlp() -> nn.Module:
    norm = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(12, 32)), nn.ReLU(), norm(nn.Linear(32, 5)))


def spectral_norm_mlp() -> nn.Module:
    norm = torch.nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(12, 32)), nn.LeakyReLU(0.2), norm(nn.Linear(32, 5)))


class ReusedLinear(nn.Module):
    """The same layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.middle(x))
        return self.last(torch.relu(self.middle(x)) + x)


class BackAndForth(Regression):
    """Four linear layers, the first and the last of one device, the others of another."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(*size) for size in ((12, 24), (24, 24), (24, 16), (16, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc3(torch.relu(self.fc2(x))))
        return self.fc4(x)


class Branches(Classifier):
    """Three branches off a trunk, of which one reads the input as well, joined by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 16)
        self.left, self.middle, self.right = (nn.Sequential(nn.Linear(n, 24), nn.GELU()) for n in (16, 16, 28))
        self.join, self.head = nn.Linear(48, 16), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        left, middle = self.left(h), self.middle(h)
        right = self.right(torch.cat([h, x], 1))
        joined = self.join(torch.cat([left, right], 1)) + h
        return self.head(torch.cat([joined, middle], 1))


class WritesInPlace(Regression):
    """Writes into activations through views, between layers, inside one and before another reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(12, 16),
            nn.Sequential(nn.Tanh(), nn.Linear(16, 16)),
            nn.Linear(16, 3),
        )
        self.eats = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[:, :4] *= 2
        early = h.sum(1, keepdim=True)
        y = self.second(h * 1)
        y[:, 2] = 0
        y += early
        z = self.eats(y)  # writes into y
        return self.third(z + y)


class WritesIntoView(Regression):
    """Writes through a view that an earlier layer read, before the whole tensor is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        left, right = h[:, :8], h[:, 8:]
        y = self.norm(torch.cat([left, right], 1))
        left += 1.0
        return self.down(h + y + left.sum(1, keepdim=True))


class ReusedMLP(nn.Module):
    """A residual MLP called three times: up and down are each used by three regions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.head = (
            nn.Linear(12, 16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = x + self.down(F.gelu(self.up(x)))
        return self.head(x)


class FunctionalWeights(nn.Module):
    """Weights as bare parameters, used by `@`, `F.linear`, einsum and addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(12, 16) / 4)
        self.b1 = nn.Parameter(torch.zeros(16))
        self.w2 = nn.Parameter(torch.randn(24, 16) / 4)
        self.b2 = nn.Parameter(torch.zeros(24))
        self.w3 = nn.Parameter(torch.randn(24, 4, 4) / 4)
        self.w4 = nn.Parameter(torch.randn(16, 5) / 4)
        self.b4 = nn.Parameter(torch.zeros(5))
        self.scales = nn.ParameterDict({"out": nn.Parameter(torch.ones(5))})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.w1 + self.b1)
        x = torch.relu(F.linear(x, self.w2, self.b2))
        x = torch.einsum("bi,ijk->bjk", x, self.w3).flatten(1)
        return torch.addmm(self.b4, x, self.w4) * self.scales["out"]


class MixedUses(nn.Module):
    """A hidden activation used many ways at once: slices, concatenation, indexing, statistics, an in-place update."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 32), nn.Linear(48, 5)
        self.skip = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h.mul_(2)
        h += h.mean(dim=1, keepdim=True)
        h = F.relu(h)
        low, high = h[:, :16], h.narrow(1, 16, 16)
        both = torch.cat([high, low.flip(1), h[:, ::2]], dim=1)
        order = torch.arange(h.shape[-1] - 1, -1, -2)
        return self.fc2(both) + self.skip(h[:, order]) + h.cumsum(1)[:, -5:] / h.std()


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.save_for_backward(x)
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1).to(grad.dtype), None


class CustomAutograd(nn.Module):
    """A user's autograd function on the hidden activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(Straight.apply(self.fc1(x), 64))


def mlp(make: Callable[[], nn.Module], couples: bool = False) -> Case:
    return Case(lambda: Classifier(make()), vectors(), couples=couples)


ROWS: dict[str, Case] = {
    "mlp": mlp(plain_mlp),
    "mlp_odd": mlp(odd_mlp),
    "mlp_back_and_forth": Case(BackAndForth, vectors(classes=0)),
    "mlp_branches": Case(Branches, vectors()),
    "mlp_writes_in_place": Case(WritesInPlace, vectors(classes=0)),
    "mlp_writes_into_view": Case(WritesIntoView, vectors(classes=0)),
    "mlp_one_layer": mlp(lambda: nn.Linear(12, 5)),
    "mlp_reused_linear": mlp(ReusedLinear),
    "mlp_reused": mlp(ReusedMLP),
    "mlp_functional": mlp(FunctionalWeights),
    "mlp_mixed_uses": mlp(MixedUses),
    "mlp_layer_norm": mlp(lambda: hidden_mlp(nn.LayerNorm(32), nn.ReLU())),
    "mlp_group_norm": mlp(lambda: hidden_mlp(nn.GroupNorm(8, 32), nn.Mish())),
    "mlp_softmax": mlp(lambda: hidden_mlp(nn.Softmax(dim=-1))),
    "mlp_prelu": mlp(lambda: hidden_mlp(nn.PReLU(32), nn.Unflatten(1, (8, 4)), nn.Flatten(), nn.Softplus())),
    "mlp_batch_norm": mlp(batch_norm_mlp, couples=True),
    "mlp_weight_norm": mlp(weight_norm_mlp),
    "mlp_spectral_norm": mlp(spectral_norm_mlp, couples=True),
    "mlp_custom_autograd": mlp(CustomAutograd),
}
