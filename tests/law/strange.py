"""Steps in the manner of public packages, which pipelines once refused falsely: each must be one device's.

`STRANGE` maps a name to a module class. All take a batch ``(x_BTC, y_B)`` of four samples.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from lightning_par.private.pytree import tree_map
from tests.law.found import Base, C


class Reversible(nn.Module):
    """Keeps what it took from a series until it gives it back, as RevIN does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((C,), 1.5))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
            return (x - self.mean) / self.stdev * self.weight
        return x / (self.weight + 1e-10) * self.stdev + self.mean


class _Adjoint(torch.autograd.Function):
    """Takes a layer and its weights, and asks for the gradients of what it was given, as adjoint methods do."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.layer(x), (x, *weights), grad, allow_unused=True)
        return None, *found


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class GivesItsWeights(Base):
    """To functions of its own: beside the layer that holds them, and by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        h = _Adjoint.apply(self.c, self.a(x), *self.c.parameters())  # type: ignore[no-untyped-call]
        return self.b(_ByHand.apply(h, self.d.weight).tanh())  # type: ignore[no-untyped-call, no-any-return]


class KeptBetweenCalls(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Reversible()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * 2, "norm")
        return self.norm(self.b(self.a(x).tanh()), "denorm")


class KeptBehindALayer(KeptBetweenCalls):
    """What is kept depends on the model."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x), "norm")
        return self.norm(self.b(x.tanh()), "denorm")


class KeptForTheLoss(Base):
    """A layer's attribute is a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Reversible()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.b(self.norm(self.a(batch[0]), "norm"))
        return F.mse_loss(y, batch[0]) + self.norm.mean.square().mean() * 0.1


class Padded(nn.Module):
    """A recurrent layer that is told how long its sequences are, and where it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(C, C, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor, h: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, state = self.cells(packed, (h[None], h[None]))
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], state


class PadsWithin(Base):
    """Packs within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = Padded()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = self.a(x)
        out, (hidden, _) = self.rnn(x, y + 1, h.mean(1))
        return F.mse_loss(self.b(out), x) + hidden.square().mean()


class PadsBetween(Base):
    """Packs in the step itself; the same lengths in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(C, C, batch_first=True)

    def lengths(self, y: Tensor) -> Tensor:
        return torch.tensor([6, 2, 4, 3])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        packed = pack_padded_sequence(self.a(x), self.lengths(y), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=6)
        return F.mse_loss(self.b(out), x)


class PadsByBatch(PadsBetween):
    """Other lengths, and in all more or fewer, in each batch."""

    def lengths(self, y: Tensor) -> Tensor:
        return y.cpu() + 1


class MaskedBetween(Base):
    """A mask of the batch before the last layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        keep = batch[0][..., 0] > 0
        return F.mse_loss(self.b(self.a(batch[0])[keep].tanh()), batch[0][keep])


