"""The clip of gradients in a plan: what it sends is what a dry run counts, and it takes its time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_par import dry_run, plan
from lightning_par.planner.messages.dried import AXES
from tests.helpers.slow import long, slow

BATCH = torch.ones(4, 8)
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
FSDP: dict[str, Any] = {"data_parallel_size": 2, "data_parallel": "fsdp"}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.last(self.first(batch).relu()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class SomeFrozen(Module):
    """The optimizer has weights without gradients, which come first."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class SomeLeftOut(Module):
    """No optimizer has the weights that the tensor axis splits."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Linear(8, 8)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.alone(super().training_step(batch) + batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


def _dry(module: Any, layout: Any, **clip: Any) -> dict[str, float]:
    sent = {"data": 0.0, "tensor": 0.0, "sequence": 0.0, "pipeline": 0.0}
    devices = 2 if sum(name.endswith("_size") for name in layout) == 1 else 4
    for (axis, purpose), size in dry_run(module, BATCH, layout, devices=devices, **clip).sent.items():
        if axis in AXES and purpose in ("clip", "enter", "leave", "parameters", "gradients"):
            sent[AXES[axis]] += size
    return sent


def _planned(module: Any, layout: Any, **clip: Any) -> dict[str, Any]:
    devices = 2 if sum(name.endswith("_size") for name in layout) == 1 else 4
    return plan(module, BATCH, "4xH100", devices=devices, layout=layout, **clip).as_dict()["layouts"][0]  # type: ignore[no-any-return]


@slow(but=["32-true-fsdp-SomeLeftOut"])
@pytest.mark.parametrize("module", [Module, SomeFrozen, SomeLeftOut])
@pytest.mark.parametrize("layout", [TENSOR, FSDP, TENSOR | FSDP], ids=["tensor", "fsdp", "fsdp_tensor"])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_it_sends_what_a_dry_run_counts(module: Any, layout: dict[str, Any], precision: str) -> None:
    clip = {"gradient_clip_val": 1.0, "precision": precision}
    assert _planned(module, layout, **clip)["ranks"][0]["sent"] == _dry(module, layout, **clip)


@long()
@slow("tensor")
@pytest.mark.parametrize(("layout", "part"), [(TENSOR, "tensor"), (TENSOR | FSDP, "replicas")], ids=["tensor", "fsdp"])
def test_by_value_it_sends_nothing_and_takes_less_time(layout: dict[str, Any], part: str) -> None:
    none, value, norm = (
        _planned(Module, layout, gradient_clip_val=limit, gradient_clip_algorithm=name)
        for limit, name in ((None, None), (1.0, "value"), (1.0, "norm"))
    )
    assert none["ranks"][0]["sent"] == value["ranks"][0]["sent"] != norm["ranks"][0]["sent"]
    assert none["step_time_s"] < value["step_time_s"] < norm["step_time_s"]
    assert none["parts"][part] == value["parts"][part] < norm["parts"][part]
    assert _dry(Module, layout, gradient_clip_val=1.0, gradient_clip_algorithm="value") == _dry(Module, layout)
    assert _planned(Module, layout, gradient_clip_val=0.0) == none


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch))


class OfItsOwn(Module):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


def test_what_lightning_refuses_is_refused_and_what_a_module_clips_is_not_known() -> None:
    with pytest.raises(ValueError, match="ByHand optimizes by hand .* call self.clip_gradients"):
        _planned(ByHand, TENSOR, gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="gradient_clip_algorithm must be 'norm' or 'value', got 'sum'"):
        _planned(Module, TENSOR, gradient_clip_val=1.0, gradient_clip_algorithm="sum")
    with pytest.raises(ValueError, match="gradient_clip_val must be a number or None, got '1'"):
        _planned(Module, TENSOR, gradient_clip_val="1")
    said = plan(OfItsOwn, BATCH, "4xH100", devices=2, layout=TENSOR).notes
    assert any("configure_gradient_clipping of the module" in note for note in said)
    assert not any("configure_gradient" in x for x in plan(Module, BATCH, "4xH100", devices=2, layout=TENSOR).notes)
