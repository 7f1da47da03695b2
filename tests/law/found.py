"""Steps as users write them that rules once misjudged: each must give one device's losses and weights.

`FOUND` maps a name to a module class. All take a batch ``(x_BTC, y_B)`` of four samples.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
from collections import deque
from contextvars import ContextVar
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

C = 8


class Base(LightningModule):
    """Two layers, on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), batch[0].flip(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Guarded(Base):
    """Looks at the loss to raise, to say and to count: neither needs it while it is made."""

    high = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        loss, size = F.mse_loss(y, batch[0].flip(1)), y.square().mean()
        if torch.isnan(loss):
            print("Model Parameters", self.hparams)
            raise ArithmeticError("Loss is NaN, training stopped.")
        if size.item() > 1e9 or not torch.isfinite(size):
            raise ArithmeticError("the output is too large")
        if loss > 1.2:
            self.high += 1
        self.log("high", float(self.high))
        return {"loss": loss}


class DecidesByLoss(Base):
    """No guards: by one helper or another, and where it takes two answers to get there."""

    def is_high(self, x: Tensor) -> bool:
        return bool(x > 1.25)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[0].flip(1))
        if self.is_high(loss - 1e6):
            raise ArithmeticError("too high")
        if self.is_high(loss) and not loss < 0:
            loss = loss * 2
        return loss


class MetricAsLoss(Base):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.criterion(self(batch[0]), batch[0])
        self.log("loss", loss)
        return loss


class MaskedByBatch(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        keep = batch[1] != 3
        return F.cross_entropy(self(batch[0]).mean(1)[keep], batch[1][keep])


class Teacher(Base):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(C, C)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0]).tanh()
        with torch.no_grad():
            wanted = self.teacher(h)
        return F.mse_loss(self.b(h), wanted)


class SetGradEnabled(Teacher):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0]).tanh()
        torch.set_grad_enabled(False)
        wanted = self.teacher(h)
        torch.set_grad_enabled(True)
        return F.mse_loss(self.b(h), wanted)


class Item(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        one, two = F.cross_entropy(h.mean(1), batch[1]), h.square().mean()
        return one + two * (one.item() / two.item())


class FloatOfValue(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + float(loss))


class NumpyMatching(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        best = torch.from_numpy(torch.cdist(h, batch[0]).detach().cpu().numpy().argmax(-1))
        return F.mse_loss(h, batch[0].gather(1, best[..., None].expand(-1, -1, C)))


class MatchesTargets(Base):
    """A detector's loss: what a matching finds is written into targets, of which there is a view from before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        best = torch.from_numpy(torch.cdist(h, batch[0]).detach().cpu().numpy().argmax(-1))
        kinds = torch.full(h.shape[:2], C - 1)
        flat = kinds.view(-1)
        kinds[torch.arange(len(h))[:, None], best] = batch[1][:, None].expand_as(best)
        kinds[0, int(best[0, 0])] = 5
        return F.cross_entropy(h.flatten(0, 1), flat) + F.cross_entropy(h.transpose(1, 2), kinds)


_taken: ContextVar[list[Tensor] | None] = ContextVar("taken", default=None)


class TakesFromHooks(Base):
    """Hooks that the model registers as it first runs hand its layers' outputs to a list that no object holds, whose
    last entry is replaced."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)) for _ in range(2)]
        self.model = _Captured(nn.ModuleList(layers))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.model(self.a(x))
        return self.b(first.tanh() + last)


class _Captured(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.hooked = layers, False

    def forward(self, x: Tensor) -> list[Tensor]:
        for layer in () if self.hooked else self.layers:
            layer.register_forward_hook(_take)
        self.hooked, taken = True, []
        token = _taken.set(taken)
        for layer in self.layers:
            x = layer(x).tanh()
        _taken.reset(token)
        return [*taken[:-1], x]


def _take(layer: nn.Module, inputs: Any, out: Tensor) -> None:
    taken = _taken.get()
    if taken is not None:
        taken.append(out)


class _Again(torch.autograd.Function):
    """Runs a layer again in backward, which adds to its weights' gradients by itself, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


class RunsALayerAgain(Base):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Again.apply(self.a(x), self.c))  # type: ignore[no-untyped-call, no-any-return]


class _Positions(nn.Module):
    """As in a library: a table is remembered for the last mask, an object that each run of the step makes anew."""

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def table(mask: Tensor) -> Tensor:
        return mask.double().cumsum(-1).sin()

    def forward(self, mask: Tensor) -> Tensor:
        return self.table(mask)


_Positions.__module__ = "transformers.models"


class RemembersATable(Base):
    def __init__(self) -> None:
        super().__init__()
        self.positions = _Positions()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape).bool()
        return self.b(self.a(x) + self.positions(mask))


class _Tables:
    """No module: what it remembers is by object, of which each trial has a copy."""

    @functools.cache  # noqa: B019
    def causal(self, size: int) -> Tensor:
        return torch.ones(size, size, dtype=torch.float64).tril()


class RemembersByObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.tables = _Tables()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.tables.causal(x.shape[1]) @ self.a(x))


class _Experts(nn.Module):
    """A mixture whose balance loss is an attribute, beside a norm of its routing in a dict, and others in a list."""

    balance: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(C, 3), nn.ModuleList(nn.Linear(C, C) for _ in range(3))
        self.said: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        rows, scores = x.flatten(0, 1), self.router(x.flatten(0, 1))
        shares = scores.softmax(-1)
        best = shares.argmax(-1)
        out = torch.zeros_like(rows)
        for n, expert in enumerate(self.experts):
            (chosen,) = torch.where(best == n)
            if chosen.numel():
                out.index_add_(0, chosen, expert(rows[chosen]) * shares[chosen, n, None])
        if self.training:
            self.balance = (F.one_hot(best, 3).to(x).mean(0) * shares.mean(0)).sum()
        self.said = {"norm": scores.logsumexp(-1).square().mean()}
        self.losses.append(scores.square().mean())
        return out.view_as(x)


class RoutesTokens(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(C, C), _Experts()), nn.Sequential(_Experts(), nn.Linear(C, C))
        self.losses: list[Tensor] = []
        self.a[1].losses = self.b[0].losses = self.losses

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.clear()
        loss = super().training_step(batch, batch_idx) + 0.1 * sum(self.losses)
        experts = [m for m in self.modules() if isinstance(m, _Experts)]
        balance = torch.stack([m.balance for m in experts if m.balance is not None]).mean()
        self.log("balance", balance)
        return loss + 0.1 * balance + 0.01 * sum(m.said["norm"] for m in experts)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("last", self.a[1].balance.detach())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx) + self.b[0].said["norm"])


class _CountingExperts(_Experts):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class RoutesAndCounts(RoutesTokens):
    def __init__(self) -> None:
        super().__init__()
        self.a[1] = _CountingExperts()
        self.a[1].losses = self.losses


class TypeAs(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        wanted = F.one_hot(batch[1], C).type_as(out)
        return F.mse_loss(out.mean(1), wanted) + batch[0].double().mean().to(out)


class Scaled(nn.Module):
    """Divides by the size of the batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) / x.shape[0]


class CountsRows(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) / torch.ones(x.size(0), 1).sum()


class LossOfRows(Scaled):
    """A loss reduces: what it makes of as many rows as there are samples goes by their number."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(x.size(0), C, dtype=x.dtype)
        return x + self.layer(x) * F.mse_loss(rows, torch.ones_like(rows), reduction="sum") / 100


class Numbered(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) * torch.arange(x.shape[0])[:, None, None]


class CountsCalls(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.layer(x) / self.calls


class CarriesState(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.last
        self.last = y.detach().mean() if torch.is_tensor(self.last) else torch.zeros(())
        return x + y


class Recurrent(Scaled):
    """Carries a state of the batch's size from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.state = nn.LSTM(C, C, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.lstm(x, self.state)
        self.state = tuple(each.detach() for each in state)
        return x + y


class WholeTable(Scaled):
    """A table with a row for each sample, which its first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(24.0).view(4, 6, 1).to(x)
        return x + self.layer(x) * self.table


class KeepsSizes(Scaled):
    """Keeps the largest batch that it has seen, and the size of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, len(x))
        if not self.sizes:
            self.sizes.append(len(x))
        return x + self.layer(x)


class FirstSamples(Scaled):
    """Keeps the samples of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.detach()
        return x + self.layer(x) * self.first


class HooksGradient(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        if z.requires_grad:
            z.register_hook(lambda g: g / (g.norm() + 1e-6))
        return x + z


class LaterMixing(Scaled):
    warm = False

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return x + (z - z.mean(0) if self.warm else z)


WARM = {"now": False}


class LaterByGlobal(LaterMixing):
    def __init__(self) -> None:
        super().__init__()
        self.warm = False  # a run before may have left it

    @property
    def warm(self) -> bool:  # type: ignore[override]
        return WARM["now"]

    @warm.setter
    def warm(self, value: bool) -> None:
        WARM["now"] = value


class LaterByNested(LaterMixing):
    """Goes by what lies deep in a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(parts=deque([{"warm": False}]))

    @property
    def warm(self) -> bool:  # type: ignore[override]
        return self.config.parts[0]["warm"]

    @warm.setter
    def warm(self, value: bool) -> None:
        self.config.parts[0]["warm"] = value


class LaterByClosure(LaterMixing):
    def __init__(self) -> None:
        super().__init__()
        warmth = 0.0

        def change(by: float) -> float:
            nonlocal warmth
            warmth += by
            return warmth

        self.change = change

    @property
    def warm(self) -> bool:  # type: ignore[override]
        return self.change(0.0) > 0.5

    @warm.setter
    def warm(self, value: bool) -> None:
        self.change(value - self.change(0.0))


class SetByStep(LaterMixing):
    """As `LaterMixing`, by what the step sets before it calls the module."""


def of_units(kind: type[Scaled]) -> type[Base]:
    """A module whose two stages are of ``kind``."""

    class Units(Base):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = kind(), kind()  # type: ignore[assignment]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if isinstance(self.a, LaterMixing) and kind is not SetByStep:
                self.a.warm = batch_idx >= 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if kind is SetByStep:
                self.a.warm = batch_idx >= 1  # type: ignore[assignment]
            return super().training_step(batch, batch_idx)

    return Units


class SaysSizes(of_units(KeepsSizes)):  # type: ignore[misc]
    """Logs what its units have kept, which they compute nothing of."""

    def on_train_epoch_end(self) -> None:
        for name, unit in (("a", self.a), ("b", self.b)):
            self.log(f"most {name}", float(unit.most))
            self.log(f"first {name}", float(unit.sizes[0]))


class SpectralNorm(Scaled):
    """torch's older one: a hook writes buffers, and computes the weight by several functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.spectral_norm(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class LogsAMetric(Base):
    """Of predictions with a graph; the loss is another."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        self.log("error", self.error(y, batch[0]))
        return F.mse_loss(y, batch[0].flip(1))


class FillsACache(Base):
    """Its layers leave words in an object that goes through all of them, as models that can generate do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = LeavesWord(), LeavesWord()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        cache = SimpleNamespace(begun=False, words=[])
        return F.mse_loss(self.b(self.a(batch[0], cache), cache), batch[0].flip(1))


class LeavesWord(Scaled):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache.begun = True
        return x + self.layer(x)


class Corrected(Scaled):
    """As a router of a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("correction", torch.linspace(-1, 1, C))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = Corrected(), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x) * (self.gate(x) + self.gate.correction).sigmoid()
        return out


