"""What is larger than what it is made of, and of no parameter, has no values in a plan; in a run's trial it has."""

from __future__ import annotations

import resource
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par import plan
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.trial.analysis_run import AnalysisRun
from lightning_par.private.fake_tensors import FakeTensor, FakeTensorMode
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.trial import large_values
from lightning_par.trial.guesses import Guesses
from lightning_par.trial.large_values import LargeAsFakes, content_of, is_large, note_made
from lightning_par.trial.step import Step
from lightning_par.trial.trial_run import record_step
from tests.helpers.pool import Pool

HUGE = 1 << 20  # of so many rows and columns a mask takes a terabyte


class Masked(nn.Module):
    """Attends by a mask that it makes."""

    def __init__(self, size: int, looks: bool = False) -> None:
        super().__init__()
        self.size, self.looks, self.layer, self.out = size, looks, nn.Linear(4, 4), nn.Linear(4, 4)

    def mask(self) -> Tensor:
        places = torch.arange(self.size)
        return torch.ones(self.size, self.size, dtype=torch.bool).tril() & (places[:, None] - places < 7)

    def training_step(self, batch: Tensor) -> Tensor:
        x, mask = self.layer(batch), self.mask()
        if self.looks and not mask.any():
            raise ValueError("nobody sees anything")
        return self.out(F.scaled_dot_product_attention(x, x, x, attn_mask=mask)).square().mean()


def test_it_is_fake_and_what_is_made_of_it_too() -> None:
    with LargeAsFakes(FakeTensorMode(allow_non_fake_inputs=True)):
        small, large = torch.ones(8, 8).tril(), torch.ones(HUGE, HUGE)
        made = large.tril()[:2]
    assert small.sum() == 36 and isinstance(made, FakeTensor) and made.shape == (2, HUGE)


def test_what_is_no_larger_than_what_it_is_made_of_has_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "LARGEST", 4)
    images = torch.ones(8, 8)
    with LargeAsFakes(FakeTensorMode(allow_non_fake_inputs=True)):
        assert (images * 2 - 1).sum() == 64 and (images > 0).nonzero().shape == (64, 2)
        assert images.expand(10, 8, 8).sum() == 640 and images.add_(1).mean() == 2
        assert isinstance(images.repeat(2, 1), FakeTensor) and isinstance(torch.ones(1).new_ones(2, 4), FakeTensor)
        assert isinstance(F.one_hot(torch.arange(3), 3), FakeTensor) and F.one_hot(torch.arange(2), 2).sum() == 2


def test_a_large_value_that_one_of_the_model_is_written_into_is_one_of_the_model() -> None:
    with FakeTensorMode() as mode:
        large, other = torch.ones(8), torch.ones(8)
    del mode
    note_made(large, [], "ones")
    assert is_large(large[:2]) and content_of(large) == "ones" and not is_large(other)
    note_made(large, (large, other))
    assert not is_large(large)


def test_a_step_with_a_huge_mask_is_recorded_for_a_plan() -> None:
    found = record_step(Masked(HUGE), "training_step", torch.ones(1, 1, HUGE, 4), planned=True)
    assert found.is_whole and found.events[-2].name != "any"


@pytest.mark.parametrize("planned", [False, True], ids=["run", "plan"])
def test_what_reads_it_goes_by_a_guess_in_a_plan_alone(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "LARGEST", 16)
    found = record_step(Masked(8, looks=True), "training_step", torch.ones(1, 1, 8, 4), planned=planned)
    assert found.is_whole and bool(found.patterns) is planned


@pytest.mark.parametrize("looks", [False, True], ids=["plain", "looks"])
@pytest.mark.parametrize("planned", [False, True], ids=["run", "plan"])
def test_a_pipeline_has_it_computed_in_a_run(planned: bool, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch, untried = Masked(8, looks), torch.ones(2, 1, 8, 4), []
    step = Step(module, "training_step", batch, (), nullcontext, True, torch.device("cpu"))
    plain, _ = AnalysisRun(step, Stages({}, (0,))).explored()
    monkeypatch.setattr(large_values, "LARGEST", 16)
    asked = AnalysisRun(replace(step, untried=untried if planned else None), Stages({}, (0,)))
    if planned and looks:  # by a guess the user's code raises first
        with pytest.raises(ValueError, match="nobody sees"):
            asked.once(Guesses())
    run, _ = asked.explored()
    assert any(isinstance(x, FakeTensor) and is_large(x) for x in tensors_in(run.values.kept)) is planned
    assert [*map(str, run.seen())] == [*map(str, plain.seen())] and all(e.kind != "read" for e in run.events)
    assert all("what the step goes by at " in one for one in untried) and bool(untried) is (planned and looks)


class GPT(L.LightningModule):
    """Attends by a mask of the user's, of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 512), nn.Linear(512, 1000)
        self.blocks = nn.ModuleList(nn.Linear(512, 3 * 512) for _ in range(2))

    def training_step(self, batch: Tensor) -> Tensor:
        x, mask = self.embedding(batch), nn.Transformer.generate_square_subsequent_mask(batch.shape[1])
        for block in self.blocks:
            q, k, v = block(x).view(*batch.shape, 3, 8, 64).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _peak_of_plans() -> int:
    """KB that the process takes at most."""
    for layout in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "microbatches": 2}):
        plan(GPT, torch.zeros(2, 32_768, dtype=torch.long), "8xH100", devices=2, layout=layout).as_dict()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_plan_of_a_mask_of_32768_tokens_takes_little_memory(pool: Pool) -> None:
    assert pool.run_apart(_peak_of_plans) < 2_000_000  # the mask alone would take 4.3 GB


def test_what_a_known_mask_chooses_of_a_huge_value_takes_no_memory() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, HUGE)

        def training_step(self, batch: Tensor) -> Tensor:
            y, mask = self.layer(batch), batch[:, 0] > 0
            return y[mask].mean() + y[mask, :7].sum() + y[:, None][mask[:, None]].std()

    batch = torch.zeros(HUGE, 2).index_fill(0, torch.arange(0, HUGE, 2), 1.0)
    found = record_step(Chooses(), "training_step", batch)
    assert found.is_whole, found.stopped
    chosen = [tuple(e.result.shape) for e in found.events if e.name == "__getitem__" and e.result.requires_grad]
    assert chosen == [(HUGE // 2, HUGE), (HUGE // 2, 7), (HUGE, 1, HUGE), (HUGE // 2, HUGE)]
