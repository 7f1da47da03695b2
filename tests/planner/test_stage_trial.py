"""A plan offers no pipeline that a run would refuse, and says why in the run's words."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par import dry_run, plan
from lightning_par.pipeline.trial.samples import by_sample
from lightning_par.planner.layouts import pipelines
from tests.helpers.slow import long, slow

PIPE = {"pipeline_parallel_size": 2, "microbatches": 4}
BATCH = torch.ones(8, 16)


class Plain(L.LightningModule):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), *inner, nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 8))

    def training_step(self, batch: Tensor) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Norm(Plain):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(32))


class Pairs(Plain):
    def training_step(self, batch: Tensor) -> Any:
        x = F.normalize(self.net(batch), dim=-1)
        return F.cross_entropy(x @ x.t(), torch.arange(len(batch)))


class Spread(Plain):
    def training_step(self, batch: Tensor) -> Any:
        return self.net(batch).std(0).mean()


class ByNorm(Plain):
    def training_step(self, batch: Tensor) -> Any:
        loss = super().training_step(batch)
        return loss / 2 if loss.item() > 100 else loss


class ByIterator(Plain):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0])


class Masked(Plain):
    """Goes by what a buffer holds, and a tensor that is none."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(nn.GroupNorm(4, 32))
        self.register_buffer("mask", torch.arange(16) > 3)
        self.rates = torch.linspace(0.1, 1, 16)

    def training_step(self, batch: Tensor) -> Any:
        return super().training_step(batch * self.mask * self.rates if self.mask.any() else batch)


MIXES = [Norm, Pairs, Spread, ByNorm]


def refusal(call: Any, *args: Any, **asked: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **asked)
    return str(caught.value)


@long("ByNorm")
@slow("Pairs", "Spread", "Norm")
@pytest.mark.parametrize("kind", [*MIXES, ByIterator], ids=lambda kind: kind.__name__)
def test_a_layout_that_a_run_refuses_is_refused_in_its_words(kind: type[Plain]) -> None:
    said = refusal(plan, kind, BATCH, "2xH100", devices=2, layout=PIPE)
    assert said == refusal(dry_run, kind, BATCH, PIPE, devices=2)


@slow("ByNorm", "Pairs")
@pytest.mark.parametrize("kind", MIXES, ids=lambda kind: kind.__name__)
def test_left_to_itself_a_batch_stays_whole(kind: type[Plain]) -> None:
    found = plan(kind, BATCH, "2xH100", devices=2, layout={"pipeline_parallel_size": 2})
    assert found.layouts[0].candidate.microbatches == 1
    (note,) = (note for note in found.notes if note.startswith("microbatches=1: "))
    assert "samples need one another: " in note


@slow("Norm")
@pytest.mark.parametrize("kind", [Norm, Pairs], ids=lambda kind: kind.__name__)
def test_a_search_offers_no_microbatches_where_samples_mix(kind: type[Plain]) -> None:
    found = plan(kind, BATCH, "2xH100", devices=2)
    counts = {one.candidate.microbatches for one in found.layouts if one.candidate.layout.pipeline > 1}
    assert counts == {1}
    assert any("samples need one another: " in one.reason for one in found.ruled_out)


@long()
@slow("Plain")
@pytest.mark.parametrize("kind", [Plain, Masked], ids=lambda kind: kind.__name__)
def test_microbatches_of_samples_that_do_not_mix_are_offered(kind: type[Plain]) -> None:
    found = plan(kind, BATCH, "2xH100", devices=2, global_batch=8)
    assert any(one.candidate.microbatches > 1 for one in found.layouts)
    assert plan(kind, BATCH, "2xH100", devices=2, layout=PIPE).layouts[0].candidate.microbatches == 4
    assert not any("not known" in note for note in found.notes)


def test_a_batch_of_one_sample_is_asked_with_one_more() -> None:
    asked: dict[str, Any] = {"devices": 2, "layout": PIPE, "global_batch": 4}
    assert "`matmul` needs the samples of a batch together" in refusal(plan, Pairs, BATCH[:1], "2xH100", **asked)
    assert plan(Plain, BATCH[:1], "2xH100", **asked).layouts[0].candidate.microbatches == 4