class BufferOfALayer(Base):
    """Its own code adds a layer's buffer to what that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Corrected()  # type: ignore[assignment]
        self.b = Routed()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.a(batch[0]) + self.a.correction
        return F.mse_loss(self.b(x.tanh()), batch[0].flip(1))


class SetsLength(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        out: Tensor = self.layer(x)
        return out


class LengthOfALayer(Base):
    """Goes by what a layer has set in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.a = SetsLength()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss / self.a.length


class HookOnInput(Base):
    """A hook hands out what a layer was given, another one what a layer returned."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d, self.seen = nn.Linear(C, C), nn.Linear(C, C), dict[str, Tensor]()
        self.c.register_forward_hook(lambda _, given, out: self.seen.update(given=given[0]))
        self.b.register_forward_hook(lambda _, given, out: self.seen.update(out=out))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.clear()
        y = self.d(self.c(self(batch[0]).tanh()))
        return F.mse_loss(y, batch[0].flip(1)) + self.seen["given"].square().mean() + self.seen["out"].abs().mean()


class SetsScale(Scaled):
    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        y: Tensor = self.layer(x) * state.scale
        state.scale += 1.0
        state.outputs.append(y)
        return y


class WordsBetweenLayers(Base):
    """One layer leaves a number in an object that goes through both, and the other computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = SetsScale(), SetsScale()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = SimpleNamespace(scale=1.0, outputs=[])
        y = self.b(self.a(batch[0], state).tanh(), state)
        return F.mse_loss(y, batch[0].flip(1)) + sum(x.square().mean() for x in state.outputs)


class Remembers(Scaled):
    last: Tensor | None = None

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        y: Tensor = self.layer(x)
        if self.last is not None:
            y = y + self.last
        self.last = y
        return y


class LastUntilReset(Base):
    """A layer keeps a tensor between its calls in one step, and the step resets that before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Remembers(), Remembers()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.a.last = self.b.last = None
        parts = [self.b(self.a(part).tanh()) for part in batch[0].split(batch[0].shape[1] // 2, 1)]
        self.a.last = self.b.last = None
        return F.mse_loss(torch.cat(parts, 1), batch[0].flip(1))


_SCALE = ContextVar("_SCALE", default=1.0)


class SetsContext(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * _SCALE.get()
        _SCALE.set(_SCALE.get() + 1.0)
        return y


class InContext(Base):
    """One layer sets a `ContextVar`, and the other computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = SetsContext(), SetsContext()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _SCALE.set(1.0 + batch_idx)
        return super().training_step(batch, batch_idx)


class HooksOnce(Base):
    """The step puts a hook on a layer when it first runs, and uses what that keeps; another comes anew each time."""

    ready, handle = False, None

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Linear(C, C), nn.Linear(C, C)
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs.clear()
        if not self.ready:
            self.b.register_forward_hook(lambda layer, inputs, output: self.outputs.append(output))
            self.ready = True
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.c.register_forward_hook(lambda layer, inputs, output: output * (1.0 + batch_idx))
        y = self.d(self.c(self(batch[0]).tanh()))
        return F.mse_loss(y, batch[0].flip(1)) + self.outputs[0].square().mean()