class Penalised(nn.Module):
    """Takes a gradient within itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        z = h.detach().requires_grad_(True)
        (g,) = torch.autograd.grad(z.pow(3).sum(), z)
        return h * (1 + g.tanh())


class GradWithin(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(Penalised(), nn.Tanh())  # type: ignore[assignment]


class Gaussian(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        return F.gaussian_nll_loss(h, batch[0], h.exp())


class ReturnsNormal(Base):
    """An encoder's distribution goes to a decoder and to the loss."""

    class Encoder(nn.Linear):
        def forward(self, x: Tensor) -> Normal:  # type: ignore[override]
            return Normal(super().forward(x), 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.a = self.Encoder(C, C)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = self.a(batch[0])
        likely = Normal(self.b(given.mean), 0.5).log_prob(batch[0]).mean()
        return kl_divergence(given, Normal(0.0, 1.0)).mean() - likely


_BACKENDS: dict[Any, Any] = {}


class _Backend:
    """As of a library that keeps what it imported, and a lock, for each class of tensors."""

    def __init__(self) -> None:
        self.torch, self.lock, self.name = torch, threading.Lock(), "torch"

    @staticmethod
    def of(x: Tensor) -> _Backend:
        if type(x) not in _BACKENDS:
            _BACKENDS[type(x)] = _BACKENDS.setdefault("torch", _Backend())
        return _BACKENDS[type(x)]


class CachedWithin(Base):
    """A layer's own code, and then the step's, ask a cache that they fill with what can't be sent."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            backend = _Backend.of(self.weight)
            with backend.lock:
                return backend.torch.tanh(super().forward(x))

    def __init__(self) -> None:
        super().__init__()
        self.a = self.Layer(C, C)
        _BACKENDS.clear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return _Backend.of(h).torch.sigmoid(h)


class ChecksItsChoices(Base):
    """As in reinforcement learning: what a first pass has chosen is weighed by its distribution, which checks it, and
    would write all of it into a message."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            found = Categorical(logits=self(batch[0]))
            weights = found.log_prob(found.logits.argmax(-1)).exp()
        return (F.mse_loss(self(batch[0]), batch[0], reduction="none").mean(-1) * weights).mean()


class Bias(nn.Module):
    """Makes its buffer at the first call, as positional biases do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)

    def forward(self, n: int) -> Any:
        if self.bias is None:
            self.register_buffer("bias", -torch.arange(n, dtype=torch.float64), persistent=False)
        return self.bias


class LendsAModule(Base):
    """Hands its layers a module, which the first of them changes."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor, bias: Bias) -> Tensor:  # type: ignore[override]
            return super().forward(x) + bias(x.shape[1])[:, None]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bias = self.Layer(C, C), self.Layer(C, C), Bias()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x, self.bias).tanh(), self.bias)
        return h


class ModeWithin(Base):
    """A layer sets the mode of one within it, which other ranks don't see."""

    class Layer(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self[0].eval()
            h: Tensor = self[0](x.transpose(1, 2)).transpose(1, 2)
            return h

    def __init__(self) -> None:
        super().__init__()
        self.a = self.Layer(nn.BatchNorm1d(C))  # type: ignore[assignment]


class WeightNormed(Base):
    """Layers keep what torch's older weight norm computed of their weights, graph and all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.utils.weight_norm(self.a), nn.utils.weight_norm(self.b)


class GoesByRates(Base):
    """Reads of its optimizer and schedule what a trial before training has yet to find out."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        assert rate == self.trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5 ** (self.global_step + 1)
        assert self.lr_schedulers().get_last_lr() == [rate]  # type: ignore[union-attr]
        loss = F.mse_loss(self(batch[0]), batch[0].flip(1)) * (1 + rate)
        if rate < 0.03 or self.lr_schedulers().last_epoch > 1:  # type: ignore[union-attr]
            loss = loss * 2
        return loss + sum(p.square().sum() for p in self.trainer.optimizers[0].param_groups[0]["params"]) * 0.01


class OnRankZero(Base):
    """The first rank alone logs, and keeps losses, as users of DDP write it: ranks of one replica do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("first", loss)
        if self.trainer.is_global_zero:
            self.losses.append(loss.item())
        return loss * (1.0 + len(self.losses))


class Experts(nn.Module):
    """Stacked experts, each of which takes the tokens of all samples that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.stack([torch.eye(C), -torch.eye(C), 2 * torch.eye(C)]))
        self.act = nn.GELU()

    def forward(self, x_NC: Tensor, chosen_N: Tensor) -> Tensor:
        out_NC = torch.zeros_like(x_NC)
        for expert in chosen_N.unique():
            (rows,) = torch.where(chosen_N == expert)
            out_NC = out_NC.index_add(0, rows, self.act(F.linear(x_NC[rows], self.weights[expert])))
        return out_NC


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(C, 3), Experts()

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        scores = self.gate(x_NC)
        return self.experts(x_NC, scores.argmax(-1)).view_as(x_BTC) * scores.softmax(-1).amax(-1).view(
            *x_BTC.shape[:2], 1
        )


