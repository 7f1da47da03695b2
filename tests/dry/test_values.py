"""What depends on the batch alone has its values in a dry run; what meets weights has none."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import dry_run
from lightning_par.dry.values import KnownValues
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.wire import PeerOp
from lightning_par.private.fake_tensors import WITHOUT_VALUE, FakeTensor, FakeTensorMode
from lightning_par.trial import large_values
from lightning_par.trial.known_values import is_known, times_written


class Reads(L.LightningModule):
    """Goes by values of the batch and of a buffer, in all the ways that code has."""

    found: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Tensor) -> Tensor:
        self.steps += 1
        mask = batch > 0
        if mask.all() or not mask.any():
            raise AssertionError("the batch has other values")
        rows = mask.any(-1).nonzero().flatten()
        longest = int(mask.sum(-1).max())
        self.found.append((rows.tolist(), longest, self.steps.item(), mask.numpy().sum()))
        return self.layer(batch[rows])[:, :longest].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCH = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])


@pytest.mark.parametrize("layout", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["data", "tensor"])
def test_values_of_the_batch_are_read(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reads, "found", [])
    given = BATCH.clone()
    found = dry_run(Reads, given, layout, devices=2)
    assert Reads.found[-2:] == [([0, 2], 3, 1, 5), ([0, 2], 3, 2, 5)]
    assert found.parameters > 0 and torch.equal(given, BATCH)


def test_what_a_fake_is_written_into_has_no_values_any_more() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.empty(4)
        with KnownValues(mode):
            x = torch.zeros(2, 4)
            row, other = x[0], torch.arange(4) + 1
            assert other.sum().item() == 10 and (fake * other).shape == (4,)
            row.add_(fake)
            assert not is_known(x) and not is_known(row) and is_known(other)
            with pytest.raises(WITHOUT_VALUE):
                x.sum().item()
        assert isinstance(fake, FakeTensor)


def test_writes_are_counted_whether_values_are_known_or_not() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.zeros(2)
    real = torch.zeros(2)
    with mode, KnownValues(mode):
        for x in (fake, real):
            before = times_written(x)
            x[0].mul_(2)
            assert times_written(x) == before + 1
            x + 1
            x.detach()
            assert times_written(x) == before + 1


def test_what_makes_the_same_shapes_of_any_values_needs_none() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, rows = torch.zeros(8, dtype=torch.long), torch.empty(2, 3, 4)
        with KnownValues(mode):
            counts, packed = (
                torch.bincount(fake, minlength=4),
                nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([3, 1]), batch_first=True),
            )
            assert isinstance(counts, FakeTensor) and counts.shape == (4,)
            assert packed.data.shape == (4, 4) and packed.batch_sizes.tolist() == [2, 1, 1]
            for func in (torch.bincount, torch.unique, torch.nonzero):
                with pytest.raises(WITHOUT_VALUE):
                    func(fake)


def test_large_tensors_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "LARGEST", 1000)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues(mode):
        x = torch.arange(100)
        assert isinstance(x[:, None] == x, FakeTensor) and isinstance(torch.zeros(2000), FakeTensor)
        assert int((x[:, None] > 3).sum()) == 96


def test_what_would_have_come_from_others_has_no_values() -> None:
    axis = Axis("data", (0, 1), 0, None)
    axis.dry = True
    summed, largest, came, sent = (torch.ones(2) for _ in range(4))
    axis.broadcast_(sent, "batch")  # it is a batch's, before fakes begin
    with FakeTensorMode(allow_non_fake_inputs=True):
        axis.all_reduce_(summed, "x")
        axis.all_reduce_(largest, "x", "max")
        axis.start_exchange([PeerOp("recv", came, 1, "x"), PeerOp("send", sent, 1, "x")])
    assert [is_known(x) for x in (summed, largest, came, sent)] == [False, True, False, True]