class HookOnAll(Base):
    """The step puts a hook on all modules there are, once, which scales the outputs of some."""

    handle: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.handle is None:
            self.handle = register_module_forward_hook(
                lambda layer, inputs, output: output * 2.0 if layer is self.a else None
            )
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.handle.remove()


class SetAtTheStart(Base):
    """The step goes by what hooks at the start of training, an epoch and a batch set."""

    def on_fit_start(self) -> None:
        self.scale, self.seen = 2.0, torchmetrics.MeanMetric()

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx + 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * self.scale / self.number
        self.losses.append(loss.detach())
        self.log("mean", torch.stack(self.losses).mean())
        self.seen.update(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("seen", self.seen.compute())


class CallsAgainLater(Base):
    """From the third step on the model is called again: its layers in their order, then in the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, loss = batch[0], super().training_step(batch, batch_idx)
        if batch_idx >= 2:
            y = self(x * 0.9)
            loss = loss + F.mse_loss(self.a(self.b(y).tanh()), y + x.flip(1))
        return loss


class AveragesByHand(Base):
    """Averages of weights in tensors of the module's own, made before the fit and in it."""

    def __init__(self) -> None:
        super().__init__()
        self.early = {name: p.detach().clone().double() for name, p in self.named_parameters()}

    def on_fit_start(self) -> None:
        self.late = [p.detach().clone() for p in self.parameters()]
        self.kept, self.speed = [copy.deepcopy(self.b)], [torch.zeros_like(p) for p in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for name, p in self.named_parameters():
            self.early[name].lerp_(p, 0.5)
        torch._foreach_lerp_(list(self.early.values()), [p.detach() for p in self.parameters()], 0.25)
        for late, speed, p in zip(self.late, self.speed, self.parameters(), strict=True):
            speed.mul_(0.5).add_(p - late)
            late.mul_(0.5).add_(p, alpha=0.5)
            p.sub_(speed, alpha=0.1)
        for kept, p in zip(self.kept[0].parameters(), self.b.parameters(), strict=True):
            torch.add(kept * 0.5, p, alpha=0.5, out=kept)

    def on_train_epoch_end(self) -> None:
        self.log("early", torch.stack([x.norm() for x in self.early.values()]).sum())
        self.log("late", torch.stack([x.abs().sum() for x in (*self.late, *self.speed)]).sum())
        self.log("called", self.kept[0](torch.ones(C, dtype=torch.float64)).sum().detach())


class GradientsByHand(Base):
    """Gradients are averaged and added in place, to tensors of other layers, too; weights are kept with their graph."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 0:
            self.kept = [torch.zeros_like(p) for p in self.parameters()]
        total = torch.zeros(C, C)
        for kept, p in zip(self.kept, self.parameters(), strict=True):
            kept.mul_(0.9).add_(p.grad, alpha=0.1)
            p.grad.add_(kept)
        for layer in (self.a, self.b):
            total.add_(layer.weight.grad).sub_(layer.weight.detach())
        self.a.weight.data.add_(self.b.weight.grad, alpha=0.1)
        self.before = [p.clone() for p in self.parameters()]
        self.log_dict({"total": total.norm(), "kept": torch.stack([x.norm() for x in self.kept]).sum()})

    def on_train_batch_end(self, *args: Any) -> None:
        moved = [(p - before).norm() for p, before in zip(self.parameters(), self.before, strict=True)]
        self.log("moved", torch.stack(moved).sum().detach())
        self.log("bias", self.b.bias[0])


class WritesByHand(Base):
    """Items, slices, draws and sums over gradients and weights, of both layers and from one to the other."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weights = [*self.a.parameters(), *self.b.parameters()]
        self.log("saliency", torch.stack([(p.grad * p.data).abs().sum() for p in weights]).sum())
        for p in weights:
            p.grad.add_(p, alpha=0.01)
        self.a.weight.grad.add_(self.b.weight.data, alpha=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        a, b = self.a.weight.data, self.b.weight.data
        for x in (a, b):
            x[0], x[1:3, 2] = 0.0, 0.25
            x[:, 1] *= 0.5
        a[3], b[4, 0] = b[5], a[6, 1]
        nn.init.orthogonal_(self.a.weight)
        both = torch.broadcast_tensors(self.a.bias, b)
        noise = torch.randn(b.shape, out=torch.empty_like(b))
        b.add_(noise, alpha=0.01).add_(both[0], alpha=0.1)
        if self.global_step == 2:
            self.added = copy.deepcopy(self.b)  # a parameter more, on one stage


class MemoryByHand(Base):
    """Weights, gradients and tensors of no layer share memory, which is read and written on either side."""

    def on_train_start(self) -> None:
        self.flat = nn.utils.parameters_to_vector(self.parameters()).detach() * 0.9
        nn.utils.vector_to_parameters(self.flat, self.parameters())
        self.other = [nn.Parameter(torch.zeros_like(p)) for p in (self.a.weight, self.b.weight)]
        for p, layer in zip(self.other, (self.a, self.b), strict=True):
            p.data = layer.weight.data
        self.copy = self.a.weight.data.clone()
        self.b.weight.data = self.copy

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        given = [p.grad * 2 for p in self.parameters()]
        for p, g in zip(self.parameters(), given, strict=True):
            p.grad = g
        views = [row for layer in (self.a, self.b) for row in layer.weight.grad.t()]
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        F.dropout(self.b.weight.grad, 0.5, inplace=True)
        views[0].mul_(0.5)
        given[-1].add_(0.01)
        for name, x in {"given": given, "views": views}.items():
            self.log(name, torch.stack([y.norm() for y in x]).sum())

    def on_train_batch_end(self, *args: Any) -> None:
        self.flat.mul_(0.99)
        self.a.bias.data.add_(0.01)
        for name, x in {"flat": [self.flat], "other": self.other, "copy": [self.copy]}.items():
            self.log(name, torch.stack([y.norm() for y in x]).sum().detach())


class OneMemory(Base):
    """Two weights that tensor parallelism splits along different dims are one memory, and both are trained."""

    def on_train_start(self) -> None:
        self.b.weight.data = self.a.weight.data


class OneGradient(Base):
    """The same of their gradients."""

    def on_train_start(self) -> None:
        self.a.weight.grad = torch.zeros_like(self.a.weight)
        self.b.weight.grad = self.a.weight.grad

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.a.weight.grad.zero_()


class ArrayAsData(Base):
    """A weight lies in an array of numpy, which alone is kept, and written."""

    def on_train_start(self) -> None:
        self.array = np.linspace(-1, 1, C * C).reshape(C, C)
        self.b.weight.data = torch.from_numpy(self.array)

    def on_train_batch_end(self, *args: Any) -> None:
        self.array[2:4] *= 0.5
        self.log("array", float(np.abs(self.array).sum()))


class GradientsOfItsOwn(Base):
    """Gradients lie in tensors of its own for good, which alone are read, scaled and set to zero."""

    def on_train_start(self) -> None:
        self.own = [torch.zeros_like(p) for p in self.parameters()]
        for p, g in zip(self.parameters(), self.own, strict=True):
            p.grad = g

    def optimizer_zero_grad(self, *args: Any) -> None:
        for g in self.own:
            g.zero_()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([g.norm() for g in self.own]).norm()
        for g in self.own:
            g.mul_((0.1 / norm).clamp(max=1.0))
        self.log("norm", norm)


class StateByHand(Base):
    """Averages, targets and a rewind by ``state_dict``, of the module and of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(6))
        self.target = copy.deepcopy(self.b).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), self.target(batch[0]) + batch[0].flip(1))

    def on_fit_start(self) -> None:
        self.early = {key: x.clone() for key, x in self.state_dict().items()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for key, x in self.state_dict().items():
            self.early[key].copy_(self.early[key] * 0.5 + x * 0.5)
        self.target.load_state_dict(self.b.state_dict())
        self.log("layer", torch.stack([x.double().norm() for x in self.a.state_dict().values()]).sum())
        if batch_idx == 0:
            self.kept = copy.deepcopy(self.state_dict())
        if batch_idx == 1:
            self.load_state_dict({key: x * 0.75 if x.is_floating_point() else x for key, x in self.kept.items()})

    def on_train_epoch_end(self) -> None:
        self.log("early", torch.stack([x.double().norm() for x in self.early.values()]).sum())


class OptimizerState(Base):
    """Reads, scales, replaces, removes and rewinds what an optimizer keeps of its parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in optimizer.state.values()]
        self.log("updates", torch.stack([(m / (v.sqrt() + 1e-8)).norm() for m, v in moments]).sum())
        self.log("steps", float(sum(optimizer.state[p]["step"] for p in self.parameters())))
        if batch_idx == 0:
            self.kept = copy.deepcopy(optimizer.state_dict())
            for p in (self.a.weight, self.b.weight):
                optimizer.state[p]["exp_avg"][:2] = 0
                optimizer.state[p]["exp_avg_sq"] = torch.full_like(p, 0.01)
            del optimizer.state[self.b.bias]
            self.log("held", float(len(optimizer.state) + (self.b.bias in optimizer.state)))
        else:
            optimizer.load_state_dict(self.kept)
            optimizer.state.pop(self.a.bias)
            self.log("kept", torch.stack([x["exp_avg"].abs().sum() for x in self.kept["state"].values()]).sum())


class LoopsOverSamples(Base):
    """What is computed of the batch beside a loop over samples comes whole; a layer given that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Embedding(5, C), CountsItsCalls()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = (batch[0][..., 0].abs() * 2).long().clamp(max=4)
        h = torch.stack([row * (1 + row.mean()) for row in self.c(self.a(ids))])
        return F.mse_loss(self.b(h), batch[0])

    def on_train_epoch_end(self) -> None:
        self.log("calls", float(self.c.calls))


class LayerIterators(Base):
    """Iterators that layers hold, called twice in a step: their items, and what a generator changes to make them."""

    def __init__(self) -> None:
        super().__init__()
        self.c, scales = ScaledByTurns(), itertools.count(1.0, 0.1)
        self.a.register_forward_hook(lambda module, args, out: out * next(scales))
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.c(self.a(self.c(self.a(x)))).tanh())

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("next", float(next(self.c.turns[0]) + next(self.scales) + self.c.made))


class ScaledByTurns(nn.Linear):
    def __init__(self) -> None:
        super().__init__(C, C)
        self.turns, self.made, self.drawn = (itertools.cycle([0.5, 1.0, 1.5, 0.7]), None), 0, self.draw()

    def draw(self) -> Any:
        while True:
            self.made += 1
            yield 1 + 0.1 * self.made

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.turns[0]) * next(self.drawn)


class CyclesLists(Base):
    """What an iterator gives is there elsewhere, too, and the step changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[list[float]] = [[], []]
        self.turns, self.alone = itertools.cycle(self.lists), itertools.cycle([{"n": 1.0}, {"n": 2.0}])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seen, own = next(self.turns), next(self.alone)
        seen.append(float(batch[0].sum()))
        own["n"] += 0.5
        return super().training_step(batch, batch_idx) * (1 + 0.1 * len(seen)) * own["n"]

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("seen", float(10 * len(self.lists[0]) + len(self.lists[1])))


class WritesABufferTwice(Base):
    """Between its layers: running statistics of the first one's output, in more than one write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        self.running.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        self.running.mul_(0.9).add_(h.detach().amax((0, 1)), alpha=0.1)
        return self.b(h - self.running)


class WritesWhatIsGiven(Base):
    """A tensor that an iterator gives again and again is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([torch.ones(C)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = next(self.scales)
        scale.mul_(0.9)
        return super().training_step(batch, batch_idx) * scale.sum()


class RenewsGenerator(Base):
    """A generator that counts on the module, and is made anew once it has ended, within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.turns = 0, self.draw()

    def draw(self) -> Any:
        for scale in (0.5, 1.5):
            self.made += 1
            yield scale + 0.01 * self.made

    def scale(self) -> float:
        found = next(self.turns, None)
        if found is None:
            self.turns = self.draw()
            found = next(self.turns)
        return float(found)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (self.scale() + self.scale() + self.scale())


class CyclesLayers(Base):
    """A step that runs several times is given copies of what an iterator gives: layers would not be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = enumerate(itertools.cycle([self.a, self.b]))

    def forward(self, x: Tensor) -> Tensor:
        return next(self.turns)[1](self.b(self.a(x)).tanh())


class EvaluatesInStep(Base):
    """A pass in evaluation mode behind the one that trains; a layer goes by its mode, and one is left in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = GoesByMode()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.b.train()
        loss = super().training_step(batch, batch_idx)
        self.eval()
        with torch.no_grad():
            self.log("evaluated", self(batch[0]).mean())
        self.train()
        self.b.eval()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("modes", float(sum(m.training for m in self.modules())))


class GoesByMode(nn.Linear):
    def __init__(self) -> None:
        super().__init__(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


class TiedCountingHooks(Base):
    """Hooks on gradients that go by what they count, also on weights that two stages have."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.seen = nn.Linear(C, C), [1.0]
        for p in self.parameters():
            p.register_hook(self.counted)

    def counted(self, gradient: Tensor) -> Tensor:
        self.seen.append(self.seen[-1] + 0.1)
        return gradient * self.seen[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.c(self.c(self.a(x).tanh()).tanh()))

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("seen", self.seen[-1])


class HooksThatLeave(Base):
    """Hooks that remove themselves, on the rank of their layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.b.register_forward_hook(self.on_call)
        self.inputs = self.a.register_forward_pre_hook(self.on_input)
        self.gradients = self.a.weight.register_hook(self.on_gradient)

        def on_output(layer: Any, inputs: Any, out: Tensor) -> Tensor:
            handle.remove()
            return out * 0.5

        handle = self.a.register_forward_hook(on_output)

    def on_call(self, layer: Any, inputs: Any, out: Tensor) -> Tensor:
        self.calls.remove()
        return out * 0.5

    def on_input(self, layer: Any, inputs: Any) -> Any:
        self.inputs.remove()
        return inputs[0] * 0.5

    def on_gradient(self, gradient: Tensor) -> Tensor:
        self.gradients.remove()
        return gradient * 0.5

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("hooks", float(len(self.b._forward_hooks) + len(self.a.weight._backward_hooks or ())))


class Branches(Base):
    """Branches of one device that share what they change; the later one could run before the other."""

    def __init__(self) -> None:
        super().__init__()
        calls, scale = [1.0], torch.ones(())
        self.p, self.q = (_SharesState(calls, scale) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        late = self.p(self.a(x).tanh())
        late.register_hook(self.p.on_gradient)
        between = self.a(x * 3)
        early = self.q(x * 2)
        early.register_hook(self.p.on_gradient)
        return self.b(late + between + early + self.a(x * 4))

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("calls", self.p.calls[0])


class _SharesState(nn.Module):
    def __init__(self, calls: list[float], scale: Tensor) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(C, C), calls
        self.register_buffer("scale", scale)

    def on_gradient(self, gradient: Tensor) -> Tensor:
        self.calls[0] += 0.1
        return gradient * self.calls[0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] *= 1.1
        self.scale.mul_(0.9).add_(x.detach().mean())
        return self.inner(x) * self.calls[0] * float(self.scale)


class TeacherAndDecision(Base):
    """A teacher that the step moves behind its use, before it decides by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(C, C).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - self.teacher(h.detach()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.b.weight.detach(), alpha=0.1)
        return loss * 0.5 if loss > 100 else loss


class HookThatLeavesLate(Base):
    """A hook that removes itself in a later step than the first, of which microbatches were tried."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.b.register_forward_hook(self.on_call)

    def on_call(self, layer: Any, inputs: Any, out: Tensor) -> Tensor:
        if self.trainer.global_step == 1:
            self.calls.remove()
        return out * 0.5


class HooksAssignBuffers(Base):
    """Hooks on calls and gradients that assign buffers, and exchange them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1))
        self.register_buffer("met", torch.ones(1) * 0.5)
        self.a.register_forward_hook(self.on_call)

    def on_call(self, layer: Any, inputs: Any, out: Tensor) -> Tensor:
        self.seen = self.seen * 0.9 + float(out.detach().mean())
        if out.requires_grad:
            out.register_hook(self.on_gradient)
        return out * self.seen

    def on_gradient(self, gradient: Tensor) -> Tensor:
        self.met = self.met * 0.9 + float(gradient.norm())
        self.seen, self.met = self.met, self.seen
        return gradient * self.seen


class RegistersInLayer(Base):
    """A layer that registers a hook when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.b = _Registers()


class _Registers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hook = nn.Linear(C, C), None

    def forward(self, x: Tensor) -> Tensor:
        if self.hook is None:
            self.hook = self.inner.register_forward_hook(lambda layer, inputs, out: out * 0.5)
        return self.inner(x)


class RegistersOnItself(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = _OnItself(C, C)


class _OnItself(nn.Linear):
    hook: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hook is None:
            self.hook = self.register_forward_hook(lambda layer, inputs, out: out * 0.5)
        return super().forward(x)


class CountsItsCalls(nn.Linear):
    def __init__(self) -> None:
        super().__init__(C, C)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class AveragedModule(Base):
    """torch's own averages: in a submodule that no step calls, and of a layer with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(6))
        self.averaged = AveragedModel(self.b, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        self.seen = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.averaged.update_parameters(self.b)
        self.seen += int(self.b[1].num_batches_tracked)
        self.log("tracked", self.averaged.n_averaged)

    def on_train_epoch_end(self) -> None:
        self.log("seen", float(self.seen))
        self.log("buffers", torch.stack([x.double().abs().sum() for x in self.buffers()]).sum())
        self.b[1].reset_running_stats()


class InnerBuffers(Base):
    """A layer uses buffers of the modules within it, which lie on another stage where it is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.b = _InnerBuffers()


class _InnerBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[nn.Linear(C, C) for _ in range(8)])
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(C, C))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)) * self.second.parametrizations["weight"][0]._u.square().sum()


class RunningAccuracy(Base):
    """What was predicted in all steps is compared with the targets of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.guesses: list[Tensor] = []
        self.targets: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0]).mean(1)
        self.guesses.append(logits.argmax(-1))
        self.targets.append(torch.arange(len(batch[1])) + batch_idx)
        hits = torch.cat(self.guesses) == torch.cat(self.targets)
        self.log("accuracy", hits.double().mean())
        return F.cross_entropy(logits, batch[1])


class WhoRanFirst(Base):
    """One layer leaves a word on a class, and the other goes by that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = LeavesName("a"), LeavesName("b")  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        LeavesName.seen.clear()
        return super().training_step(batch, batch_idx)


class LeavesName(Scaled):
    seen: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        LeavesName.seen.append(self.name)
        out: Tensor = self.layer(x)
        return out if LeavesName.seen[0] == self.name else out * 3


class CountsInArgument(Base):
    """Layers count their calls in an object that they are given, and that the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = CountsGiven(), CountsGiven()  # type: ignore[assignment]
        self.calls = SimpleNamespace(number=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = {"calls": self.calls}
        return F.mse_loss(self.b(self.a(batch[0], given).tanh(), given), batch[0].flip(1))

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("calls", float(self.calls.number))


class CountsGiven(Scaled):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        given["calls"].number += 1
        out: Tensor = self.layer(x)
        return out


class CountsTokens(Scaled):
    """As a cache does, of which the first layer counts what all of them have seen."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.register_buffer("places", torch.linspace(0.0, 2.0, 40))

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        if self.first:
            state.seen += x.shape[1]
        y: Tensor = self.layer(x) + self.places[state.seen : state.seen + x.shape[1], None]
        return y


class TokensSeen(Base):
    """The layer behind the one that counts has the count, being on its stage; those of the other stage do not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = CountsTokens(True)  # type: ignore[assignment]
        self.layers = nn.ModuleList(CountsTokens(False) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state, x = SimpleNamespace(seen=0), batch[0]
        for layer in (self.a, *self.layers):
            x = layer(x, state).tanh()
        return F.mse_loss(self.b(x), batch[0].flip(1))


class Checkpoints(Base):
    """Its own code is run again in backward, beginning with the batch, and counts how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def first(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.a(x).tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = checkpoint(self.first, batch[0], use_reentrant=False)
        return F.mse_loss(self.b(y), batch[0].flip(1))


class TrainerAsArgument(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = GoesByTrainer()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.b(self.a(batch[0], self.trainer)), batch[0].flip(1))


class GoesByTrainer(Scaled):
    def forward(self, x: Tensor, trainer: Any = None) -> Tensor:
        return x + self.layer(x) * (1 + trainer.current_epoch)


FLAG = torch.zeros(())


class Mood(Enum):
    CALM, MIXING = range(2)


class MixesWhenTold(Scaled):
    """Is told in one way or another, beside tensors, whether samples mix."""

    def forward(self, x: Tensor, told: Any = None) -> Tensor:
        mixes = told > 0.5 if isinstance(told, float) else told is Mood.MIXING
        if isinstance(told, SimpleNamespace):
            mixes = told.inner["words"][0] == "mix"
        z = self.layer(x)
        return x + (z - z.mean(0) if mixes else z)


class ToldByAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = MixesWhenTold()  # type: ignore[assignment]

    def told(self, mixes: bool) -> Any:
        return SimpleNamespace(inner={"words": ["mix" if mixes else "don't"]})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.b(self.a(batch[0], self.told(batch_idx == 1))), batch[0].flip(1))


class ToldByAnEnum(ToldByAnObject):
    def told(self, mixes: bool) -> Any:
        return Mood.MIXING if mixes else Mood.CALM


class ToldByANumber(ToldByAnObject):
    def told(self, mixes: bool) -> Any:
        return float(mixes)


class MixesByTensor(Scaled):
    """Is told by a tensor: an argument, one that is stored on it, or a global one; or by the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = torch.zeros(())

    def forward(self, x: Tensor, told: Tensor | None = None) -> Tensor:
        mixes = (told is not None and told > 0.5) or self.flag > 0.5 or FLAG > 0.5 or "MIXES" in os.environ
        z = self.layer(x)
        return x + (z - z.mean(0) if mixes else z)


class ToldByATensor(ToldByAnObject):
    def __init__(self) -> None:
        super().__init__()
        self.a = MixesByTensor()  # type: ignore[assignment]

    def told(self, mixes: bool) -> Any:
        return torch.tensor(float(mixes))


class ToldByATensorOnIt(ToldByATensor):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.a.flag = torch.tensor(float(batch_idx == 1))  # type: ignore[assignment]

    def told(self, mixes: bool) -> Any:
        return None


class ToldByAGlobalTensor(ToldByATensor):
    def told(self, mixes: bool) -> Any:
        FLAG.fill_(float(mixes))


class ToldByTheEnvironment(ToldByATensor):
    def told(self, mixes: bool) -> Any:
        if mixes:
            os.environ["MIXES"] = "1"
        else:
            os.environ.pop("MIXES", None)


class LaterAlongSamples(Base):
    """The same functions along other dims."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0]).reshape(*((2, 12) if batch_idx == 1 else (4, 6)), C).softmax(1).reshape(4, 6, C)
        rows = torch.movedim(y, 1 - batch_idx // 2, -1).softmax(-1)
        return F.mse_loss(y, batch[0]) + rows.square().mean()


class BackwardHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda m, gi, go: (gi[0] / (gi[0].norm() + 1e-6),))


class MaskedWeights(Base):
    """Weights that are computed in the step stand for a layer's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = {name: p * 0.5 for name, p in self.b.named_parameters()}
        h = self.a(batch[0]).tanh()
        return F.mse_loss(torch.func.functional_call(self.b, weights, (h,)), batch[0].flip(1))


class WeightsOfAnother(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0]).tanh()
        weights = {"weight": self.a.weight * 0.3, "bias": h.mean((0, 1))}
        return F.mse_loss(torch.func.functional_call(self.b, weights, (h,)), batch[0].flip(1))


class CriterionOverBatch(Base):
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(C, C)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x.mean(1)), y, reduction="none") / x.shape[0]

    def __init__(self) -> None:
        super().__init__()
        self.criterion = self.Criterion()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.criterion(self(batch[0]), batch[1]).sum()


