"""What a recorded run tells a pipeline is what a run for the pipeline alone would."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from lightning_par.pipeline.plan.units import walk
from lightning_par.pipeline.trial.study import survey
from lightning_par.pipeline.trial.surveyor import Surveyor
from lightning_par.trial.step import Step
from lightning_par.trial.trial_run import record_step
from tests.helpers.torch_version import VERSION

C, SAMPLES, TOKENS = 8, 4, 6


class Layers(nn.Module):
    """Layers of each kind whose calls a survey sees; ``middle`` runs between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, C)
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, 16)

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        return h

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mask = torch.ones(len(batch), 1, 1) * (batch != 3)[..., None]
        h = self.middle(self.a(self.embed(batch)) * mask, batch)
        return nn.functional.cross_entropy(self.b(h).flatten(0, 1), batch.roll(-1, 1).flatten())


class Attends(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(C, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(C, 2, batch_first=True)

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        h = self.layer(h, src_key_padding_mask=batch == 0)
        return h + self.attention(h, h, h, need_weights=False)[0]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, h: Tensor) -> Tensor:
        h = self.first(h)
        return self.second(h) if h.sum() > 0 else self.second(-h)


class ReadsWithin(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        return self.reads(h)


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, h: Tensor) -> Tensor:
        h = self.first(h)
        return h + self.second(h.flatten(0, 1)[torch.nonzero(h[..., 0].flatten() > 0).flatten()]).mean()


class PicksWithin(ReadsWithin):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Picks()  # type: ignore[assignment]


class Normalizes(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(C), nn.Conv1d(C, C, 3, padding=1))
        self.rnn = nn.LSTM(C, C, batch_first=True)

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        return self.rnn(self.norm(h.transpose(1, 2)).transpose(1, 2).type_as(h))[0]


class Measures(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(16)

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        self.accuracy.update(h.mean(-1).flatten(), batch.flatten())
        return h + self.accuracy(h.flatten(0, 1).sum(-1), batch.flatten()) * self.accuracy.compute()


class Recomputes(Layers):
    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        found = checkpoint(lambda x: self.a(x).relu(), h, use_reentrant=False)
        return found  # type: ignore[no-any-return]


class Writes(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        self.seen.index_add_(0, batch.flatten(), torch.ones(batch.numel()))  # type: ignore[operator]
        empty = torch.zeros(h.shape)
        empty[:, 0] = h[:, 0]
        h = h.clone()
        h[:, 1] += empty[:, 0]
        return h


class Draws(Layers):
    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.1) + torch.rand(len(batch), 1, 1) + h.detach().mean().item()


KINDS = (Layers, Attends, ReadsWithin, PicksWithin, Normalizes, Measures, Recomputes, Writes, Draws)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_run_tells_a_pipeline_what_its_own_would(kind: Any) -> None:
    if VERSION < (2, 12) and kind is Recomputes:
        pytest.skip("torch 2.11's checkpoint makes a tensor of no entries, which is looked at in one of the two alone")
    torch.manual_seed(0)
    module, batch = kind(), torch.randint(0, 16, (SAMPLES, TOKENS))
    step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
    own = survey(step)
    heard = record_step(module, "training_step", batch, listeners=lambda: Surveyor(SAMPLES)).heard
    assert heard.samples == own.samples
    assert [(seen.what, seen.place) for seen in heard.functions] == [(seen.what, seen.place) for seen in own.functions]
    assert all(one.shapes == other.shapes for one, other in zip(heard.functions, own.functions) if other.shapes)
    assert heard.calls == own.calls
    for one, other in zip(walk(heard.root), walk(own.root), strict=True):
        assert (one.path, one.numel, one.closed) == (other.path, other.numel, other.closed)
        assert one.flops == pytest.approx(other.flops, rel=0.01) and one.nbytes == pytest.approx(other.nbytes, rel=0.05)


def test_a_step_that_asks_for_gradients_runs_for_the_pipeline_itself() -> None:
    class Penalty(Layers):
        def middle(self, h: Tensor, batch: Tensor) -> Tensor:
            return h + torch.autograd.grad(self.a(h).sum(), h, create_graph=True)[0]

    listeners = lambda: Surveyor(SAMPLES)  # noqa: E731
    batch = torch.randint(0, 16, (SAMPLES, TOKENS))
    recording = record_step(Penalty(), "training_step", batch, listeners=listeners)
    assert recording.stopped is None and recording.heard is None


def test_a_step_that_stops_tells_nothing() -> None:
    class Stops(Layers):
        def middle(self, h: Tensor, batch: Tensor) -> Tensor:
            raise RuntimeError("no further")

    batch = torch.randint(0, 16, (SAMPLES, TOKENS))
    recording = record_step(Stops(), "training_step", batch, listeners=lambda: Surveyor(SAMPLES))
    assert recording.stopped is not None and recording.heard is None


def test_a_survey_that_fails_does_not_stop_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surveyor, "charge", lambda *args: [][0])
    batch = torch.randint(0, 16, (SAMPLES, TOKENS))
    recording = record_step(Layers(), "training_step", batch, listeners=lambda: Surveyor(SAMPLES))
    assert recording.is_whole and recording.heard is None