class Tied(Plain):
    """Writes into a weight that its first and its last layer have, which are on one rank under zbv alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32), nn.Linear(32, 32))
        self.first, self.last = (nn.Linear(16, 16, bias=False) for _ in range(2))
        self.net[-1] = nn.Linear(32, 16)
        self.last.weight = self.first.weight

    def training_step(self, batch: Tensor) -> Any:
        x = self.net(self.first(batch))
        with torch.no_grad():
            self.last.weight.mul_(0.5)
        return self.last(x).square().mean()


@long()
def test_each_schedule_is_asked_of_the_trial() -> None:
    found = plan(Tied, BATCH, "2xH100", devices=2)
    listed = {one.candidate.schedule for one in found.layouts if one.candidate.layout.pipeline > 1}
    assert listed == {"zbv"}
    asked = {"pipeline_parallel_size": 2, "microbatches": 1}
    for schedule in ("1f1b", "interleaved_1f1b"):
        with pytest.raises(NotImplementedError, match="training_step runs layer by layer") as said:
            dry_run(Tied, BATCH, {**asked, "schedule": schedule}, devices=2)
        reasons = [one.reason for one in found.ruled_out if one.layout == f"pipeline 2, {schedule}"]
        assert any(str(said.value).endswith(reason) for reason in reasons)
    assert dry_run(Tied, BATCH, {**asked, "schedule": "zbv"}, devices=2).parameters > 0


def test_of_a_large_step_what_the_best_is_refused_for_holds_for_more_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "MOST_TRIED", 0)
    found = plan(Tied, BATCH, "2xH100", devices=2)
    assert all(one.candidate.layout.pipeline == 1 for one in found.layouts)
    (reason,) = (one.reason for one in found.ruled_out if one.layout == "pipeline in 2 stages and more")
    assert "the step writes into 'first.weight'" in reason


class OfOne(Plain):
    def training_step(self, batch: Tensor) -> Any:
        if len(batch) > 1:
            raise KeyError("one by one")
        return super().training_step(batch)


def test_what_could_not_be_found_out_is_said() -> None:
    found = plan(OfOne, BATCH[:1], "2xH100", devices=2, layout=PIPE, global_batch=4)
    (note,) = (note for note in found.notes if note.startswith("not known: "))
    assert "KeyError: 'one by one' at " in note


class Sorts(nn.Module):
    """Acts on each sample by itself, as a trial with values shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return self.layer(x[order])[order.argsort()]


class Sorted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), Sorts(), nn.Linear(16, 8))


@slow("asked")
@pytest.mark.parametrize("layout", [PIPE, {"pipeline_parallel_size": 2}], ids=["asked", "auto"])
def test_what_takes_too_much_memory_to_find_out_is_said(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not plan(Sorted, BATCH, "2xH100", devices=2, layout=layout).notes
    monkeypatch.setattr(by_sample, "_MOST_IN_PLAN", 100)
    (note,) = plan(Sorted, BATCH, "2xH100", devices=2, layout=layout).notes
    assert note.startswith("not known: ") and "whether a Sorts of 272 weights acts on each sample by itself" in note


@slow("bf16-true")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_in_half_precision_as_well(precision: str) -> None:
    asked: dict[str, Any] = {"devices": 2, "layout": PIPE, "precision": precision}
    assert not plan(Masked, BATCH, "2xH100", **asked).notes
    assert "samples of a batch need one another" in refusal(plan, Spread, BATCH, "2xH100", **asked)


def test_samples_may_be_batches_of_their_own_where_that_is_asked() -> None:
    layout = {**PIPE, "allow_batch_coupling": True}
    assert plan(Norm, BATCH, "2xH100", devices=2, layout=layout).layouts[0].candidate.microbatches == 4


class Attends(L.LightningModule):
    """Of two stages the first ends with queries, which are whole on the second, where keys are split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up2, self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(6))

    def training_step(self, batch: Tensor) -> Any:
        x = self.up2(self.up(batch).relu()).relu()
        q, k, v = (layer(x).view(*x.shape[:2], 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean()


def test_what_would_gather_in_a_run_is_not_told_as_if_one_were_on(caplog: pytest.LogCaptureFixture) -> None:
    layout = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    assert plan(Attends, torch.ones(8, 6, 16), "4xH100", devices=4, layout=layout).layouts
    assert not [one for one in caplog.records if one.name.startswith("lightning_par")]