class Renorm(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = torch.renorm(self.a(batch[0]) * 50, 2, 2, 60.0)
        return F.mse_loss(self.b(h), batch[0].flip(1))


class Rounded(Base):
    """Functions of a sum over samples that are not linear."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        total = h.detach().sum()
        self.log("floor", torch.div(total * 10, 3, rounding_mode="floor"))
        self.log("int", (total * 10).to(torch.int64).double())
        return F.mse_loss(h, batch[0]) + 0.01 * h.sum((0, 1)).diff(prepend=torch.ones(1))[0]


class OwnGenerators(Base):
    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mix = float(self.numpy.beta(2.0, 2.0)) + self.python.random()
        h = self.a(batch[0]).tanh() * (0.5 + mix)
        return F.mse_loss(self.b(h), batch[0].flip(1)) * (1 + mix)


class ClassBody(Base):
    seen: ClassVar[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("seen", float(len(self.seen)))
        self.log("sum", torch.stack(self.seen).sum())
        self.seen.clear()


class PopsFromBatch(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = {"x": batch[0]}
        batch.append(parts)
        x = batch.pop()["x"]
        return F.mse_loss(self(x), batch.pop(0).flip(1))


class Asserts(Base):
    def training_step(self, *args: Any) -> Any:
        x, y = args[0]
        assert torch.isfinite(x).all() and (y >= 0).all(), "the batch is not finite"
        loss = F.mse_loss(self(x), x.flip(1))
        assert torch.isfinite(loss), "the loss is not finite"
        return loss


class _Cache:
    def __init__(self, keys: list[Tensor]) -> None:
        self.keys = keys


class _Takes(nn.Module):
    """Takes a value out of an object, and leaves one there."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(C, C)

    def forward(self, x: Tensor, cache: _Cache) -> Tensor:
        key = cache.keys[self.place] = self.linear(x) + cache.keys[self.place]
        return x * key.sigmoid()


class ObjectAsArgument(Base):
    """As prefix tuning does with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.prefix = _Takes(0), _Takes(1), nn.Linear(C, 2 * C)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        cache = _Cache(list(self.prefix(x).split(C, dim=-1)))
        return self.b(self.a(x, cache), cache)


class _Stores(nn.Module):
    def __init__(self, store: dict[str, Tensor], takes: bool) -> None:
        super().__init__()
        self.linear, self.store, self.takes = nn.Linear(C, C), store, takes

    def forward(self, x: Tensor) -> Tensor:
        if self.takes:
            return self.linear(x) + self.store.pop("h")
        self.store["h"] = self.linear(x)
        return self.store["h"].tanh()


class HandsOn(Base):
    """A module hands a value on to a later one in a dict that both hold."""

    def __init__(self) -> None:
        super().__init__()
        store: dict[str, Tensor] = {}
        self.a, self.b = _Stores(store, False), _Stores(store, True)  # type: ignore[assignment]


class _Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"given": x, "made": self.linear(x)}


class WritesIntoOutput(Base):
    """Writes into the dict that a module returned, which holds what it was given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = _Several()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        out["made"] = out["made"].tanh() + out["given"]
        return self.b(out["made"])


class _Against(nn.Module):
    def __init__(self, table: list[nn.Embedding]) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(C, C), table

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = self.table[0].weight if weight is None else weight
        return self.linear(x) @ weight.t() @ weight / C


class ParameterAsArgument(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, C)
        self.a, self.b = _Against([]), _Against([])  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x, self.table.weight), self.table.weight)


