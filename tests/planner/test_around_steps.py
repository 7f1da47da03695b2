"""What hooks around a step, callbacks and optimizers send: what a plan says of it, against real runs."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from lightning_par.planner.report import layout_dict
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.counted import LAYOUTS, Counted, differences, ranks_of, trained
from tests.planner.test_looked_at_gradients import BATCH, Factors, Function, Gathers, Model, OnWeightOfRun, Watches
from tests.planner.test_looked_at_gradients import _planner as planner


class LogsNorms(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class _Norms(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.log_dict(grad_norm(pl_module, norm_type=2))


class HasNormsLogged(Model):
    def configure_callbacks(self) -> Any:
        return _Norms()


class Averaged(Model):
    def configure_callbacks(self) -> Any:
        return EMAWeightAveraging(decay=0.9)


class LogsWeights(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())


class ClipsItself(Model):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.02))


class Clamps(Model):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-p.abs().mean(), p.abs().mean())


class HalvesByHook(Model):
    """Meets gradients more than once, of which formulas take it that it meets them once."""

    def on_train_start(self) -> None:
        for p in self.parameters():
            p.register_hook(lambda grad: grad / 2 + grad.sum())


class _Scales(torch.optim.Optimizer):
    """By norms of whole weights, as LAMB."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.state[p], group["lr"])
        return loss

    def update(self, p: Any, grad: Any, state: Any, lr: float) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].mul_(0.9).add_(grad, alpha=0.1)
        p.add_(state["m"] * (p.norm() / (state["m"].norm() + 1e-6)), alpha=-lr)


class _Preconditions(_Scales):
    """By products of whole gradients, each of which is used more than once, as Shampoo."""

    def update(self, p: Any, grad: Any, state: Any, lr: float) -> None:
        grad = grad.reshape(len(p), -1)
        if not state:
            state["left"], state["columns"] = torch.eye(len(p)), torch.zeros(grad.shape[1])
        state["left"].add_(grad @ grad.T)
        state["columns"].add_((grad * grad).mean(0))
        p.add_((state["left"] @ grad / (state["columns"].sqrt() + 1)).view_as(p), alpha=-lr)


class Scales(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _Scales(self.parameters())


class Preconditions(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _Preconditions(self.parameters())


KINDS = (
    LogsNorms, HasNormsLogged, Averaged, LogsWeights, ClipsItself, Clamps, HalvesByHook, OnWeightOfRun, Gathers,
    Watches, Factors, Scales, Preconditions, Function,
)  # fmt: skip
_STAGES = [name for name, layout in LAYOUTS.items() if "pipeline_parallel_size" in layout]
_WHOLE = {Gathers, Scales, Preconditions}
"""A step that mixes samples, and optimizers that ask other stages, which a dry run can't."""
MISSED = {(Averaged, "fsdp_pipeline")}
"""Of which a dry run counts more than is sent: weights from stage to stage, for a copy of them that is in parts."""
ROWS = [(kind, name) for kind in KINDS for name in LAYOUTS if kind not in _WHOLE or name not in _STAGES]
ROWS = [row for row in ROWS if row not in MISSED]


def _run(kind: type[Model], layout: dict[str, Any]) -> Counted:
    torch.manual_seed(0)
    return trained(kind(), DataLoader([BATCH] * 16, batch_size=None), layout)  # type: ignore[arg-type]


@long(but=["Averaged-fsdp", "Factors-fsdp", "ClipsItself-1f1b", "Preconditions-fsdp"])
@slow(
    but=[
        "LogsNorms-fsdp",
        "LogsNorms-1f1b",
        "Averaged-fsdp",
        "ClipsItself-1f1b",
        "Factors-fsdp",
        "Factors-fsdp_tensor",
        "Watches-shard_residual",
        "Gathers-fsdp",
        "Preconditions-fsdp",
    ]
)
@pytest.mark.parametrize(("kind", "name"), ROWS, ids=[f"{kind.__name__}-{name}" for kind, name in ROWS])
def test_each_rank_holds_and_sends_what_was_said(kind: type[Model], name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    found = planner(kind)
    said = layout_dict(found.evaluate(layout, ranks_of(layout)))["ranks"]
    ranks = [Counted(one["parameters"], one["gradients"], one["optimizer"], one["sent"]) for one in said]
    lines = differences(pool.run(ranks_of(layout), _run, kind, layout), ranks)
    assert not lines, "\n" + "\n".join(lines)
    assert not any(note.startswith("not known") for note in found.notes)


class GoesByValues(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.up.weight.grad.norm() > 1:  # type: ignore[union-attr]
            self.up.weight.grad /= 2  # type: ignore[operator]


def test_what_a_dry_run_can_not_count_is_left_to_formulas_and_named() -> None:
    found, plain = planner(GoesByValues), planner(Model)
    ranks = [layout_dict(one.evaluate(LAYOUTS["fsdp"], 2))["ranks"] for one in (found, plain)]
    assert ranks[0] == ranks[1]
    (note,) = (x for x in found.notes if "what on_before_optimizer_step of the module sends" in x)
    assert "counted as if nothing (dry runs, which count it, were left out: of data 2 they raise ValueError" in note
    assert "test_around_steps.py:" in note


def test_what_would_take_long_is_left_to_formulas() -> None:
    found = planner(LogsNorms)
    found.dry_runs.left = 10
    layout_dict(found.evaluate(LAYOUTS["fsdp"], 2))
    assert any("were left out: of data 2 they would run " in note for note in found.notes)


def test_ranks_that_are_cut_alike_are_run_once() -> None:
    found = planner(LogsNorms)
    layout_dict(found.evaluate({"data_parallel_size": 8, "data_parallel": "fsdp"}, 8))
    assert found.dry_runs.counted == 1
    layout_dict(found.evaluate({"data_parallel_size": 5, "data_parallel": "fsdp"}, 5))
    assert found.dry_runs.counted == 1 + 5  # of 48, 96, 64 and 32 rows 3, 1, 4 and 2 ranks have one more
