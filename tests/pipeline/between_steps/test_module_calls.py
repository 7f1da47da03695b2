"""Between the steps of a pipeline: gradients and calls of the module are one device's on all ranks, or an error."""

from __future__ import annotations

import sys
import types
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from transformers.cache_utils import DynamicCache, DynamicLayer

from lightning_par import HybridParallelStrategy, PipelineParallelStrategy
from lightning_par.mesh import handshake
from lightning_par.sharded.tensor import full
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.optim.test_optimizers import Global

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, size)
        self.norm = nn.BatchNorm1d(size)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        if how == "wrong":
            raise KeyError(how)
        if how == "write":
            x.add_(1.0)
        if how == "clamp":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.3, 0.3)
            self.linear.bias.data.mul_(0.9)
        if isinstance(how, DynamicCache):
            how.layers.append(Layer())  # type: ignore[attr-defined]
            how.layers[0].keys = how.last = x
        x = self.norm(self.linear(x))
        return torch.tanh(x if how in ("train", "clamp") else self.dropout(x))


class Layer(DynamicLayer):
    """A layer of a cache, of a class in a library."""


class Cache(DynamicCache):
    """A cache, of a class in a library."""


LIBRARY = sys.modules.setdefault("transformers.models.own", types.ModuleType("transformers.models.own"))
for made in (Layer, Cache):
    made.__module__ = LIBRARY.__name__
    setattr(LIBRARY, made.__name__, made)


class Model(L.LightningModule):
    """What its hooks see is kept in ``seen``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch, "train")
        return self.head(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def see(self, name: str, value: Any) -> None:
        self.seen[f"{self.trainer.global_step} {name}"] = value


class Reads(Model):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.see("before zero", [name for name, p in self.named_parameters() if p.grad is not None])

    def on_before_backward(self, loss: Tensor) -> None:
        self.see("zeroed", [name for name, p in self.named_parameters() if p.grad is not None])

    def on_after_backward(self) -> None:
        named = {name: p for name, p in self.named_parameters() if p.grad is not None}
        self.see("largest", {name: p.grad.abs().max() for name, p in named.items() if p.grad is not None})
        self.see("flat", torch.cat([p.grad.flatten() for p in named.values() if p.grad is not None]))
        self.see("printed", f"{named['head.bias'].grad}")
        for p in named.values():
            assert p.grad is not None
            p.grad += torch.randn(p.shape)
            p.grad[0] *= 2
            p.grad.flatten()[-1:].neg_()
            p.grad = p.grad.clamp(-1, 1) if p.ndim == 1 else p.grad

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.see("foreach", get_total_norm(grads, foreach=True))
        self.see("inf", clip_grad_norm_(self.blocks[2].parameters(), 0.5, float("inf")))
        clip_grad_value_(self.parameters(), 0.4)
        clip_grad_value_(self.head.parameters(), 0.3, foreach=True)
        self.see("norm", clip_grad_norm_(self.parameters(), 0.1))
        self.see("clipped", clip_grad_norm_(self.parameters(), 0.1, foreach=True))

    def on_train_batch_end(self, *_: Any) -> None:
        self.see("after", [torch.linalg.norm(p.grad) for p in self.parameters() if p.grad is not None])
        self.zero_grad()
        self.see("none", [name for name, p in self.named_parameters() if p.grad is not None])


class Weights(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        weights = [p for p in self.parameters() if p.ndim == 2]
        self.see("flat", nn.utils.parameters_to_vector(self.parameters()).detach())
        self.see("largest", [float(p.abs().max()) for p in weights] + [w.data[0].norm().item() for w in weights])
        self.see("numpy", torch.from_numpy(self.head.weight.detach().numpy().copy()))
        self.see("listed", [self.head.bias.tolist(), *(x.tolist() for x in self.blocks[0].linear.bias[:2])])
        self.see("equal", [torch.equal(p, q) for p in self.parameters() for q in self.parameters()])
        self.see(
            "graph", [p.norm().requires_grad for p in weights] + [p.detach().norm().requires_grad for p in weights]
        )
        self.see("called", nn.functional.linear(X, self.unused.weight).detach())
        with torch.no_grad():
            for p in weights:
                p.div_(1 + p.norm(dim=1, keepdim=True))
                p[0].mul_(2)
                p.view(-1)[-1:].neg_()
                p.data[p.data.abs() < 0.02] = 0.5
            self.blocks[0].linear.weight.lerp_(self.blocks[2].linear.weight, 0.25)
            self.blocks[1].linear.weight.add_(self.blocks[2].linear.weight * 0.1)
            for row in self.head.weight:
                row.clamp_(-0.3, 0.3)


class Turned(Model):
    """Views that do not lie as a new tensor of their shape would."""

    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.named_parameters():
            turned = p.detach().t()
            wide = p.detach().flatten()[:, None].expand(-1, 3)
            for kind, x in {"turned": turned, "wide": wide, "sliced": p.detach()[..., ::2]}.items():
                views = [x, x.clone(), x.contiguous(), x.to(p.dtype)]
                self.see(f"{name} {kind} lies", [(y.stride(), y.is_contiguous()) for y in views])
                self.see(f"{name} {kind} is same", [x.to(p.dtype) is x, x.double() is x])
                self.see(f"{name} {kind} flat", [x.reshape(-1) + 1, x.flatten() + 1, x.to(p.dtype) + 1])


class WeightsOfParts(Model):
    """Of weights that are sharded, too, each stage sees the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(4, 8)]), nn.Linear(8, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.blocks[0](batch)).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.data.mul_(0.9)
        if self.trainer.global_step < 2:
            return
        for name, p in self.named_parameters():
            self.see(name, [(p.data * 0.9).sum(), torch.tensor(p.tolist()), p.equal(p.data), p.equal(p.data * 0.9)])


