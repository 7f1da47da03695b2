"""Checks of all samples, and extremes over them, in steps whose batch is cut into microbatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import CLASSES, Points, check, trained, world_size


class Model(LightningModule):
    """``kind`` looks between its two parts, or behind them, at all samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.head = nn.Linear(CLASSES, CLASSES)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        kind, h = self.kind, self.encoder(x)
        mean, spread = h.chunk(2, -1)
        scale = F.softplus(spread) + 0.1
        between = torch.zeros(())
        if kind == "validated":
            q = Normal(mean, scale, validate_args=True)
            mean, between = q.mean, kl_divergence(q, Normal(0.0, 1.0)).mean()
        elif kind == "finite":
            assert torch.isfinite(h).all()
            if torch.isnan(h).any(1).any():
                raise ValueError("not a number")
        elif kind == "turned":
            assert (~(~torch.isfinite(h).all())).item()
        elif kind == "one of each sample":
            assert (h > -1e9).any(1).all()
        elif kind == "below":
            assert h.abs().max() < 1e9 and 1e9 >= h.detach().amax()
            if not (h.min() > -1e9):
                raise ValueError("too small")
        elif kind == "above":  # which a sample that is no number would hide
            if h.max() > 1e9:
                raise ValueError("too large")
        elif kind == "spread":
            assert h.max() < h.detach().min() + 1e9
        elif kind == "overwritten":
            bad = torch.isnan(h).any()
            bad |= h.detach().mean() > 1e9
            assert not bad
        elif kind == "one of all":  # which a microbatch may not have
            assert (h > -1e9).any()
        elif kind == "all of one":  # likewise
            assert (h > -1e9).any(0).all()
        elif kind == "chooses":
            mean = mean if torch.isfinite(h).all() else spread
        elif kind == "used":
            mean = mean * torch.isfinite(h).all()
        out = self.decoder(mean)
        if kind == "number":  # on the last stage, before its last layer
            self.log("mean", out.detach().mean().item())
        out = self.head(out)
        if kind == "likelihood":
            mean, spread = out[:, :3], out[:, 3:6]
            out = -Independent(Normal(mean, F.softplus(spread) + 0.1, validate_args=True), 1).log_prob(x[:, :3]).mean()
        elif kind == "categorical":
            out = -Categorical(logits=out, validate_args=True).log_prob(y).mean()
        else:
            if kind == "extreme":
                if out.abs().max() > 1e9 or out.detach().amin() < -1e9:
                    raise ValueError("too large")
                self.log("top", out.detach().max())
                self.log("any", (out.detach() > 0).any().double())
                self.seen.append(out.detach().amax())
            elif kind == "scaled":
                out = out / out.abs().max()
            out = F.cross_entropy(out, y)
        self.log("loss", out)
        return out + 0.1 * between

    def on_train_epoch_end(self) -> None:
        self.log("seen", torch.stack(self.seen).sum() if self.seen else 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def _loader() -> Any:
    return DataLoader(Points(), 4)


def _fit(kind: str) -> Any:
    return trained(Model(kind), _loader(), partial(PipelineParallelStrategy, microbatches=2, stages=["decoder"]))


@slow(but=["validated", "finite", "likelihood", "extreme"])
@pytest.mark.parametrize(
    "kind",
    ["validated", "finite", "turned", "one of each sample", "below", "likelihood", "categorical", "extreme"],
)
def test_a_check_of_all_samples_leaves_microbatches_apart(kind: str, pool: Pool) -> None:
    check(pool, _fit, kind)


WHY = {
    "above": "decides by a value of the whole batch",
    "number": "reads a value of the whole batch",
    "overwritten": "decides by a value of the whole batch",
    "spread": "decides by a value of the whole batch",
    "one of all": "decides by a value of the whole batch",
    "all of one": "decides by a value of the whole batch",
    "chooses": "decides by a value of the whole batch",
    "used": "'decoder' takes a sum or an extreme over the samples",
    "scaled": "the loss is no sum over samples",
}


@slow(but=["number", "overwritten", "all of one", "chooses", "scaled"])
@pytest.mark.parametrize("kind", WHY)
def test_what_one_microbatch_can_not_tell_is_refused(kind: str, pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=f"samples of a batch need one another: .*{WHY[kind]}"):
        pool.run(2, _fit, kind)


class Fails(Model):
    """From the second batch on one of the last samples is not what is asked for."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        h = self.encoder(x)
        wrong = (torch.arange(len(x)) == 3) & (batch_idx > 0)
        q = Normal(h, F.softplus(h) + 0.1 - 1e3 * wrong[:, None], validate_args=True)
        return F.cross_entropy(self.decoder(q.mean[:, :3]), y)


def _fails() -> None:
    trained(Fails(""), _loader(), partial(PipelineParallelStrategy, microbatches=2, stages=["decoder"]))
    assert world_size() > 1


def test_a_sample_that_fails_a_check_ends_the_run_with_the_users_error(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _fails)
    assert "ValueError: Expected parameter scale" in failed.value.reports[0]