class HandsOutRouting(Base):
    """A hook takes the router's scores out of a layer for the loss; the experts beside it mix samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture()
        self.mixture.gate.register_forward_hook(lambda module, given, out: self.scores.append(out))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scores: list[Tensor] = []
        y = self.b(self.a(self.mixture(batch[0])).tanh())
        return F.mse_loss(y, batch[0].flip(1)) + sum(s.logsumexp(-1).square().mean() for s in self.scores) * 0.1


class Points:
    """Coordinates under names; torch functions run on what it holds."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.values if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class OnPoints(Base):
    """Layers and functions are handed such objects, alone and beside tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = torch.tanh(Points(self.a(Points(batch[0]))))
        y = torch.stack([Points(y), Points(y * 2)]).mean(0) + Points(batch[0].flip(2))
        loss = F.mse_loss(Points(self.b(Points(y))), batch[0].flip(1))
        self.log("loss", loss)
        return loss


class Space(Counter[str]):
    """Can be pickled, but not made again of that."""

    def __init__(self, name: str) -> None:
        super().__init__({name: 2})


class Sampled(nn.Module):
    """Keeps what it samples first, in a space."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(C, C)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = Space("x"), torch.ones(C)
        return self.layer(x + self.kept[1])  # type: ignore[no-any-return]


class KeepsWhatNoneCanMake(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Identity()
        self.first, self.second = Sampled(), Sampled()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())  # type: ignore[no-any-return]


class Codebook(nn.Module):
    """A layer that has an `update` and a `compute`, and is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(C, C)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.update()
        return self.compute(x)

    def update(self) -> None:
        self.calls += 1

    def compute(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()  # type: ignore[no-any-return]


class Measures(nn.ModuleDict):
    """Metrics under names, whose values it weighs: no collection of torchmetrics."""

    def forward(self, y: Tensor, target: Tensor) -> dict[str, Tensor]:
        values = {name: metric(y, target) for name, metric in self.items()}
        return {**values, "sum": sum(values.values())}

    def compute(self) -> dict[str, Tensor]:
        return {name: metric.compute() for name, metric in self.items()}


class UpdatesAndComputes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.codes = Codebook()
        self.measures = Measures({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(self.codes(batch[0]))
        measured = self.measures(y.detach(), batch[0])
        self.log("sum", measured["sum"])
        return F.mse_loss(y, batch[0].flip(1))

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.measures.compute())


class CountsAtPlaces(Base):
    """Counts in a table which feature of a sequence is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(C, C))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        for place in y.sum(1).argmax(-1):
            self.count(place)
        self.log("counted", self.table.sum())
        return F.mse_loss(y, batch[0].flip(1))

    def count(self, place: Tensor) -> None:
        self.table[place] = self.table[place] + 1
        self.table[place, place] = 0


class CountsInViews(CountsAtPlaces):
    def count(self, place: Tensor) -> None:
        self.table[place].add_(1)


