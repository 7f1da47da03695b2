"""A plan's module is as where its run begins: on a device, with a Trainer, set up, its optimizers made."""

from __future__ import annotations

import json
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import dry_run, plan
from lightning_par.planner.messages.dried import by_axis
from lightning_par.planner.recording.build import build_module
from lightning_par.planner.replay import replay_run
from lightning_par.planner.report import Plan
from lightning_par.private.fake_tensors import WITHOUT_VALUE
from lightning_par.trial.fake_functions import run_on_fakes
from tests.helpers.slow import long, slow

TENSOR = {"tensor_parallel_size": 2}


class Module(L.LightningModule):
    """Says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def training_step(self, batch: Tensor) -> Any:
        noise = torch.randn(len(batch), 8, device=self.device)
        return self.last(self.first(batch + noise)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class SetUp(Module):
    """Adds a layer in `setup`, and asks the Trainer there."""

    def setup(self, stage: str) -> None:
        assert self.trainer.world_size == 1 and stage == "fit"
        self.first = nn.Linear(8, 16, bias=self.trainer.max_epochs is None)


class Started(Module):
    """Goes by what a hook of the start of an epoch sets."""

    def on_train_epoch_start(self) -> None:
        self.scale = (self.current_epoch + 1) / self.trainer.max_epochs

    def training_step(self, batch: Tensor) -> Any:
        return super().training_step(batch) * self.scale * self.optimizers().param_groups[0]["lr"]


class Scheduled(Module):
    """Schedules over all steps of the Trainer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class Amsgrad(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), amsgrad=True)


class Groups(Module):
    """One layer has a momentum, the other one's bias no optimizer."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.first.parameters(), "momentum": 0.9}, {"params": [self.last.weight]}]
        return torch.optim.SGD(groups, 0.1)


class ByHand(Module):
    """Two optimizers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.first.parameters()), torch.optim.SGD(self.last.parameters(), 0.1)

    def training_step(self, batch: Tensor) -> Any:
        self.manual_backward(super().training_step(batch))
        for optimizer in self.optimizers():
            optimizer.step()


FIRST, LAST, ALL = 16 * 9, 8 * 17, 16 * 9 + 8 * 17


def planned(module: Any, **asked: Any) -> Plan:
    return plan(module, torch.zeros(4, 8), "4xH100", devices=2, **asked)


