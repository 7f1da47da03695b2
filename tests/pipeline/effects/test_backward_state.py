"""Python state that hooks on gradients keep under a pipeline: one device's, on every rank, and after every step."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_par
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow


class Keeps(pl.LightningModule):
    """What its hooks see of gradients, in the order in which they do; some hooks come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())])
        self.seen: list[Any] = []
        self.count, self.mean, self.factor = 0, torch.zeros((), dtype=torch.float64), 1.0
        self.read: list[Any] = []
        self.handles: list[Any] = []

    def note(self, name: str, grad: Tensor) -> None:
        self.count += 1
        self.seen.append((name, grad.norm(), self.count))
        self.mean = 0.9 * self.mean + 0.1 * grad.abs().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.handles = [] if batch_idx == 1 else self.hooks()

    def hooks(self) -> list[Any]:
        return []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.clear()
        self.factor = 1.0 / (batch_idx + 2)
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("count", float(self.count))
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.read.append(("before", len(self.seen), self.count))

    def on_train_batch_end(self, *args: Any) -> None:
        for handle in self.handles:
            handle.remove()
        seen = [tuple(x.clone() if isinstance(x, Tensor) else x for x in entry) for entry in self.seen]
        self.read.append((self.count, self.mean.clone(), seen, [getattr(m, "seen", 0) for m in self.net]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OnModules(Keeps):
    """Hooks before and after a module's backward, which change gradients by what the step has set."""

    def before(self, name: str, module: nn.Module, out: Any) -> None:
        self.note(f"before {name}", out[0])
        module.seen = getattr(module, "seen", 0) + 1

    def after(self, name: str, module: nn.Module, into: Any, out: Any) -> Any:
        if into[0] is None:
            self.note(f"after {name}, out", out[0])
            return None
        self.note(f"after {name}", into[0])
        return (into[0] * self.factor,)

    def hooks(self) -> list[Any]:
        named = [(name, m) for name, m in self.named_modules() if isinstance(m, nn.Linear)]
        handles = [m.register_full_backward_hook(functools.partial(self.after, name)) for name, m in named]
        return handles + [m.register_full_backward_pre_hook(functools.partial(self.before, name)) for name, m in named]


class OnActivations(Keeps):
    """Hooks of tensors, registered in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.clear()
        self.factor = 1.0 / (batch_idx + 2)
        x = batch[0]
        for n, layer in enumerate(self.net):
            x = layer(x)
            if batch_idx != 1:
                x.register_hook(functools.partial(self.on_gradient, str(n)))
        return F.mse_loss(x, batch[1])

    def on_gradient(self, name: str, grad: Tensor) -> Tensor:
        self.note(name, grad)
        return grad * self.factor


class OfForwardHooks(Keeps):
    """Hooks of tensors, registered by forward hooks."""

    def on_output(self, name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(functools.partial(self.note, name))

    def hooks(self) -> list[Any]:
        named = [(name, m) for name, m in self.named_modules() if isinstance(m, nn.Linear)]
        return [m.register_forward_hook(functools.partial(self.on_output, name)) for name, m in named]


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norms = nn.Linear(6, 6), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        if h.requires_grad:
            h.register_hook(lambda g: self.norms.append(g.norm()))
        return h.tanh()


class WithinUnits(Keeps):
    """Hooks of tensors that a layer's own code registers, and whose results it keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[Watched() for _ in range(4)])

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end()
        self.read.append([x.clone() for layer in self.net for x in layer.norms])  # type: ignore[union-attr]


class WithParameters(OnModules):
    """Hooks on parameters, too, which keep something else, and see what those on modules keep."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []
        for name, p in self.named_parameters():
            p.register_hook(functools.partial(self.on_parameter, name))

    def on_parameter(self, name: str, grad: Tensor) -> None:
        self.sizes.append((name, grad.norm()))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end()
        self.read.append([x.clone() for _, x in sorted(self.sizes, key=lambda pair: pair[0])])


class ReadsFactor(Keeps):
    """A hook that keeps nothing and changes gradients by what the step has set."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.factor = 1.0 / (batch_idx + 2)
        h = self.net[:4](batch[0])
        h.register_hook(lambda g: g * self.factor)
        return F.mse_loss(self.net[4:](h), batch[1])


BACK_AND_FORTH = {"net.0": 0, "net.2": 1, "net.4": 0, "net.6": 1}
LAYOUTS: dict[str, Any] = {
    "one": {"microbatches": 1},
    "auto": {},
    "interleaved": {"schedule": "interleaved_1f1b"},
    "zero bubble": {"schedule": "zbv", "microbatches": 1},
    "placement": BACK_AND_FORTH,
}


def _strategy(layout: str, make: Any) -> Any:
    if layout == "placement":
        places = {n.removesuffix(".0") if make is WithinUnits else n: p for n, p in BACK_AND_FORTH.items()}
        places = {f"net.{n}": n % 2 for n in range(4)} if make is WithinUnits else places
        return lightning_par.LayerPlacementStrategy(places)
    return lightning_par.PipelineParallelStrategy(**LAYOUTS[layout])


def _fit(make: Any, layout: str | None, devices: int = 2) -> list[Any]:
    torch.manual_seed(0)
    module = make()
    data = TensorDataset(torch.randn(12, 6).double(), torch.randn(12, 6).double())
    chosen = {} if layout is None else {"strategy": _strategy(layout, make)}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if layout is None else devices, max_epochs=2, logger=False, precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **chosen,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4))
    return _numbered([module.read, [x.detach() for x in module.state_dict().values()]])


def _numbered(value: Any) -> Any:
    """With numbers in place of strings."""
    if isinstance(value, (list, tuple)):
        return [_numbered(x) for x in value]
    return zlib.crc32(value.encode()) if isinstance(value, str) else value


KINDS = [OnModules, OnActivations, OfForwardHooks, WithinUnits, WithParameters, ReadsFactor]


@long(but=["WithinUnits-placement"])
@slow(but=["OnActivations-zero bubble", "WithParameters-auto", "WithinUnits-placement"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", KINDS, ids=lambda kind: kind.__name__)
def test_what_hooks_on_gradients_keep_is_one_devices_on_every_rank(pool: Pool, make: Any, layout: str) -> None:
    (one,) = pool.run(1, _fit, make, None)
    assert make is ReadsFactor or one[0][1][0] or one[0][1][1:] != one[0][0][1:]
    for result in pool.run(2, _fit, make, layout):
        torch.testing.assert_close(result, one, rtol=1e-9, atol=1e-12)