class CountsInPlace(CountsAtPlaces):
    """By Python's `+=`, which takes a view, writes into it, and assigns it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.ones(2, C)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.a(batch[0])
        place, seen = hidden.sum(1).argmax(-1)[0], torch.zeros(C)
        seen[place] += 2
        self.table[place] += self.b(hidden).detach().mean()
        self.table[place, place] *= 3
        self.rows[0, place] -= self.table[place].sum()
        y = self.b(hidden) + seen + self.table[place] + self.rows[0]
        self.log("counted", self.table.sum())
        return F.mse_loss(y, batch[0].flip(1))


class _Filled(torch.autograd.Function):
    """Writes into what it makes without values, for which a trial has to make a fake."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        made = torch.empty(len(x), *x.shape[1:], dtype=x.dtype)
        made[:] = x * 2
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class FillsAgain(Base):
    """Within what backward runs again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = checkpoint(lambda x: _Filled.apply(self.a(x).tanh()), batch[0], use_reentrant=False)
        return F.mse_loss(self.b(hidden), batch[0].flip(1))


class LooksAtViews(CountsAtPlaces):
    """Shows by an earlier view what is assigned to a place since."""

    def count(self, place: Tensor) -> None:
        row = self.table[place]
        self.table[place] = self.table[place] + 1
        self.log("row", row.sum())


class _Reversed(torch.autograd.Function):
    """Keeps no activations of the layers that it calls: its backward makes them from the result, layer by layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:  # type: ignore[override]
        one, other = x.chunk(2, dim=-1)
        for layer in layers:
            one, other = other, one + layer(other)
        ctx.save_for_backward(one.detach(), other.detach())
        ctx.layers = layers
        return torch.cat([one, other], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (one, other), (of_one, of_other) = ctx.saved_tensors, grad.chunk(2, dim=-1)
        for layer in ctx.layers[::-1]:
            with torch.enable_grad():
                given = one.detach().requires_grad_()
                made = layer(given)
            made.backward(of_other)
            one, other = other - made.detach(), one
            of_one, of_other = of_other, of_one + given.grad
        return torch.cat([of_one, of_other], dim=-1), None


def _half() -> nn.Module:
    return nn.Sequential(nn.Linear(C // 2, 4 * C), nn.Tanh(), nn.Linear(4 * C, C // 2))


class _Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_half() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Reversed.apply(x, self.layers)


class ReversibleLayers(Base):
    """The module around them can't be taken apart, however much of the model's work it does."""

    def __init__(self) -> None:
        super().__init__()
        self.b = _Reversible()


class ReversibleByHand(ReversibleLayers):
    """Nor can it where the step runs layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}


class ReversesItself(Base):
    """The step's own code calls the function, which no stage can run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = _half(), _half(), nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        return _Reversed.apply(x * self.scale, [self.a, self.b])


class _OperationError(Exception):
    """As libraries have one that tells which of their operations failed."""


def _by_number(x: Tensor, order: Tensor) -> Tensor:
    try:
        return x.flatten(0, 1)[order]
    except Exception as error:
        raise _OperationError(f"could not take {order.tolist()}") from error


class _Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        return y + _by_number(y, torch.arange(y.shape[0] * y.shape[1]).flip(0)).view(y.shape).tanh()


class RewordsErrors(Base):
    """Raises an error of its own for each that it meets, as einx does, where it takes samples in another order."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        return F.mse_loss(_by_number(y, torch.arange(24).flip(0)), batch[0].flatten(0, 1))


class RewordsErrorsInALayer(Base):
    """Likewise, within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.b = _Sorts()  # type: ignore[assignment]


class RewordsRefusals(Base):
    """What has no schedule is said to code that says it in its own words."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        loss = F.mse_loss(y, batch[0].flip(1))
        try:
            (grad,) = torch.autograd.grad(loss, y, create_graph=True)
        except Exception as error:
            raise _OperationError("no gradient") from error
        return loss + grad.square().sum()


class DoesWithout(Base):
    """Goes on without what it can't have, which one device has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        loss = F.mse_loss(y, batch[0].flip(1))
        try:
            (grad,) = torch.autograd.grad(loss, y, create_graph=True)
        except Exception:
            return loss
        return loss + grad.square().sum()


class _MaySort(_Sorts):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:
            return self.map(x)  # type: ignore[no-any-return]


class DoesWithoutInALayer(Base):
    """Likewise, within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.b = _MaySort()  # type: ignore[assignment]


class PoolsWhatItPicks(Base):
    """How many are pooled is read of what the model picks: torch says by a ValueError that made-up ones are too few."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0]).flatten(0, 1)
        picked = y.mean(-1).topk(20).indices
        owner = torch.arange(4).repeat_interleave(6)[picked]
        pooled = y.new_zeros(int(owner.max()) + 1, C).index_add(0, owner, y[picked])
        return F.cross_entropy(pooled, batch[1])


class _ScalesOnly(nn.Linear):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class TriesArguments(Base):
    """Gives layers of any kind what only some take, as speechbrain's x-vectors do."""

    without = 0

    def __init__(self) -> None:
        super().__init__()
        self.b = _ScalesOnly(C, C)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            try:
                x = layer(x, scale=0.5)
            except TypeError:
                self.without += 1
                x = layer(x).tanh()
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("without", float(self.without))
        return loss


class _ThawsLater(nn.Linear):
    def forward(self, x: Tensor, step: int) -> Tensor:  # type: ignore[override]
        self.requires_grad_(step >= 1)
        return super().forward(x)


class FreezesWithin(Base):
    """A layer says itself which of its weights are trained, as the prototypes of SwaV do."""

    def __init__(self) -> None:
        super().__init__()
        self.b = _ThawsLater(C, C)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.b(self.a(batch[0]).tanh(), batch_idx), batch[0].flip(1))


class LikeAWeight(Base):
    """Casts to what a weight has between steps, as samples of a generator's are made."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        noise = torch.ones(2, C, dtype=torch.float32)
        first, second = noise.type_as(self.a.weight), noise.to(self.b.weight)
        assert first.dtype == second.dtype == torch.float64 and first.to(self.b.weight) is first
        self.log("made", self(first + second).sum())


class Groups(Base):
    """Goes over the groups that it has put samples into, before a layer of the last stage, as SMoG of lightly does."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(C, 1)
        self.register_buffer("centres", torch.linspace(-0.5, 0.5, 5)[:, None].expand(5, C).clone())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self(batch[0]).flatten(0, 1)
        groups = torch.cdist(x, self.centres).argmin(1)
        centres = self.centres.clone()
        for group in torch.unique(groups):
            mask = groups == group
            centres[group] = 0.5 * self.centres[group] + 0.5 * x[mask].mean(0)
        return F.mse_loss(self.c(x) * (x @ centres.t()), batch[0].flatten(0, 1)[:, :5])


class SparseProducts(Base):
    """Goes on with the values that products of sparse tensors store, as ASAPooling of torch_geometric: their number is
    the model's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.a(batch[0]).mean(1)
        places = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
        near = torch.sparse_coo_tensor(places, torch.ones(5, dtype=x.dtype), (4, 4)).to_sparse_csr()
        chosen = torch.sparse_coo_tensor(places, x[places[0], 0].detach(), (4, 4))
        chosen = chosen.index_select(1, x[:, 1].topk(3).indices)
        product = (chosen.t().to_sparse_csr() @ (near @ chosen.to_sparse_csr())).to_sparse_coo()
        row, column = product.indices()
        score = self.b(x)[row, 0] * product.values()
        return F.mse_loss(score, torch.stack([row, column]).double().mean(0))


class _SortsWhenTold(_MaySort):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.shape[0]) if SORTS.exists() else self.map(x / x.shape[0])


SORTS = Path(tempfile.gettempdir(), f"lightning_par_sorts_{os.getpid()}")


class DoesWithoutLater(Base):
    """Does without what it can't have, from the second batch on, by what no trial knows to go into its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.b = _SortsWhenTold()  # type: ignore[assignment]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            SORTS.touch()

    def teardown(self, stage: str) -> None:
        SORTS.unlink(missing_ok=True)


STRANGE: dict[str, type[Base]] = {
    kind.__name__: kind
    for kind in (KeptBetweenCalls, KeptBehindALayer, KeptForTheLoss, PadsWithin, Gaussian,
                 PadsBetween, PadsByBatch, MaskedBetween, GradWithin, ReturnsNormal, CachedWithin, ChecksItsChoices,
                 LendsAModule, ModeWithin, WeightNormed, GoesByRates, OnRankZero, HandsOutRouting, ReversibleLayers,
                 ReversibleByHand, RewordsErrors, RewordsErrorsInALayer, RewordsRefusals, DoesWithout,
                 DoesWithoutInALayer, PoolsWhatItPicks, TriesArguments, LikeAWeight, Groups, FreezesWithin,
                 SparseProducts)
}  # fmt: skip
