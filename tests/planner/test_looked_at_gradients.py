"""Whole gradients that hooks and autograd functions of the user's meet, along axes whose ranks have shares of them:
what a plan counts of it, against dry runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par import dry_run
from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.messages.dried import by_axis
from lightning_par.planner.planner import Planner
from lightning_par.planner.report import layout_dict
from tests.helpers.slow import long, slow
from tests.planner.counted import LAYOUTS, ranks_of

BATCH = torch.arange(64).view(4, 16) % 48


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(48, 32), nn.Linear(32, 48)
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 32)

    def between(self, x: Tensor) -> Tensor:
        return x

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        q, k, v = self.qkv(x).view(*batch.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.between(x + attended.transpose(1, 2).reshape(x.shape))
        x = self.head(x + self.down(self.up(x).relu()))
        return nn.functional.cross_entropy(x.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def halved(grad: Tensor) -> Tensor:
    return grad / 2


class OnWeight(Model):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(halved)
        self.down.weight.register_hook(halved)


class OnWeightInStep(Model):
    def between(self, x: Tensor) -> Tensor:
        self.up.weight.register_hook(halved)
        return x


class OnActivation(Model):
    def between(self, x: Tensor) -> Tensor:
        x.register_hook(halved)
        return x


class OnWeightOfRun(Model):
    def on_train_start(self) -> None:
        self.up.weight.register_hook(halved)
        self.down.weight.register_hook(halved)


class OnActivationOfRun(Model):
    def on_fit_start(self) -> None:
        def hang(module: nn.Module, given: Any, made: Tensor) -> None:
            made.register_hook(halved)

        self.up.register_forward_hook(hang)


class OnWhatTrains(Model):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(halved)
        return x


class ReturnsMore(Model):
    """Beside the loss, what ranks have parts of."""

    def training_step(self, batch: Tensor) -> Any:
        self.seen: Any = None
        return {"loss": super().training_step(batch), "seen": self.seen}

    def between(self, x: Tensor) -> Tensor:
        self.seen = x.detach() * 2
        return x


class RunsAgain(Model):
    """By the reentrant kind of checkpointing, which is handed whole tensors."""

    def between(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x + self.down(self.up(x).relu()), x, use_reentrant=True)  # type: ignore[no-any-return]


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 64).round() / 64

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Function(Model):
    def between(self, x: Tensor) -> Tensor:
        return Rounded.apply(x)  # type: ignore[no-any-return]


class Reads(Rounded):
    """Its backward goes by values."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2 if grad.sum().item() > 0 else grad


class ReadingFunction(Model):
    def between(self, x: Tensor) -> Tensor:
        return Reads.apply(x)  # type: ignore[no-any-return]


def _planner(make: Callable[[], Model]) -> Planner:
    return Planner(make, BATCH, replace(read_machine("8xH100")[0], gpu=False))


KINDS = (OnWeight, OnWeightInStep, OnActivation, Function)
REFUSED = {(OnWeightInStep, "pipeline_ring"), (OnActivation, "pipeline_ring")}
MISSED = {(Function, "shard_residual")}
"""Counted as what it calls: on tokens that a tensor axis shares out, its backward meets a sharded tensor in a plan."""
ROWS = [(kind, name) for kind in KINDS for name in ("ring", "tensor", "shard_residual", "pipeline_ring", "tensor_ring")
        if (kind, name) not in REFUSED | MISSED]  # fmt: skip
ROWS += [(kind, name) for kind in (OnWeightOfRun, OnActivationOfRun, OnWhatTrains) for name in
         ("ring", "tensor", "shard_residual", "fsdp", "fsdp_tensor", "fsdp_ring", "fsdp_pipeline")
         if (kind, name) != (OnWhatTrains, "fsdp_pipeline")]  # fmt: skip