class Overwrites(Model):
    """Writes into parameters within a step: within a unit, and beside the call of one."""

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch, "clamp")
        self.head.weight.data.mul_(0.9)
        return self.head(batch).pow(2).mean()


class Counted(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.calls += 1
        return x


class Counts(Model):
    """A module that counts its calls is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted()])

    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.blocks[0](batch))).pow(2).mean()

    validation_step = training_step

    def on_validation_epoch_end(self) -> None:
        self.see("calls", int(self.blocks[0].calls))


class Thaws(Model):
    """Unfreezes layers of one shape while it trains."""

    def configure_callbacks(self) -> Any:
        return [Thaw()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.blocks[0], pl_module.blocks[2]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.blocks[0].linear, pl_module.blocks[2]], optimizer)
            pl_module.see("groups", [len(group["params"]) for group in optimizer.param_groups])


class ReadsParts(Reads):
    """Gradients of weights that are sharded, too: a view of one can't be written into."""

    def on_after_backward(self) -> None:
        named = {name: p for name, p in self.named_parameters() if p.grad is not None}
        self.see("largest", {name: p.grad.abs().max() for name, p in named.items() if p.grad is not None})
        self.see("sums", {name: full(p.grad.sum(0)) for name, p in named.items() if p.grad is not None})
        for p in named.values():
            assert p.grad is not None
            p.grad *= 1 + torch.rand(p.shape[-1:])
            p.grad = p.grad.clamp(-1, 1) if p.ndim == 1 else p.grad
        self.see("flat", torch.cat([full(p.grad).flatten() for p in named.values() if p.grad is not None]))


class Calls(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():  # in training mode: dropout draws, statistics move
            self.see("dropout", self(X))
            self.see("drawn", torch.rand(1))
        x, y = X.clone(), self(X)
        y.sum().item()
        self.see("graph", y.requires_grad)
        self.see("written", self.blocks[0](x, how="write").detach())
        self.see("into", x)

    def on_validation_epoch_end(self) -> None:
        x = X
        for _ in range(3):  # goes where its values lead
            x = torch.cat([x, self.blocks[1](x)])[x.mean().round().long().abs() :]
        self.see("loop", x)

    def on_train_end(self) -> None:
        self.see("statistics", self(X).detach())


class Fills(Model):
    """Layers fill the caches of a library."""

    def on_train_batch_end(self, *_: Any) -> None:
        for kind in (DynamicCache, Cache):
            cache, x = kind(), X
            for block in self.blocks:
                x = block(x, cache)
            self.see(f"{kind.__name__} layers", [len(cache.layers), cache.layers[0].keys.detach()])
            self.see(f"{kind.__name__} last", cache.last.detach())


class Wrong(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        for name, call in {
            "raises": lambda: [block(X, how="wrong") for block in self.blocks],
            "object": lambda: [block(X, how=how) for block in self.blocks for how in (nn.Linear, object())],
        }.items():
            try:
                call()
            except Exception as error:
                self.see(name, f"{type(error).__name__}: {error}")


class Alone(Model):
    """The first rank alone does what needs all."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            with mock.patch.object(handshake, "PATIENCE", timedelta(seconds=1)):
                self(X)


class Joint(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Global(p for name, p in self.named_parameters() if "unused" not in name)


_KINDS = (
    *(Reads, ReadsParts, Weights, Turned, WeightsOfParts, Overwrites, Counts, Thaws, Calls, Fills, Wrong, Alone, Joint),
)
KINDS = {kind.__name__: kind for kind in _KINDS}


def fit(name: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    L.seed_everything(0, verbose=False)
    kind: Any = HybridParallelStrategy if "tensor_parallel_size" in (layout or {}) else PipelineParallelStrategy
    strategy: Any = "auto" if layout is None else kind(**layout)
    devices = 1 if layout is None else layout["pipeline_parallel_size"] * layout.get("tensor_parallel_size", 1)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_steps=2 + 2 * (name == "Thaws"), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="64-true",
        num_sanity_val_steps=0,
    )  # fmt: skip
    module = KINDS[name]()
    data = torch.utils.data.DataLoader(torch.randn(6, 4, dtype=torch.float64), batch_size=3)
    trainer.fit(module, data, data if name in ("Calls", "Counts") else None)
    module.seen["state"] = module.state_dict()
    module.seen["after fit"] = module.eval()(X).detach()
    return module.seen


def agree(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(agree(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(agree, a, b))
    if isinstance(a, Tensor):
        return type(b) is Tensor and a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    return bool(a == b)


@long()
@slow("Weights", "Reads", "Counts", "Joint", "Overwrites", "Fills", "Calls", "Thaws")
@pytest.mark.parametrize(
    "name", ["Reads", "Weights", "Turned", "Overwrites", "Counts", "Thaws", "Calls", "Fills", "Joint"]
)
def test_gradients_and_calls_between_steps_are_one_devices(pool: Pool, name: str) -> None:
    (expected,) = pool.run(1, fit, name)
    assert len(expected) > (1 if name in ("Overwrites", "Counts", "Thaws", "Joint") else 8)
    for seen in pool.run(2, fit, name, dict(pipeline_parallel_size=2, schedule="gpipe")):
        assert [key for key in expected if not agree(expected[key], seen.get(key))] == []


@long()
def test_gradients_of_sharded_weights_are_one_devices_on_all_stages(pool: Pool) -> None:
    (expected,) = pool.run(1, fit, "ReadsParts")
    assert len(expected) > 8
    for seen in pool.run(4, fit, "ReadsParts", dict(pipeline_parallel_size=2, tensor_parallel_size=2)):
        assert [key for key in expected if not agree(expected[key], seen.get(key))] == []


def test_values_of_weights_in_parts_of_another_stage_are_one_devices(pool: Pool) -> None:
    (expected,) = pool.run(1, fit, "WeightsOfParts")
    assert len(expected) > 4
    for seen in pool.run(4, fit, "WeightsOfParts", dict(pipeline_parallel_size=2, tensor_parallel_size=2)):
        assert [key for key in expected if not agree(expected[key], seen.get(key))] == []


@long()
def test_what_can_not_be_carried_out_is_refused_on_all_ranks(pool: Pool) -> None:
    layout = dict(pipeline_parallel_size=2)
    for seen in pool.run(2, fit, "Wrong", layout):
        assert "wrong" in seen["1 raises"]
        assert "is called outside a step with an object of type object" in seen["1 object"]
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, fit, "Alone", layout, until=0)
    report = failed.value.reports[0]
    assert "outside a step with tensors of shape (3, 4), and waits in vain for rank 1" in report