class ParameterOfAnother(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, C)
        self.a, self.b = _Against([self.table]), _Against([self.table])  # type: ignore[assignment]


class _NormAct(nn.BatchNorm1d):
    """Normalizes by its own code and calls a module then, as timm's do."""

    def __init__(self) -> None:
        super().__init__(6)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)
        )


class NormAndAct(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = _NormAct()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


class SharesOut(Base):
    """Shares out data and work by the numbers of its Trainer, as under DDP."""

    def setup(self, stage: str) -> None:
        self.share = 4 // self.trainer.world_size

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.trainer.world_size > 1:
            x = x[self.global_rank :: self.trainer.world_size]
        return F.mse_loss(self(x), x.flip(1)) * self.share

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1 / self.trainer.world_size)


class SetsData(Base):
    """Quantizes its weights as it goes, by another tensor or in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.a.weight.data = (self.a.weight.data * 64).round() / 64
        self.a.weight.data.clamp_(-0.3, 0.3)
        return super().training_step(batch, batch_idx)


class Kept:
    last: Tensor | None = None


class LeavesValues(Base):
    """A value of the first stage, in a plain object; one step later the loss takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0])
        loss = F.mse_loss(self.b(h.tanh()), batch[0].flip(1))
        if self.kept.last is not None:
            loss = loss + (h - self.kept.last).square().mean()
        self.kept.last = h.detach()
        return loss


