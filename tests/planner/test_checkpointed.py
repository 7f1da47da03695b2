"""What a module computes again in backward, as it says itself by `torch.utils.checkpoint`, is planned so.

Bytes and activations against real runs: `test_counted` and `test_peaks`, whose cases have such a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.planner import Planner
from lightning_par.planner.report import layout_dict
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner import peaks
from tests.planner.counted import LAYOUTS, Counted, differences, trained

WIDTH, TOKENS = 256, 256


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))) * 2)


class Blocks(LightningModule):
    """Has each block run again as ``how`` says, if it does."""

    def __init__(self, how: dict[str, Any] | None) -> None:
        super().__init__()
        self.how = how
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.blocks[0](batch) if self.how is None else batch
        for block in self.blocks[1:] if self.how is None else self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, **self.how)
        return self.head(x).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


FULL = dict(use_reentrant=False)
REENTRANT = dict(use_reentrant=True)
SELECTIVE = dict(use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _keeps_products))


def _batch() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, requires_grad=True)  # which the reentrant kind wants


def _planned(how: dict[str, Any] | None, gpu: bool, recompute: Any = "none", **layout: int) -> dict[str, Any]:
    machine = read_machine("8xH100")[0]
    planner = Planner(partial(Blocks, how), _batch(), machine, "bf16-mixed", recompute, gpu)
    ranks = 1
    for size in layout.values():
        ranks *= size
    found: dict[str, Any] = layout_dict(planner.evaluate(layout or {"tensor_parallel_size": 1}, ranks))
    return found


def _kept(found: dict[str, Any]) -> float:
    return float(found["ranks"][0]["activations"])


@long("eager-reentrant", "eager-not_reentrant")
@pytest.mark.parametrize("how", (FULL, REENTRANT), ids=("not_reentrant", "reentrant"))
@pytest.mark.parametrize("gpu", (True, False), ids=("fused", "eager"))
def test_it_is_planned_as_if_the_plan_had_been_asked_to(how: dict[str, Any], gpu: bool) -> None:
    plain, asked, found = _planned(None, gpu), _planned(None, gpu, "full"), _planned(how, gpu)
    if how is REENTRANT and not gpu:  # live tensors are counted: what that kind makes of a region is there to its end
        assert _kept(found) > _kept(asked)
    else:
        assert _kept(found) == pytest.approx(_kept(asked), rel=0.1)
    assert _kept(found) < 0.6 * _kept(plain)
    assert found["step_time_s"] == pytest.approx(asked["step_time_s"], rel=0.02)
    assert plain["step_time_s"] < found["step_time_s"]
    assert found["parts"]["recompute"] == pytest.approx(asked["parts"]["recompute"], rel=0.05)


@long("eager")
@pytest.mark.parametrize("gpu", (True, False), ids=("fused", "eager"))
def test_a_selective_region_keeps_more_and_computes_less(gpu: bool) -> None:
    plain, full, some = _planned(None, gpu), _planned(FULL, gpu), _planned(SELECTIVE, gpu)
    assert _kept(full) < _kept(some) < _kept(plain)
    assert 0 < some["parts"]["recompute"] < full["parts"]["recompute"]


def _real(how: dict[str, Any] | None, layout: dict[str, Any]) -> Counted:
    torch.manual_seed(0)
    return trained(Blocks(how), DataLoader([_batch()] * 4, batch_size=None), layout)  # type: ignore[arg-type]


@slow(but=["reentrant-tensor_parallel_size"])
@pytest.mark.parametrize("axis", ("tensor_parallel_size", "data_parallel_size"))
@pytest.mark.parametrize("how", (FULL, REENTRANT, SELECTIVE), ids=("not_reentrant", "reentrant", "selective"))
def test_what_is_sent_is_what_a_run_sends(how: dict[str, Any], axis: str, pool: Pool) -> None:
    layout: dict[str, Any] = {axis: 2} | ({"data_parallel": "fsdp"} if axis == "data_parallel_size" else {})
    machine = replace(read_machine("8xH100")[0], gpu=False)
    found = layout_dict(Planner(partial(Blocks, how), _batch(), machine).evaluate(layout, 2))
    said = [Counted(one["parameters"], one["gradients"], one["optimizer"], one["sent"]) for one in found["ranks"]]
    assert not differences(pool.run(2, _real, how, layout), said)


class Stem(Blocks):
    """Its batch requires no gradient."""

    def __init__(self, how: dict[str, Any] | None) -> None:
        super().__init__(how)
        self.stem = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.stem(batch), batch_idx)


def _peak(how: dict[str, Any], layout: dict[str, Any]) -> int:
    torch.manual_seed(0)
    loader = DataLoader([torch.randn(2, TOKENS, WIDTH)] * 8, batch_size=None)  # type: ignore[arg-type]
    return peaks.trained(Stem(how), loader, layout)[0]


@slow(but=["data"])
@pytest.mark.parametrize("name", ("data", "tensor"))
def test_a_second_run_with_a_graph_of_its_own_has_live_what_is_said(name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    said = peaks.said(partial(Stem, REENTRANT), torch.randn(2, TOKENS, WIDTH), layout)
    assert pool.run(2, _peak, REENTRANT, layout) == [pytest.approx(size, rel=0.01) for size in said]


def _nested(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(block, y, use_reentrant=False), x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_region_within_one_is_a_part_of_it() -> None:
    class Nested(Blocks):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch
            for block in self.blocks:
                x = _nested(block, x)
            return self.head(x).pow(2).mean()

    machine = read_machine("8xH100")[0]
    planner = Planner(partial(Nested, FULL), _batch(), machine, "bf16-mixed", "none", True)
    found = layout_dict(planner.evaluate({"tensor_parallel_size": 1}, 1))
    assert _kept(found) == pytest.approx(_kept(_planned(FULL, True)))
