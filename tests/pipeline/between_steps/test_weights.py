"""Weights over stages: what is away needs no memory and stays the same object, and comes back bit by bit."""

from __future__ import annotations

import copy
import pickle
import weakref
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.absent.origin import ElsewhereError
from lightning_par.checkpoint.inventory import Inventory
from lightning_par.checkpoint.state_dicts import model_state, optimizer_state, whole
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.layout import Groups, Layout, make_groups
from lightning_par.mesh.ledger import ledger
from lightning_par.mesh.positions import Positions
from lightning_par.optim.clipping import clip_by_norm
from lightning_par.optim.gradient_sync import GradientSync
from lightning_par.optim.optimizers import adopt
from lightning_par.optim.precision import share_overflows
from lightning_par.pipeline.between_steps.weights.send_away import Once, Placement, bring_back, send_away
from lightning_par.pipeline.run.tied_gradients import make_holder_axes, sum_over_holders
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.strategies.end_of_run import unshard_optimizer_state
from lightning_par.tensor.apply import shard_module, unshard_module
from lightning_par.tensor.plan import Split, TensorPlan
from tests.helpers.pool import Pool

STAGES = 2
MINUTE = timedelta(minutes=1)


class Model(pl.LightningModule):
    """An embedding tied to the head, a norm with buffers, an LSTM; the stages are halves of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6, dtype=torch.float64)
        self.up = nn.Linear(6, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.lstm = nn.LSTM(8, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 11, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.norm(self.up(self.embedding(words))))[0]).sum(-1).tanh() * self.scale


def _placement(model: nn.Module) -> Placement:
    stage = {"up": (0,), "norm": (1,), "lstm": (1,), "embedding": (0, 1)}
    named = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    return Placement({name: stage[name.split(".")[0]] for name in named if "." in name})


def _words() -> Tensor:
    return torch.arange(22).view(22).remainder(11)


def _gradients(steps: int) -> list[dict[str, Tensor]]:
    """One device's gradients in each step, without updates between."""
    model = Model()
    for _ in range(steps):
        (model(_words()) * torch.linspace(0, 1, 22)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return [{name: grad * (i + 1) for name, grad in grads.items() if grad is not None} for i in range(steps)]


def _groups() -> Groups:
    dist.init_process_group("gloo")
    return make_groups(Layout(pipeline=dist.get_world_size()), MINUTE)


def _axis() -> Axis:
    return _groups().pipeline


def _alone(rank: int, size: int = STAGES) -> Axis:
    return Axis("pipeline", tuple(range(size)), rank, None)


def _away(rank: int) -> Model:
    model = Model()
    send_away(model, _placement(model), _alone(rank))
    return model


def test_what_is_away_stays_the_same_object_without_memory() -> None:
    model, values = Model(), np.ones((8, 6))
    model.up.weight = nn.Parameter(torch.from_numpy(values))
    model.up.weight.note = "mine"  # type: ignore[attr-defined]
    memory, held, before = weakref.ref(values), model.up.weight, dict(model.named_parameters())
    del values
    send_away(model, _placement(model), _alone(1))
    assert memory() is None
    assert all(p is before[name] for name, p in model.named_parameters())
    assert isinstance(held, nn.Parameter) and held.requires_grad and held.is_leaf and held.grad is None
    assert vars(held)["note"] == "mine" and held.shape == (8, 6) and held.device.type == "cpu" and not held.is_meta
    assert [name for name, p in model.named_parameters() if is_elsewhere(p)] == ["up.weight", "up.bias"]
    assert model.head.weight is model.embedding.weight and not is_elsewhere(model.head.weight)


def test_moving_casting_and_copying_work_while_parts_are_away() -> None:
    model = _away(0)
    parameter, count = model.norm.weight, sum(p.numel() for p in Model().parameters())
    assert model.norm.running_mean is not None and is_elsewhere(model.norm.running_mean)
    for move in (lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.half()):
        move(model)
        assert model.norm.weight is parameter and is_elsewhere(parameter) and isinstance(parameter, nn.Parameter)
        assert parameter.dtype == model.up.weight.dtype == model.norm.running_mean.dtype
    model.double()
    assert parameter.requires_grad and model.norm.num_batches_tracked.dtype == torch.long  # type: ignore[union-attr]
    assert model.to(torch.device("cpu"), torch.float64) is model
    copied = copy.deepcopy(model)
    assert is_elsewhere(copied.norm.weight) and isinstance(copied.norm.weight, nn.Parameter)
    assert copied.norm.weight is not parameter and copied.norm.weight.requires_grad
    assert copied.head.weight is copied.embedding.weight
    assert ModelSummary(model, max_depth=-1).total_parameters == count
    parameter.data = parameter.data.float()
    assert parameter.dtype == torch.float32 and is_elsewhere(parameter)
    parameter.data = torch.ones(8, dtype=torch.float64)
    assert parameter.dtype == torch.float64 and is_elsewhere(parameter)


def test_values_that_are_away_can_not_be_read() -> None:
    parameter = _away(0).norm.weight
    said = r"'norm\.weight' is held by pipeline rank 1"
    for read in (
        lambda p: (p + 1).norm(),
        lambda p: p.sum(),
        lambda p: p[0].item(),
        lambda p: p.tolist(),
        lambda p: p.numpy(),
    ):
        with pytest.raises(ElsewhereError, match=said):
            read(parameter)
    with pytest.raises(TypeError, match=said):
        pickle.dumps(parameter)
    with pytest.raises(ElsewhereError, match=said), torch.no_grad():
        torch.zeros(8, dtype=torch.float64).copy_(parameter)
    assert "norm.weight" in repr(parameter)


def test_writing_to_what_is_away_does_what_it_does_elsewhere() -> None:
    model, whole = _away(0), Model()
    state = whole.state_dict()
    assert list(model.state_dict()) == list(state)
    model.load_state_dict({name: x + 1 for name, x in state.items()})
    assert torch.equal(model.up.weight, whole.up.weight + 1) and is_elsewhere(model.norm.weight)
    drawn = []
    for one in (model, whole):
        torch.manual_seed(3)
        nn.init.normal_(one.norm.weight)
        nn.init.xavier_uniform_(one.get_parameter("lstm.weight_hh_l0"))
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        with torch.no_grad():
            model.up.weight.add_(1.0)
        average.update_parameters(model)
    assert torch.equal(average.module.get_parameter("up.weight"), model.up.weight - 0.5)


def _there_and_back() -> bool:
    axis, model = _axis(), Model()
    placement, before = _placement(model), dict(Model().state_dict())
    objects = dict(model.named_parameters())
    send_away(model, placement, axis)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.norm.bias.add_(1.0)  # where it is
    holder = type("Callback", (), {})()
    holder.kept = [{"bias": model.norm.bias.detach().clone()}, copied]
    bring_back(model, axis, also=[holder])
    assert all(p is objects[name] for name, p in model.named_parameters())
    assert not any(map(is_elsewhere, [*model.parameters(), *model.buffers(), *copied.parameters()]))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(copied.norm.bias, model.norm.bias + 1)
    assert torch.equal(holder.kept[0]["bias"], model.norm.bias)
    model(_words()).sum().backward()
    send_away(model, placement, axis)  # a second run
    return model.up.weight.grad is None


def test_all_comes_back(pool: Pool) -> None:
    assert pool.run(STAGES, _there_and_back) == [False, True]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups: Any = [{"params": parameters[2:], "weight_decay": 0.1}, {"params": parameters[:2]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    adopt(optimizer)
    return optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for grads in _gradients(2):
        for name, p in model.named_parameters():
            p.grad = None if is_elsewhere(p) or name == "scale" else grads[name].clone()
        optimizer.step()


def _written(model: nn.Module, optimizer: torch.optim.Optimizer, groups: Groups) -> tuple[Any, Any]:
    """The states as the first rank writes them; the others' have no values of what it holds."""
    inventory = Inventory(groups)
    weights = whole(model_state(model.state_dict(), inventory), inventory)
    inventory = Inventory(groups)
    return weights, whole(optimizer_state(optimizer.state_dict(), inventory), inventory)


def _spread() -> list[dict[str, Any] | None]:
    """The states as rank 0 writes them, before and after they were loaded, and each rank's once all came back."""
    groups, model = _groups(), Model()
    axis = groups.pipeline
    send_away(model, _placement(model), axis)
    optimizer = _optimizer(model)
    _train(model, optimizer)
    assert len(optimizer.state) == (3 if axis.rank == 0 else 7)
    keep, states = axis.rank == 0, []
    for _ in range(2):
        weights, moments = _written(model, optimizer, groups)
        if axis.rank == 1:
            assert weights["up.weight"].is_meta and moments["state"][0]["exp_avg"].is_meta
        states.append({"weights": weights, "optimizer": moments} if keep else None)
        weights, moments = axis.broadcast_object((weights, moments) if keep else None, "file")
        optimizer = _optimizer(model)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        assert not any(map(is_elsewhere, optimizer.state))
    unshard_optimizer_state(optimizer, axis)
    bring_back(model, axis)
    return [*states, {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}]


def _equal(got: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return list(got) == list(want) and all(_equal(got[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(_equal, got, want))
    return torch.equal(got, want) and got.dtype == want.dtype if isinstance(want, Tensor) else bool(got == want)


def test_the_states_are_one_devices(pool: Pool) -> None:
    model = Model()
    optimizer = _optimizer(model)
    _train(model, optimizer)
    want = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    for rank, (saved, again, after) in enumerate(pool.run(STAGES, _spread)):
        assert rank > 0 or _equal(saved, want) and _equal(again, want)
        assert _equal(after, want)


def _clip(norm_type: float) -> tuple[float, dict[str, Tensor], int]:
    axis, model = _axis(), Model()
    placement, grads = _placement(model), _gradients(1)[0]
    send_away(model, placement, axis)
    for name, p in model.named_parameters():
        p.grad = None if is_elsewhere(p) else grads[name]
    with ledger() as moved:
        norm = clip_by_norm(model.parameters(), 0.5, norm_type, Once(model, placement, axis))
    return norm.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, len(moved.transfers)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_clipped_norm_is_one_devices(pool: Pool, norm_type: float) -> None:
    model = Model()
    for name, grad in _gradients(1)[0].items():
        model.get_parameter(name).grad = grad
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type).item()
    for norm, grads, messages in pool.run(STAGES, _clip, norm_type):
        assert norm == pytest.approx(expected, rel=1e-12) and messages == 1
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-12, atol=0)


def _sharded_too() -> list[Any]:
    """Two stages of two tensor ranks: the head's stage holds a weight split over the tensor axis."""
    dist.init_process_group("gloo")
    groups = make_groups(Layout(pipeline=2, tensor=2), MINUTE)
    model, grads = Model(), _gradients(1)[0]
    split = Split(("up.weight",), (8, 6), 0, "colwise", Positions.even(8, 2))
    shard_module(model, TensorPlan(2, (split,)), groups.tensor)
    placement = Placement({**_placement(model).holders, "up.weight": (1,)})
    send_away(model, placement, groups.pipeline)
    for name, p in model.named_parameters():
        p.grad = None if is_elsewhere(p) else grads[name]
    norm = clip_by_norm(model.parameters(), 1e9, once=Once(model, placement, groups.pipeline)).item()
    optimizer = _optimizer(model)
    optimizer.step()
    saved, states = _written(model, optimizer, groups)
    unshard_optimizer_state(optimizer, groups.pipeline)
    bring_back(model, groups.pipeline)
    assert isinstance(model.up.weight, ShardedTensor)
    unshard_module(model)
    after = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    return [norm, {"weights": saved, "optimizer": states} if groups.world.rank == 0 else None, after]


def test_stages_of_sharded_weights_are_one_device_too(pool: Pool) -> None:
    model, grads = Model(), _gradients(1)[0]
    optimizer = _optimizer(model)
    for name, p in model.named_parameters():
        p.grad = grads[name].clone()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    optimizer.step()
    want = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    for rank, (norm, saved, after) in enumerate(pool.run(4, _sharded_too)):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert rank > 0 or _equal(saved, want)
        assert _equal(after, want)


def _tied() -> tuple[dict[str, Any], int]:
    dist.init_process_group("gloo")
    groups = make_groups(Layout(pipeline=3), MINUTE)
    placement = Placement({"a": (0, 2), "b": (0, 2), "c": (0, 1), "own": (groups.pipeline.rank,), "half": (1, 2)})
    axes = make_holder_axes(placement, groups, MINUTE)
    rank = groups.pipeline.rank
    like = {name: torch.zeros(2, 3, dtype=torch.float64) for name in "abc"} | {"half": torch.zeros(2).half()}
    like = {name: x for name, x in like.items() if rank in placement.holders[name]}
    like |= {"all": torch.zeros(()), "own": torch.zeros(1)}
    given = {"a": [0, 2], "c": [0], "all": [1], "own": [0, 1], "half": [1, 2]}  # who has a gradient
    grads = {n: torch.full_like(x, rank + 1.0) if rank in given.get(n, ()) else None for n, x in like.items()}
    with ledger() as moved:
        summed = sum_over_holders(grads, placement, axes, like)
    assert make_holder_axes(placement, groups, MINUTE)[(0, 1, 2)] is groups.pipeline
    return {name: None if x is None else x.mean().item() for name, x in summed.items()}, len(
        moved.select(purpose="tied")
    )


def test_gradients_of_tied_parameters_are_summed_over_their_holders(pool: Pool) -> None:
    first, second, third = pool.run(3, _tied)
    assert first == ({"a": 4.0, "b": None, "c": 1.0, "all": 2.0, "own": 1.0}, 3)
    assert second == ({"c": 1.0, "half": 5.0, "all": 2.0, "own": 2.0}, 3)
    assert third == ({"a": 4.0, "b": None, "half": 5.0, "all": 2.0, "own": None}, 3)


def _overflows() -> list[float]:
    """Two optimizers on one scaler: one has parameters on the second stage alone."""
    axis, model = _axis(), Model()
    send_away(model, _placement(model), axis)
    scaler, seen = torch.amp.GradScaler("cpu"), []
    for grad in (float("inf"), 1.0):
        optimizer = torch.optim.SGD(model.norm.parameters(), lr=1.0)
        scaler.scale(torch.ones(())).item()
        if axis.rank == 1:
            model.norm.weight.grad = torch.full((8,), grad, dtype=torch.float64)
        scaler.unscale_(optimizer)
        share_overflows(scaler, optimizer, axis)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


def test_a_stage_without_gradients_hears_of_overflows(pool: Pool) -> None:
    one, two = pool.run(STAGES, _overflows)
    assert one == two and one[0] == 2.0**15


def test_what_is_away_takes_no_part_in_the_average_over_replicas() -> None:
    model = _away(1)
    sync = GradientSync(model, Axis("data", (0, 1), 0, None))
    assert len(sync._handles) == sum(not is_elsewhere(p) for p in model.parameters())
    sync.close()