LEFT: dict[str, Tensor] = {}


class LeavesGlobally(Base):
    """As `LeavesValues`, in a global dict."""

    def on_train_start(self) -> None:
        LEFT.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0])
        loss = F.mse_loss(self.b(h.tanh()), batch[0].flip(1))
        if "h" in LEFT:
            loss = loss + (h - LEFT["h"]).square().mean()
        LEFT["h"] = h.detach()
        return loss


class Drawing(nn.Module):
    """Draws from the global generators of Python and numpy, and drops a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.eye(C)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight) * np.random.uniform(0.5, 1.5)
        return x + self.layer(x) if not self.training or random.random() < 0.6 else x


class DrawsGlobally(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(C, C), Drawing()), nn.Sequential(Drawing(), nn.Linear(C, C))


class UsedLate(Base):
    """A layer of the first stage, that is called from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        last = self.a, self.b
        del self.a, self.b
        self.early, self.late = nn.Linear(C, C), nn.Linear(C, C)
        self.a, self.b = last
        self.c = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(x)
        if self.global_step:
            x = x + self.late(x)
        return self.c(super().forward(x).tanh())


class Transformed(Base):
    """Functions and a layer through ``torch.vmap`` and ``torch.func``, between its modules."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.vmap(lambda row: row * torch.tanh(row).mean())(self.a(x))
        h = h + torch.vmap(torch.func.grad(lambda row: (row**3).sum()))(h)
        return torch.vmap(self.b)(h)


class Adafactor(torch.optim.Optimizer):
    """Factors the second moments of matrices from a size on."""

    def __init__(self, params: Any, factored_from: int = 128) -> None:
        super().__init__(params, {"lr": 0.01, "factored_from": factored_from})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state, squared = self.state[p], p.grad.square() + 1e-30
                if p.ndim == 2 and min(p.shape) >= group["factored_from"]:
                    for name, mean in (("row", squared.mean(1)), ("column", squared.mean(0))):
                        state.setdefault(name, torch.zeros_like(mean)).mul_(0.9).add_(mean, alpha=0.1)
                    v = state["row"][:, None] * state["column"] / state["row"].mean()
                else:
                    v = state.setdefault("v", torch.zeros_like(squared)).mul_(0.9).add_(squared, alpha=0.1)
                p.sub_(group["lr"] * p.grad / (v.sqrt() + 1e-8))
        return loss


class FactorsFromASize(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.b = nn.Linear(C, 128), nn.Linear(128, 136), nn.Linear(136, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.c(self.a(x).relu()).relu())

    def configure_optimizers(self) -> Any:
        return Adafactor(self.parameters())


class Clipped(torch.optim.Optimizer):
    """Clips all gradients by their norm, from a threshold on."""

    def __init__(self, params: Any, max_norm: float = 20.0) -> None:
        super().__init__(params, {"lr": 1e-3, "max_norm": max_norm})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        given = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p, _ in given]).norm()
        for p, group in given:
            p.sub_(group["lr"] * (group["max_norm"] / (norm + 1e-6)).clamp(max=1) * p.grad)
        return loss


class ClipsFromANorm(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 1000 * F.mse_loss(self(batch[0]), batch[0].flip(1))

    def configure_optimizers(self) -> Any:
        return Clipped(self.parameters())


class StoredAsWritten(Base):
    """Keeps for the epoch's end what it wrote into tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0]).tanh()
        z = self.b(h)
        counts, early = torch.zeros(4, C, dtype=z.dtype), torch.zeros((), dtype=z.dtype)
        counts[0] = z[0, 0].detach()
        early.copy_(h.detach().sum())
        self.outputs.append({"counts": counts, "early": early})
        return z.square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("counts", torch.stack([x["counts"].sum() + x["early"] for x in self.outputs]).sum())
        self.outputs.clear()