ROWS += [(OnWeight, name) for name in ("fsdp", "fsdp_kept", "fsdp_tensor", "fsdp_ring", "fsdp_pipeline")]
"""Weights that have hooks before the run are stored in parts by no layout."""
ROWS += [(RunsAgain, name) for name in ("ring", "ulysses", "tensor")]
ROWS += [(ReturnsMore, name) for name in ("ring", "shard_residual", "tensor")]
ROWS += [(OnWeightInStep, name) for name in ("fsdp", "fsdp_tensor", "fsdp_ring")]
"""Hooks on weights in parts compute with whole gradients, once each; of the step's there are two in the second one."""


@long()
@slow(
    but=[
        "OnWeight-shard_residual",
        "OnWeight-pipeline_ring",
        "OnWeight-fsdp_ring",
        "OnActivation-ring",
        "Function-ring",
        "OnWeightOfRun-fsdp",
        "ReturnsMore-ring",
        "RunsAgain-ring",
        "OnWhatTrains-tensor",
        "OnActivationOfRun-ring",
        "OnWeightInStep-fsdp_ring",
    ]
)
@pytest.mark.parametrize(("kind", "name"), ROWS, ids=[f"{kind.__name__}-{name}" for kind, name in ROWS])
def test_what_meets_whole_gradients_is_counted(kind: type[Model], name: str) -> None:
    layout = LAYOUTS[name]
    found = _planner(kind)
    found.dry_runs.left = 0  # by formulas alone
    said = layout_dict(found.evaluate(layout, ranks_of(layout)))["ranks"]
    for rank in range(ranks_of(layout)):
        sent = dry_run(kind, BATCH, layout, devices=ranks_of(layout), rank=rank).sent
        assert said[rank]["sent"] == by_axis(sent)


def test_a_function_that_goes_by_values_is_named_and_counted_as_what_it_calls() -> None:
    found = _planner(ReadingFunction)
    assert layout_dict(found.evaluate(LAYOUTS["ring"], 2))["ranks"][0]["sent"]["sequence"]
    assert any("what is gathered for Reads at" in note for note in found.notes)
    assert not any("Rounded" in note for note in _planner(Function).notes)


class HasCallbacks(Model):
    def configure_callbacks(self) -> Any:
        return [L.Callback()]


class Gathers(Model):
    def between(self, x: Tensor) -> Tensor:
        return x + self.all_gather(x).mean()  # type: ignore[union-attr]


class Factors(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters(), lr=0.1)


class Watches(Model):
    def on_fit_start(self) -> None:
        self.up.register_full_backward_hook(lambda module, given, made: None)


class NeedsARun(OnWeightOfRun):
    def on_train_start(self) -> None:
        self.trainer.there_is_none.begin()
        super().on_train_start()


def test_what_is_not_known_of_hooks_is_told() -> None:
    assert not any("hook" in note or "callback" in note for note in _planner(Model).notes)
    assert any("what callbacks that configure_callbacks" in note for note in _planner(HasCallbacks).notes)
    assert any("what hooks on up.weight, down.weight do with" in note for note in _planner(OnWeightOfRun).notes)
    assert any("what self.all_gather sends to other replicas at" in note for note in _planner(Gathers).notes)
    assert any(
        "what ranks gather for Adafactor, which may look at whole weights" in note for note in _planner(Factors).notes
    )
    assert not any("all_gather" in note or "shapes" in note for note in _planner(Model).notes)
    assert any("for the backward hooks of up where shard_residual" in note for note in _planner(Watches).notes)
    assert any("hooks that training_step hangs on weights" in note for note in _planner(OnWeightInStep).notes)
    (note,) = (x for x in _planner(NeedsARun).notes if "what hooks before the first step do" in x)
    assert "AttributeError" in note and "test_looked_at_gradients.py:" in note


def test_a_function_that_can_not_run_as_one_is_named_and_counted_as_what_it_calls() -> None:
    found = _planner(Function)
    assert layout_dict(found.evaluate(LAYOUTS["shard_residual"], 2))["ranks"][0]["sent"]["tensor"]
    assert any("what is gathered for Rounded at" in note for note in found.notes)
