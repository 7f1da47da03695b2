"""Layers whose functions need samples together are cut into microbatches where the layer doesn't, and only there."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.fake_step import FakeRun
from lightning_par.pipeline.trial.samples.by_sample import by_sample
from lightning_par.pipeline.trial.study import study
from lightning_par.trial.step import Step
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.law.found import Base, C

EXPERTS, EACH = 4, 2


class Experts(nn.Module):
    """Looks for each expert's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(C, EXPERTS)
        self.weight = nn.Parameter(0.3 * torch.randn(EXPERTS, C, C))

    def route(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = self.gate(x_TC).softmax(-1).topk(EACH, -1)
        return weights_TK, experts_TK

    def forward(self, x: Tensor) -> Tensor:
        x_TC = x.reshape(-1, C)
        weights_TK, experts_TK = self.route(x_TC)
        y_TC = torch.zeros_like(x_TC)
        for expert in range(EXPERTS):
            tokens, places = torch.where(experts_TK == expert)
            y_TC = y_TC.index_add(0, tokens, x_TC[tokens] @ self.weight[expert] * weights_TK[tokens, places, None])
        return y_TC.reshape(x.shape)


class Dropping(Experts):
    """Drops the tokens beyond what an expert takes, the last ones first."""

    def __init__(self, takes: int) -> None:
        super().__init__()
        self.takes = takes

    def forward(self, x: Tensor) -> Tensor:
        x_TC = x.reshape(-1, C)
        weights_TK, experts_TK = self.route(x_TC)
        chosen = F.one_hot(experts_TK.reshape(-1), EXPERTS)
        place_TK = (chosen.cumsum(0) - 1).gather(1, experts_TK.reshape(-1, 1)).reshape(experts_TK.shape)
        weights_TK = weights_TK * (place_TK < self.takes)
        y_TC = torch.einsum("tc,tkcd,tk->td", x_TC, self.weight[experts_TK], weights_TK)
        return y_TC.reshape(x.shape)


class Sorts(nn.Module):
    """Sorts samples, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(C, C, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()
        return self.rnn(x[order])[0][order.argsort()]


class OfOne(nn.Module):
    """One linear layer, of which subclasses make what they will."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)


class TakesSome(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        taken, y = x.sum(-1) > 0, x.clone()
        y[taken] = self.linear(x[taken])
        return y


class TakesSomeLessTheirMean(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        taken, y = x.sum(-1) > 0, x.clone()
        z = self.linear(x[taken])
        y[taken] = z - z.mean(0)
        return y


class ByRank(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        ranks = x.sum((1, 2)).argsort().argsort()
        return self.linear(x) * (1 + ranks[:, None, None] / len(x))


class BeyondALimit(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / x.abs().max().clamp(min=1e9)


class InGradientsAlone(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0, keepdim=True) ** 2
        return self.linear(x) + mean - mean.detach()


class Shuffles(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[torch.randperm(len(x))])


class DecidesByAValue(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()
        if x.sum() > 1e20:
            x = x - x.mean(0)
        return self.linear(x[order])[order.argsort()]


class WithAFactorOfZero(OfOne):
    """The factor is another one later."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {"mean": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()
        y = self.linear(x[order]) + self.factors["mean"] * x.transpose(0, 1).mean(1)
        return y[order.argsort()]


class ReplacesWhatIsMissing(WithAFactorOfZero):
    """So that NaN does not show that it mixes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num())


class IfNothingIsMissing(OfOne):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(x == 777.0, torch.nan, x)
        return self.linear(torch.where(torch.isfinite(x).all(), x, 0.0))


class Counts(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        self.load += torch.bincount(self.route(x.reshape(-1, C))[1].reshape(-1), minlength=EXPERTS)
        return super().forward(x)


def _study(layer: nn.Module) -> Any:
    torch.manual_seed(0)
    module = Base()
    module.a = layer  # type: ignore[assignment]
    batch = [torch.randn(4, 6, C), torch.randint(0, 4, (4,))]
    step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
    return study(step, Stages({"a": (0,), "b": (1,)}, at=(0, 1)), 2)


@pytest.mark.parametrize("make", [Experts, Sorts, TakesSome])
def test_a_layer_that_acts_by_sample_is_cut(make: Any) -> None:
    assert _study(make()).microbatches == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dropping(9),
        TakesSomeLessTheirMean,
        ByRank,
        BeyondALimit,
        InGradientsAlone,
        Shuffles,
        Counts,
        DecidesByAValue,
        WithAFactorOfZero,
        ReplacesWhatIsMissing,
        IfNothingIsMissing,
    ],
)
def test_a_layer_that_mixes_samples_is_not(make: Any) -> None:
    with pytest.raises(SamplesMixError):
        _study(make())


def test_a_layer_with_a_hook_is_not() -> None:
    """It would meet microbatches."""
    layer = Experts()
    layer.gate.register_forward_hook(lambda *_: None)
    with pytest.raises(SamplesMixError):
        _study(layer)


def test_a_layer_that_is_given_no_tensor_is_not_tried() -> None:
    """As a graph network is, whose batch is an object of its own."""
    assert by_sample(FakeRun(FakeTensorMode(), None), nn.Linear(C, C), Sorts, (object(),), {}) is NotImplemented


class Biased(Experts):
    """Its experts are chosen by a buffer, too, which the ranks of other stages don't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.linspace(0, 1, EXPERTS))

    def route(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = self.gate(x_TC).sigmoid()
        experts_TK = (scores_TE + self.bias).topk(EACH, -1)[1]
        return scores_TE.gather(1, experts_TK), experts_TK


class Numbered(Biased):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.arange(EXPERTS).flip(0))

    def route(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = super().route(x_TC)
        return weights_TK, self.number[experts_TK]


class Chooses(OfOne):
    """Features, by a buffer: how many they are is told by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, C)
        self.register_buffer("chosen", torch.arange(C) % 8 > 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[..., self.chosen])


class Ages(OfOne):
    """Does something else from its third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("age", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.age += 1
        return torch.cat([y, y], -1)[..., 4 : 4 + C] if self.age > 2 else y


class First(Base):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.a = layer  # type: ignore[assignment]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def _train(make: Callable[[], nn.Module], strategy: str) -> Any:
    torch.manual_seed(0)
    module = First(make())
    generator = torch.Generator().manual_seed(1)
    batches = [[torch.randn(B, T, C, generator=generator)] for B, T in ((4, 6), (4, 5), (3, 6), (4, 6))]
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_epochs=1,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    predictions = trainer.predict(module, DataLoader(batches, batch_size=None))
    return [p.detach().clone() for p in module.parameters()], predictions


@long()
@slow("Biased", "Numbered", "Chooses")
@pytest.mark.parametrize("make", [Biased, Numbered, Chooses, Ages])
def test_what_other_ranks_hold_decides_alike_on_all_when_a_later_batch_is_another(
    make: Callable[[], nn.Module], pool: Pool
) -> None:
    ((weights, predictions),) = pool.run(1, _train, make, "auto")
    for found, predicted in pool.run(2, _train, make, "pipeline_parallel", timeout=60):
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-9)
        torch.testing.assert_close(predicted, predictions, rtol=0, atol=1e-9)


class Splits(Experts):
    def forward(self, x: Tensor) -> Tensor:
        x_TC = x.reshape(-1, C)
        counts = torch.bincount(self.route(x_TC)[1][:, 0], minlength=EXPERTS).tolist()
        return torch.cat([part @ w for part, w in zip(x_TC.split(counts), self.weight, strict=True)]).reshape(x.shape)


def test_sizes_that_go_by_values_of_the_model_are_refused_for_that_reason() -> None:
    with pytest.raises(
        ValueError, match="in a trial run of training_step: .*reads a value of the model, which is made"
    ):
        _study(Splits())