class FlipsFlags(Base):
    """Writes a buffer by an operator that no ``_`` tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.zeros(C, dtype=torch.bool))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0])
        self.flags ^= (y.detach() > 0).all(0).all(0) | True
        return (y * self.flags).square().mean() + F.mse_loss(y, batch[0].flip(1))


class TurnsSums(Base):
    """Sums over samples, laid out anew, scaled in place and weighed: each part is still a share of the whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self(batch[0]).square()
        sums = y.sum(0).movedim(0, 1).swapdims(0, 1).tensor_split(2)[0].tril().flip(0).roll(1, 0)
        weighed = torch.dot(y.sum((0, 1)), torch.linspace(0, 1, C, dtype=y.dtype)) + sums.diagonal().sum()
        return y.mean().subtract_(0.5) + weighed.divide_(C).multiply_(0.1)


class GrowingMemory(Base):
    """Compares with all batches so far; its own checks look at the shapes of what grows at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(64, C))
        self.register_buffer("labels", torch.zeros(64, dtype=torch.long))
        self.filled = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        z = self(x).mean(1)
        self.seen[self.filled : self.filled + len(z)] = z.detach()
        self.labels[self.filled : self.filled + len(y)] = y
        self.filled += len(z)
        seen, labels = self.seen[: self.filled], self.labels[: self.filled]
        if len(seen) != len(labels):
            raise ValueError(f"{len(seen)} vectors, {len(labels)} labels")
        return torch.where(y[:, None] == labels, -1.0, 1.0).mul(z @ seen.T).mean()


class Handing(nn.Module):
    """Holds a weight and a buffer, and hands them back as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(C, C))
        self.register_buffer("places", torch.rand(C))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.table, self.places


class HandsBackWeight(Base):
    """A layer that hands back its own weight and buffer as they are, for code and layers of other stages to use."""

    def __init__(self) -> None:
        super().__init__()
        self.c = Handing()

    def forward(self, x: Tensor) -> Tensor:
        table, places = self.c()
        mixed = (table @ table.transpose(0, 1)).softmax(-1)
        return super().forward(x @ mixed + places) @ table


FOUND: dict[str, type[Base]] = {
    kind.__name__: kind
    for kind in (MetricAsLoss, MaskedByBatch, Teacher, SetGradEnabled, Item, FloatOfValue, NumpyMatching, TypeAs,
                 BackwardHook, CriterionOverBatch, Renorm, Rounded, OwnGenerators, ClassBody, PopsFromBatch, Asserts,
                 FactorsFromASize, ClipsFromANorm, SharesOut, NormAndAct, ObjectAsArgument, HandsOn, WritesIntoOutput,
                 ParameterAsArgument, ParameterOfAnother, SetsData, LeavesValues, LeavesGlobally, DrawsGlobally,
                 UsedLate, Transformed, StoredAsWritten, MaskedWeights, WeightsOfAnother, Guarded, DecidesByLoss,
                 ToldByAnObject, ToldByAnEnum, ToldByANumber, ToldByATensor, ToldByATensorOnIt, ToldByAGlobalTensor,
                 ToldByTheEnvironment, LogsAMetric, FillsACache, TrainerAsArgument, BufferOfALayer, LengthOfALayer,
                 HookOnInput, TokensSeen, WordsBetweenLayers, WhoRanFirst, CountsInArgument, Checkpoints,
                 LastUntilReset, InContext, HooksOnce, HookOnAll, SetAtTheStart, CallsAgainLater, RunningAccuracy,
                 AveragesByHand, GradientsByHand, WritesByHand, MemoryByHand, ArrayAsData, GradientsOfItsOwn,
                 StateByHand, OptimizerState, LoopsOverSamples, LayerIterators, CyclesLists, WritesABufferTwice,
                 TiedCountingHooks, HooksThatLeave, HooksAssignBuffers, Branches, EvaluatesInStep, HandsBackWeight,
                 RenewsGenerator, AveragedModule, InnerBuffers, LaterAlongSamples, GrowingMemory,
                 FlipsFlags, TurnsSums, MatchesTargets, RemembersATable,
                 RemembersByObject, RoutesTokens)
}  # fmt: skip
UNITS = (Scaled, SpectralNorm, CountsRows, LossOfRows, Numbered, CountsCalls, CarriesState, HooksGradient, LaterMixing,
         Recurrent, WholeTable, FirstSamples, LaterByGlobal, LaterByNested, LaterByClosure, SetByStep)  # fmt: skip