@pytest.mark.parametrize(
    ("kind", "parameters", "optimizer"),
    [
        (Module, ALL, 0),
        (SetUp, ALL - 16, 0),
        (Started, ALL, 0),
        (Scheduled, ALL, ALL),
        (Amsgrad, ALL, 3 * ALL + 4),  # and a count of steps for each
        (Groups, ALL, FIRST),
        (ByHand, ALL, 2 * FIRST + 2),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_rank_holds(kind: Any, parameters: int, optimizer: int, is_there: bool) -> None:
    found = planned(kind() if is_there else kind, layout={"data_parallel_size": 2})
    (rank, _) = found.as_dict()["layouts"][0]["ranks"]
    assert (rank["parameters"], rank["optimizer"]) == (4 * parameters, 4 * optimizer)
    assert not any("taken to be" in note for note in found.notes)


def test_a_module_that_is_there_is_not_set_up() -> None:
    module = SetUp()
    planned(module)
    assert module.first.bias is not None and module._trainer is None


def test_a_step_that_optimizes_by_hand_has_no_pipeline() -> None:
    found = planned(ByHand)
    assert any(one.reason.startswith("ByHand optimizes by hand") for one in found.ruled_out)
    assert all(one.candidate.layout.pipeline == 1 for one in found.layouts)
    with pytest.raises(ValueError, match="ByHand optimizes by hand"):
        planned(ByHand, layout={"pipeline_parallel_size": 2, "microbatches": 2})


class ByHandTwice(Module):
    """Runs backward for each of its optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.last(self.first(self.last(self.first(batch)))).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.first.parameters()), torch.optim.Adam(self.last.parameters())]


@long()
@slow("residual")
@pytest.mark.parametrize("layout", [TENSOR, TENSOR | {"shard_residual": True}], ids=["tensor", "residual"])
def test_what_backwards_send_that_the_step_runs_is_counted(layout: dict[str, Any]) -> None:
    batch = torch.ones(4, 8)
    sent = dry_run(ByHandTwice, batch, layout, devices=2).sent.items()
    found = plan(ByHandTwice, batch, "4xH100", devices=2, layout=layout)
    counted = by_axis(dict(sent))["tensor"]
    assert found.as_dict()["layouts"][0]["ranks"][0]["sent"]["tensor"] == counted > 0
    assert not found.notes


class Routed(Module):
    """Sends rows on by what weights make of them."""

    def training_step(self, batch: Tensor) -> Any:
        x = self.first(batch)
        chosen = (x.sum(1) > 0).nonzero().flatten()
        return self.last(x[chosen]).square().mean() if chosen.numel() else x.mean()


def test_lines_that_go_by_values_are_named() -> None:
    (note,) = plan(Routed, torch.ones(4, 8), "2xH100", devices=2, layout={"data_parallel_size": 2}).notes
    assert note.startswith("not known: the values that the step reads at ") and "test_run_setup.py:" in note


class Held(Module):
    """Goes by values that it holds beside weights: whether there are any, how many, which, and one of no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.times = torch.tensor(2)

    def training_step(self, batch: Tensor) -> Any:
        x = batch
        if self.mask.any():
            x = self.last(self.first(x))
        for _ in range(int(self.times.item())):
            x = self.last(self.first(x))
        return self.last(self.first(x[torch.arange(4)[self.mask]])).square().mean()


class Required(Held):
    """Raises where the values are others."""

    def training_step(self, batch: Tensor) -> Any:
        if self.times.tolist() != 2:
            raise ValueError("not two")
        return super().training_step(batch)


@long()
@slow("False-Held", "True-Required", "False-Required")
@pytest.mark.parametrize("kind", [Held, Required])
@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_module_holds_beside_weights_has_values(kind: Any, is_there: bool) -> None:
    found = plan(kind() if is_there else kind, torch.ones(4, 8), "4xH100", devices=2, layout=TENSOR)
    counted = sum(size for (axis, _), size in dry_run(kind, torch.ones(4, 8), TENSOR, devices=2).sent.items()
                  if axis == "tensor")  # fmt: skip
    assert not found.notes and found.as_dict()["layouts"][0]["ranks"][0]["sent"]["tensor"] == counted > 4 * 4 * 8 * 4


class Written(Held):
    """Goes by a value that it wrote in what it holds, which weights determine."""

    def training_step(self, batch: Tensor) -> Any:
        x = self.first(batch)
        self.mask[0] = x.detach().sum() > 0
        return self.last(x).square().mean() if self.mask.any() else x.mean()


def test_a_line_that_goes_by_what_was_written_in_a_buffer_is_named() -> None:
    (note,) = plan(Written, torch.ones(4, 8), "2xH100", devices=2, layout={"data_parallel_size": 2}).notes
    assert note.startswith("not known: the values that the step reads at ") and "test_run_setup.py:" in note


class Unasked(Module):
    def configure_optimizers(self) -> Any:
        raise KeyError("no rate")


def test_an_optimizer_that_is_not_known_is_noted_with_its_reason() -> None:
    (note,) = planned(Unasked).notes
    assert note.startswith("optimizer: taken to be AdamW, as configure_optimizers raises KeyError: 'no rate' at ")


class Broken(Module):
    def configure_model(self) -> None:
        raise KeyError("no width")


@slow("module")
@pytest.mark.parametrize("module", [Broken, Broken()], ids=["class", "module"])
def test_what_adds_modules_and_fails_is_told(module: Any) -> None:
    with pytest.raises(ValueError, match="The module can't be built: KeyError: 'no width' at .*test_run_setup.py"):
        planned(module)


class Packed(Module):
    """Sorts and packs its rows, whose lengths are in the batch."""

    def training_step(self, batch: Any) -> Any:
        rows, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(self.first(rows), lengths, batch_first=True, enforce_sorted=False)
        return self.last(packed.data).square().mean()


PACKED = torch.zeros(4, 5, 8), torch.tensor([5, 3, 2, 4])


def test_what_lengths_in_the_batch_tell_is_known() -> None:
    found = plan(Packed, PACKED, "4xH100", devices=2, layout=TENSOR)
    counted = sum(
        size for (axis, _), size in dry_run(Packed, PACKED, TENSOR, devices=2).sent.items() if axis == "tensor"
    )
    assert not found.notes and found.as_dict()["layouts"][0]["ranks"][0]["sent"]["tensor"] == counted > 0


@long()
def test_a_layout_of_which_values_decide_what_it_sends_is_ruled_out_by_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise WITHOUT_VALUE[0](torch.ops.aten._pack_padded_sequence.default)
        return run_on_fakes(mode, func, args, kwargs)

    monkeypatch.setattr(replay_run, "run_on_fakes", run)
    batch = PACKED
    found = plan(Packed, batch, "4xH100", devices=2)
    assert str(found)
    assert json.loads(found.json())["layouts"][0]["arguments"]["data_parallel_size"] == 2
    found = plan(Packed, batch, "4xH100", devices=2, layout=TENSOR)
    assert not found.as_dict()["layouts"] and "goes by values" in str(found)
    found = plan(Packed, batch, "4xH100", devices=2, global_batch=1)  # which replicas can't share
    assert found.chosen is None or "tensor" not in str(found.layouts[found.chosen].candidate.layout)
    assert any("goes by values" in one.reason for one in found.ruled_out)


class Texts(Module):
    """Its batch has texts beside tensors."""

    def training_step(self, batch: Any) -> Any:
        numbers = torch.tensor([len(text) for text in batch["text"]], device=self.device)
        return (self.last(self.first(batch["x"])) * numbers[:, None]).square().mean()


def test_texts_are_cut_with_the_tensors_of_a_batch() -> None:
    batch = {"x": torch.zeros(4, 8), "text": ["a", "bb", "c", "d"]}
    layout = {"pipeline_parallel_size": 2, "microbatches": 2}
    (one,) = plan(Texts, batch, "4xH100", devices=2, layout=layout).as_dict()["layouts"]
    assert one["sent"]["pipeline"] == 4 * 16 * 4


class NeedsADatamodule(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def setup(self, stage: str) -> None:
        self.count = len(self.trainer.datamodule.train)  # type: ignore[attr-defined]

    def training_step(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def test_a_setup_that_needs_what_a_run_alone_has_is_left_out_and_told() -> None:
    with pytest.warns(UserWarning, match=r"without its setup, which raises AttributeError: .* at .*test_run_setup.py"):
        assert next(build_module(NeedsADatamodule, torch.zeros(4, 8)).parameters()).is_meta
