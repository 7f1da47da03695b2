"""The gradient of what enters an island travels while those of the weights behind it are computed."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, ledger
from lightning_par.mesh import collectives, overlapped_entry
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.collectives import enter
from lightning_par.sharded.rules.column_linear import column_linear, fits
from tests.helpers.accelerator import accelerator
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.tensor.test_counts import Block, h, s

STEPS = 2


class _Work:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait(self) -> None:
        self.events.append("wait")


class _Pair(Axis):
    """Of two ranks that hold the same."""

    def __init__(self) -> None:
        super().__init__("tensor", (0, 1), 0, None)
        self.events: list[str] = []

    def start_all_reduce_(self, x: Tensor, *_: Any, **__: Any) -> Any:
        self.events.append("start")
        x.mul_(2)
        return _Work(self.events)


def _noted(name: str, events: list[str], size: int) -> nn.Parameter:
    weight = nn.Parameter(torch.randn(size, 4, dtype=torch.float64))
    weight.register_post_accumulate_grad_hook(lambda _: events.append(name))
    return weight


def _run(least: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Tensor]]:
    monkeypatch.setattr(overlapped_entry, "LEAST_BYTES", least)
    torch.manual_seed(0)
    axis = _Pair()
    before = _noted("before", axis.events, 4)
    q, k, v = (_noted(name, axis.events, size) for name, size in (("q", 4), ("k", 2), ("v", 2)))
    bias = nn.Parameter(torch.randn(4, dtype=torch.float64))
    x = torch.tanh(torch.randn(3, 4, dtype=torch.float64) @ before)
    entry = enter(x, axis)
    outs = []
    for weight, b in ((q, bias), (k, None), (v, None)):
        assert fits(entry, weight, b) == (least == 0)
        outs.append(column_linear(entry, weight, b) if least == 0 else nn.functional.linear(entry, weight, b))
    loss = (outs[0].view(3, 2, 2) * (outs[1] * outs[2]).unsqueeze(1)).sum() + (x**2).sum()
    loss.backward()
    return axis.events, [p.grad for p in (before, q, k, v, bias) if p.grad is not None]


def test_weights_that_read_one_input_hide_its_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    events, grads = _run(0, monkeypatch)
    assert (events[0], sorted(events[1:4]), events[4:]) == ("start", ["k", "q", "v"], ["wait", "before"])
    plain, wanted = _run(2**40, monkeypatch)
    assert plain[-3:] == ["start", "wait", "before"]
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_gradient_of_a_gradient_knows_the_input_and_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_entry, "LEAST_BYTES", 0)
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        entry = overlapped_entry.overlapped(x, collectives._Entering(Axis("tensor", (0,), 0, None), "enter"))
        return torch.tanh(column_linear(entry, w, b))

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


class Net(LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block("swiglu"), Block("gelu")])
        self.how = how
        if how == "frozen":
            self.blocks[0].attention.k.requires_grad_(False)
            self.blocks[1].mlp[0].weight.requires_grad_(False)
        self.seen = 0
        if how == "hooked":
            self.blocks[0].attention.q.weight.register_hook(lambda grad: grad * 3)
        self.gradients: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        # fused kernels have no second derivative
        with sdpa_kernel([SDPBackend.MATH]) if self.how == "penalty" else nullcontext():
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.how == "checkpointed" else block(x)
        loss = (x**2).mean()
        if self.how == "penalty":
            (grad,) = torch.autograd.grad(loss, self.blocks[0].norm1.weight, create_graph=True)
            loss = loss + (grad**2).sum()
        return loss

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.gradients.append({name: _whole(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _whole(grad: Any) -> Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()


HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": dict(shard_residual=True),
    "residual-autocast": dict(shard_residual=True, precision="bf16-mixed"),
    "autocast": dict(precision="bf16-mixed"),
    "checkpointed": {},
    "accumulated": dict(accumulate_grad_batches=2),
    "frozen": {},
    "hooked": {},
    "penalty": {},
    "1f1b": dict(pipeline_parallel_size=2, microbatches=2, schedule="1f1b"),
    "zbv": dict(pipeline_parallel_size=2, microbatches=2, schedule="zbv"),
}


def train(how: str, least: int) -> Any:
    """Gradients before each optimizer step, what moved, and how many messages began apart, on this rank."""
    warnings.simplefilter("ignore")
    options = dict(precision="64-true") | HOWS[how]
    ours = ("pipeline_parallel_size", "microbatches", "schedule", "shard_residual")
    sizes = {key: options.pop(key) for key in ours if key in options}
    count = 2 * sizes.get("pipeline_parallel_size", 1)
    trainer = Trainer(
        strategy=HybridParallelStrategy(tensor_parallel_size=2, **sizes), accelerator=accelerator(), devices=count,
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    dtype = torch.float32 if "autocast" in how else torch.float64
    batches = [torch.randn(2, s, h, generator=g, dtype=torch.float64).to(dtype) for _ in range(2 * STEPS)]
    module = Net(how)
    counted = patch.object(collectives, "overlapped", wraps=overlapped_entry.overlapped)
    with counted as apart, patch.object(overlapped_entry, "LEAST_BYTES", least), ledger() as moved:
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module.gradients, [(t.axis, t.verb, t.purpose, t.nbytes) for t in moved.transfers], apart.call_count


@long("checkpointed")
@slow("1f1b", "zbv", "residual-autocast", "plain", "accumulated", "hooked", "penalty", "frozen", "autocast")
@pytest.mark.parametrize("how", HOWS)
def test_messages_and_gradients_are_those_of_the_layer_as_it_is(pool: Pool, how: str) -> None:
    ranks = 4 if "schedule" in HOWS[how] else 2
    before, after = (pool.run(ranks, train, how, least) for least in (2**40, 0))
    for (wanted, plain, none), (gradients, hidden, apart) in zip(before, after, strict=True):
        assert none == 0
        assert (apart == 0) == (how == "zbv")
        assert sorted(plain) == sorted(hidden)
        for a, b in zip(gradients, wanted, strict=True):
            assert a.keys() == b.keys()
            for name, grad in a.items():
                close = dict(rtol=2e-2, atol=1e-3) if "autocast" in how else dict(rtol=0, atol=1e-12)
                torch.testing.assert_close(grad, b[name], **close)