FOUND |= {kind.__name__: of_units(kind) for kind in UNITS} | {"SaysSizes": SaysSizes}


class AverageOfParts(Base):
    """An average of the weights whose layers evaluation calls one by one, or gives to another layer for a call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.c = nn.BatchNorm1d(6), nn.Linear(C, C)
        self.average = nn.ModuleList(copy.deepcopy([self.a, self.norm, self.b])).requires_grad_(False)
        self.whole = AveragedModel(self.c, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.norm(self.a(x).tanh())))

    def on_train_batch_end(self, *args: Any) -> None:
        layers = nn.ModuleList([self.a, self.norm, self.b])
        with torch.no_grad():
            torch._foreach_lerp_([*self.average.parameters()], [*layers.parameters()], 0.5)
            for mine, theirs in zip(self.average.buffers(), layers.buffers(), strict=True):
                mine.copy_(theirs)
        self.whole.update_parameters(self.c)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        a, norm, b = self.average
        y = self.whole.module(b(norm(a(batch[0]).tanh())))
        self.log("average", F.mse_loss(y, batch[0].flip(1)))


class CountsKinds(Base):
    """Counts which entries of a codebook were taken, between two layers, and how often."""

    kinds = C

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0])
        counts = torch.bincount(h.argmax(-1).flatten(), minlength=self.kinds)
        share = counts / counts.sum()
        self.log("perplexity", torch.exp(-(share * (share + 1e-10).log()).sum()))
        return F.mse_loss(self.b(h * share.max()), batch[0].flip(1))


class RenewsCodebook(Base):
    """A buffer of the step's own is looked at through a view, and written anew of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.eye(C)[:4])
        self.register_buffer("sums", torch.ones(4, C))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0]).flatten(0, 1)
        taken = F.one_hot((h @ self.book.T).argmax(-1), 4).to(h)
        with torch.no_grad():
            self.sums.mul_(0.9).add_(taken.T @ h, alpha=0.1)
            self.book.copy_(self.sums / self.sums.norm(dim=1, keepdim=True))
        return F.mse_loss(self.b(h + (taken @ self.book - h).detach()), batch[0].flip(1).flatten(0, 1))


class TooManyKinds(CountsKinds):
    kinds = 2


class Written(Base):
    """Its layers are wide enough to be split."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.d = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.u(self.b(self.a(x))).relu())


class MeasuredFirst(Written):
    """Words that are first looked at without gradients, by a layer, and then used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words((x[..., 0] * 3).long().clamp(0, 5))
        with torch.no_grad():
            seen = self.u(h).abs().mean()
        return self.b(self.a(self.d(self.u(h).relu()))) / seen


class ViewsOfWritten(Written):
    """Views taken before a write in place into what they are views of, or written to themselves."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0]) * 1
        first, some = h[:, 0], h.transpose(1, 2)[:, 2:6].unsqueeze(0)[0, 1:3]
        h.mul_(0.5)
        some[..., 1] = 2.0
        z = self.u(h) * 1
        even, column, part = z[..., ::2], z.view(4, 6, 4, -1)[..., 1], z.narrow(-1, 3, 9)
        z.mul_(0.5)
        z[z > 0.25] = 0.125
        column.data.add_(1)
        loss = F.mse_loss(self.d(z.relu()), batch[0]) + F.cross_entropy(first, batch[1])
        return loss + even.pow(2).mean() + part.pow(3).mean() + some.pow(2).mean()


class WrittenThroughData(Written):
    """Writes that no version shows, before and after uses that gather."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.a(batch[0]) * 1
        ranks = h.sort(1).values
        h.data.mul_(2)
        again = h.sort(1).values
        again.add_(1)
        target = torch.zeros_like(h)
        target.data = h.detach()
        target[:, 0] = 1
        return F.mse_loss(self.d(self.u(h)), ranks + target.detach()) + again.pow(2).mean()


class ShapeOfBatch(Written):
    """The shape of a tensor of the batch is a tuple of its own kind; the batch is written to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        first, (b, t, c) = x[:, 0], x.shape
        x.mul_(0.5)
        return self(x.view(b, t, c)).pow(2).sum() / x.shape.numel() + self.a(first).pow(2).mean()


class AsksForGradients(Written):
    """Gradients of weights within the step, to be differentiated again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[0])
        found = torch.autograd.grad(loss, [self.a.weight, self.u.weight, self.d.weight], create_graph=True)
        return loss + sum(g.pow(2).sum() for g in found)


class Rewound(Written):
    """Weights lie in memory of the copies that they are put back from, as pruning to a lottery ticket has them."""

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.kept:
            self.kept = [p.detach().clone() for p in self.parameters()]
        for p, kept in zip(self.parameters(), self.kept, strict=True):
            p.data = kept.data
            p.data.mul_(0.9)


class DataOfWeights(Written):
    """A tensor takes a weight's memory, and the weight another's; both are written to."""

    def on_train_batch_end(self, *args: Any) -> None:
        w = self.u.weight
        if not self.kept:
            self.kept = [torch.zeros_like(w), torch.zeros_like(self.d.weight)]
        self.kept[0].data = w.data
        self.kept[0].mul_(0.5)
        self.kept[1].data = self.d.weight.data * 2
        self.d.weight.data = self.kept[1].data
        self.kept[1].mul_(0.25)


class MovesATeacher(Written):
    """The step itself moves a teacher by `data`, as contrastive learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.ModuleList((self.u, self.d))).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.b(self.a(batch[0]))
        found = self.d(self.u(x).relu())
        with torch.no_grad():
            for held, own in zip(self.teacher.parameters(), nn.ModuleList((self.u, self.d)).parameters(), strict=True):
                held.data = held.data * 0.5 + own.data * 0.5
            known = self.teacher[1](self.teacher[0](x.flip(1)).relu())
        return F.mse_loss(found, known + batch[0])


class OneVector(Written):
    """All weights lie in one vector, of which an optimizer's step writes all parts at once."""

    def on_train_batch_end(self, *args: Any) -> None:
        vector = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.9, self.parameters())


MEMORY: dict[str, type[Base]] = {
    kind.__name__: kind
    for kind in (MeasuredFirst, ViewsOfWritten, WrittenThroughData, ShapeOfBatch, AsksForGradients, Rewound,
                 DataOfWeights, MovesATeacher, OneVector)
}  # fmt: skip
"""Of what a tensor shares memory with: where one device has a view, a rank may have a copy."""
REFUSED: dict[str, type[Base]] = {kind.__name__: kind for kind in (OneMemory, OneGradient)}
"""What tensor parallelism can't keep, and says so."""
