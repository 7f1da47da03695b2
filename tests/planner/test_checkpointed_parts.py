"""Regions that backward runs again where they are no whole block, and parameters that no backward comes to: what a plan
counts is what a run counts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.planner import Planner
from lightning_par.planner.report import layout_dict
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner import peaks
from tests.planner.counted import Counted, differences, trained

WIDTH = 32
AGAIN: Any = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.norm = part, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return AGAIN(self._whole, x) if self.part == "inside" else self._whole(x)  # type: ignore[no-any-return]

    def _whole(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (AGAIN(self.mlp, h) if self.part == "mlp" else self.mlp(h))  # type: ignore[no-any-return]


class Model(LightningModule):
    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(part) for _ in range(3))
        self.head, self.beside = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Sequential(Block(part), Block(part)).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.part == "reentrant":  # of a batch that requires no gradient
            batch = checkpoint(self.beside, batch, use_reentrant=True)  # type: ignore[assignment]
        if self.part == "raises":
            with torch.enable_grad():
                _tries()
        x = self.stem(batch)
        if self.part == "no_grad":
            with torch.no_grad():
                x = x + AGAIN(self.teacher, x)
        for block in self.blocks:
            x = block(x)
        if self.part == "detached":
            x = x + self.beside(x).detach()
        if self.part == "dropped":
            self.beside(x)
        if self.part == "function":
            x = _Scaled.apply(x, self.beside.weight)
        if self.part == "written":
            written = torch.zeros_like(x)
            written[0] = self.beside.bias
            x = x + written
        if self.part == "loss":
            return sum(AGAIN(self._loss, part) for part in x.chunk(3))  # type: ignore[return-value]
        return self._loss(x)

    def _loss(self, x: Tensor) -> Tensor:
        return self.head(x).pow(2).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _raises(x: Tensor) -> Tensor:
    raise KeyError


def _tries() -> None:
    try:
        AGAIN(_raises, torch.ones(1, requires_grad=True))
    except KeyError:
        pass


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = weight.sum(0)
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], grad.new_zeros(WIDTH, WIDTH)


def _batch() -> Tensor:
    return torch.ones(6, WIDTH)


def _real(part: str, layout: dict[str, Any]) -> Counted:
    return trained(Model(part), DataLoader([_batch()] * 4, batch_size=None), layout)  # type: ignore[arg-type]


FSDP: dict[str, Any] = dict(data_parallel_size=2, data_parallel="fsdp")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": FSDP,
    "fsdp_kept": FSDP | dict(reshard_after_forward=False),
    "tensor": dict(tensor_parallel_size=2),
}
REGIONS, UNGRADED = ("mlp", "inside", "loss", "raises"), ("detached", "dropped", "reentrant", "function", "written")


def _check(part: str, layout: dict[str, Any], pool: Pool, sent: bool = True) -> None:
    machine = replace(read_machine("8xH100")[0], gpu=False)
    found = layout_dict(Planner(partial(Model, part), _batch(), machine).evaluate(layout, 2))
    said = [Counted(one["parameters"], one["gradients"], one["optimizer"], one["sent"]) for one in found["ranks"]]
    real = pool.run(2, _real, part, layout)
    if not sent:  # of what functions of the user's own do no plan knows
        said = [replace(one, sent=counted.sent) for one, counted in zip(said, real, strict=True)]
    assert not differences(real, said)


@slow(but=["mlp-fsdp", "inside-fsdp", "loss-fsdp", "raises-tensor"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("part", REGIONS)
def test_what_is_gathered_for_a_region(part: str, name: str, pool: Pool) -> None:
    _check(part, LAYOUTS[name], pool)


@pytest.mark.parametrize("part", UNGRADED)
def test_what_no_backward_comes_to_has_no_gradient(part: str, pool: Pool) -> None:
    _check(part, LAYOUTS["tensor"], pool, part != "function")


@long("fsdp_kept")
@pytest.mark.parametrize("name", ["fsdp", "fsdp_kept"])
def test_what_keeps_no_graph_is_not_run_again(name: str, pool: Pool) -> None:
    _check("no_grad", LAYOUTS[name], pool)


def _peak(part: str, layout: dict[str, Any]) -> int:
    return peaks.trained(Model(part), DataLoader([_batch()] * 8, batch_size=None), layout)[0]  # type: ignore[arg-type]


@long()
@slow(but=["no_grad-fsdp_kept"])
@pytest.mark.parametrize("name", ["fsdp", "fsdp_kept"])
@pytest.mark.parametrize("part", ["mlp", "inside", "loss", "no_grad"])
def test_what_lives_while_a_region_is_run_again(part: str, name: str, pool: Pool) -> None:
    found = [min(pair) for pair in zip(*(pool.run(2, _peak, part, LAYOUTS[name]) for _ in range(2)), strict=True)]
    said = peaks.said(partial(Model, part), _batch(), LAYOUTS[name])
    assert found == [pytest.approx(size, rel=peaks.WITHIN) for size in said]


class Attends(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.products, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return AGAIN(self._attend, batch).pow(2).mean()  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.products(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)
        return F.dropout(self.out(y), 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_what_is_run_again_on_a_gpu_has_its_kernels() -> None:
    planner = Planner(Attends, torch.ones(2, 16, WIDTH), read_machine("8xH100")[0], "32-true", "none", True)
    found = layout_dict(planner.evaluate(dict(tensor_parallel_size=2), 2))
    assert found["ranks"][0]["sent"]["tensor"] > 0


class WithOutputs(LightningModule):
    """Returns beside its loss what no loss goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.probe = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.net(batch).sum(), "out": self.probe(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_gradients_come_from_the_loss_alone() -> None:
    machine = replace(read_machine("8xH100")[0], gpu=False)
    planner = Planner(WithOutputs, torch.ones(2, 4), machine)
    assert planner.step.graded == {"net.weight", "net.bias"}
