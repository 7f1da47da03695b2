"""What can't be is refused at once, on all ranks, by a message with the user's own numbers and what to write instead.

Elsewhere: sizes (`test_layout`, `test_launch`), the other Lightning's strategy, failures of one rank (`test_launch`),
files that don't fit (`test_checkpoints`), optimizers (`test_optimizers`), plans without processes (`test_plan`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import TensorParallelStrategy
from lightning_par.mesh.ledger import ledger
from lightning_par.tensor import part as tensor_part
from tests.helpers.pool import Pool


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (layer(x).view(B, T, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class Net(LightningModule):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.attention = Attention(8, heads)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.score = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 8)

    def loss(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return self.score(x + self.down(F.gelu(self.up(self.norm(x))))).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class LeavesTorch(Net):
    """The recording ends before the first layer."""

    def loss(self, x: Tensor) -> Tensor:
        assert self.up.weight.data_ptr() != 0
        return super().loss(x)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8, sparse=True)


# What all ranks send each other in any case before there is a plan.
_BEFORE = ("weights", "generators", "plan", "batch")


def run(
    module: Callable[[], LightningModule],
    step: str = "fit",
    layout: dict[str, int] | None = None,
    strategy: TensorParallelStrategy | None = None,
    **options: Any,
) -> tuple[str, int]:
    """What was raised, and the bytes sent on the axes by then but for the weights."""
    with warnings.catch_warnings(), ledger() as moved:
        warnings.simplefilter("ignore")
        try:
            trainer = Trainer(
                accelerator="cpu",
                devices=int(os.environ["WORLD_SIZE"]),
                strategy=strategy or TensorParallelStrategy(**(layout or dict(tensor_parallel_size=2)), **options),
                max_steps=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            getattr(trainer, step)(module(), DataLoader(torch.ones(4, 5, 8), batch_size=2))  # type: ignore[arg-type]
        except Exception as error:
            sent = sum(t.nbytes for t in moved.transfers if t.purpose not in _BEFORE)
            return f"{type(error).__name__}: {error}", sent
    return "", 0


REFUSED: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], list[str]]] = {
    "sizes": (Net, dict(layout=dict(tensor_parallel_size=3)), ["tensor_parallel_size=3", "2 processes"]),
    "unknown style": (
        Net,
        dict(plan={"up": "columns"}),
        ["ValueError: plan['up'] = 'columns' is no known style. Write one of 'colwise', 'rowwise', 'replicate'."],
    ),
    "style of another kind": (Net, dict(plan={"up": None}), ["plan['up'] = None is no known style"]),
    "no dict": (Net, dict(plan=["up"]), ["TypeError: plan must be a dict", "got list"]),
    "no match": (
        Net,
        dict(plan={"atention.q": "colwise"}),
        ["plan['atention.q'] matches no module and no parameter of Net", "Did you mean 'attention.q'"],
    ),
    "a vector": (
        Net,
        dict(plan={"norm": "colwise"}),
        ["plan['norm'] = 'colwise' matches vectors alone: norm.weight, norm.bias", "write 'replicate'"],
    ),
    "one feature": (Net, dict(plan={"score": "colwise"}), ["score.weight (1, 8) to be colwise over 2 ranks"]),
    "not in the step": (
        Net,
        dict(plan={"unused": "colwise"}),
        ["unused.weight (8, 8) to be colwise over 2 ranks", "the step does not use it", "leave it out of the plan"],
    ),
    "not recorded": (
        LeavesTorch,
        dict(plan={"up": "colwise"}),
        ["up.weight (16, 8) to be colwise over 2 ranks", "could not be recorded", "test_bad_input.py"],
    ),
    "sparse gradients over replicas": (
        Sparse,
        dict(layout=dict(tensor_parallel_size=1)),
        ["'table' is an Embedding with sparse=True", "sparse=False"],
    ),
}


def _refused(name: str) -> tuple[str, int]:
    module, options, _ = REFUSED[name]
    return run(module, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_on_all_ranks_before_any_waits(name: str, pool: Pool) -> None:
    (first, sent), (second, also_sent) = pool.run(2, _refused, name)
    assert first == second
    for part in REFUSED[name][2]:
        assert part in first
    assert sent == also_sent == 0


def test_styles_are_checked_when_the_strategy_is_made() -> None:
    with pytest.raises(ValueError, match=r"plan\['a'\] = 'colwize' is no known style"):
        TensorParallelStrategy(plan={"a": "colwize"})
    with pytest.raises(TypeError, match=r"plan\[3\]: a name or a pattern must be a str, not int"):
        TensorParallelStrategy(plan={3: "colwise"})  # type: ignore[dict-item]


def _plan_of_unused() -> tuple[str, int]:
    return run(Net, "validate", plan={"unused": "colwise", "up": "colwise"})


def test_a_layer_that_only_training_uses_may_be_in_the_plan_of_a_validation(pool: Pool) -> None:
    assert [error for error, _ in pool.run(2, _plan_of_unused)] == ["", ""]


def _one_head() -> str:
    return run(lambda: Net(heads=1), strategy=TensorParallelStrategy(plan={"attention.q": "colwise"}))[0]


def test_one_head_that_the_plan_splits_is_refused(pool: Pool) -> None:
    first, second = pool.run(2, _one_head)
    assert first == second
    assert "attention.q.weight (8, 8) to be colwise over 2 ranks" in first and "its 1 head of 8 features" in first


def _failing_plan() -> tuple[str, int]:
    with mock.patch.object(tensor_part, "make_plan", side_effect=NotImplementedError("a case not thought of")):
        return run(Net)


def test_whatever_fails_on_the_planning_rank_ends_all_ranks(pool: Pool) -> None:
    first, second = (error for error, *_ in pool.run(2, _failing_plan))
    assert first == "NotImplementedError: a case not thought of"
    assert second == "ValueError: NotImplementedError('a case not thought of') on rank 0"


class Wrong(Net):
    def configure_optimizers(self) -> Any:
        return "sgd"


def _no_optimizer() -> tuple[str, int]:
    return run(Wrong)


def test_what_is_no_optimizer_is_refused_by_lightning(pool: Pool) -> None:
    assert all("MisconfigurationException" in error or "Unknown" in error for error, *_ in pool.run(2, _no_optimizer))
