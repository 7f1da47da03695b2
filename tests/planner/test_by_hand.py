"""What a plan says steps that run backward themselves send of weights and gradients, against dry and real runs."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import dry_run, plan
from lightning_par.planner.messages.dried import by_axis
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.counted import ranks_of, trained

FSDP: dict[str, Any] = {"data_parallel_size": 2, "data_parallel": "fsdp"}
DATA: dict[str, Any] = {"data_parallel_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": DATA,
    "data tensor": DATA | TENSOR,
    "residual": DATA | TENSOR | {"shard_residual": True},
    "stored residual": FSDP | TENSOR | {"shard_residual": True},
    "fsdp": FSDP,
    "kept": FSDP | {"reshard_after_forward": False},
}
BATCH = torch.ones(8, 12)


class Toggled(L.LightningModule):
    """Two nets of a GAN; each has its turn, in which the other one's weights get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.makes = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 12))
        self.judges = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))

    def begin(self, optimizer: Any, net: nn.Module) -> None:
        self.toggle_optimizer(optimizer)

    def end(self, optimizer: Any, net: nn.Module) -> None:
        self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Tensor) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        z = torch.randn(len(batch), 6)
        self.begin(first, self.judges)
        self.manual_backward(self.judges(self.makes(z)).square().mean())
        first.step()
        self.end(first, self.judges)
        self.begin(second, self.makes)
        self.manual_backward((self.judges(batch) - self.judges(self.makes(z).detach())).mean())
        second.step()
        self.end(second, self.makes)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters()) for net in (self.makes, self.judges)]


class Untoggled(Toggled):
    """Keeps weights in a turn for a backward that does not come to them."""

    def begin(self, optimizer: Any, net: nn.Module) -> None: ...

    def end(self, optimizer: Any, net: nn.Module) -> None: ...


class Frozen(Toggled):
    """Says so of the weights themselves."""

    def begin(self, optimizer: Any, net: nn.Module) -> None:
        net.requires_grad_(False)

    def end(self, optimizer: Any, net: nn.Module) -> None:
        net.requires_grad_(True)


class Shared(Untoggled):
    """Runs backward twice after one forward, partly through the same graph."""

    def training_step(self, batch: Tensor) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        found = self.judges(self.makes(batch[:, :6]))
        self.manual_backward(found.square().mean(), retain_graph=True)
        self.manual_backward(found.mean())
        first.step()
        second.step()


class Odd(Toggled):
    """Has weights of one element, without a use, and frozen; a turn ends before backward, and another never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))
        self.still = nn.Parameter(torch.ones(5), requires_grad=False)

    def training_step(self, batch: Tensor) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.judges.requires_grad_(False)
        found = self.judges(self.makes(batch[:, :6])) * self.scale
        self.judges[0].requires_grad_(True)
        self.manual_backward(found.square().mean())
        first.step()
        self.scale.requires_grad_(False)
        self.manual_backward((self.judges(batch) + self.still.sum()).mean())
        self.scale.requires_grad_(True)
        self.judges.requires_grad_(True)
        second.step()


class Direct(Untoggled):
    """Calls the loss' own `backward`."""

    def training_step(self, batch: Tensor) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.judges(self.makes(batch[:, :6])).square().mean().backward()
        first.step()
        self.judges(batch).mean().backward()
        second.step()


ROWS = [(Toggled, "fsdp"), (Toggled, "kept"), (Frozen, "fsdp"), (Frozen, "kept"), (Shared, "fsdp"), (Shared, "kept")]


@long("Shared-fsdp")
@slow("Toggled-fsdp", "Frozen-kept", "Frozen-fsdp", "Shared-kept")
@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_each_backward_is_counted_by_itself(kind: type[Toggled], name: str) -> None:
    found = plan(kind, BATCH, "4xH100", devices=2, layout=LAYOUTS[name])
    assert said(found) == dried(kind, name)
    assert not found.notes


def test_what_runs_through_a_graph_again_is_counted_in_dry_runs_where_layers_are_split() -> None:
    found = plan(Shared, BATCH, "4xH100", devices=2, layout={"tensor_parallel_size": 2})
    assert said(found, "tensor") == dried_by(Shared, {"tensor_parallel_size": 2}, "tensor") > 0
    (note,) = found.notes
    assert note.startswith("counted in dry runs of ranks: what a backward of training_step sends along tensor")


@long("Toggled")
@slow("Untoggled", "Frozen", "Shared", "Direct")
@pytest.mark.parametrize("kind", [Toggled, Untoggled, Frozen, Shared, Odd, Direct])
def test_replicas_average_in_each_backward_what_requires_a_gradient_then(kind: type[Toggled], pool: Pool) -> None:
    real = pool.run(2, counted, kind, DATA)
    found = plan(kind, BATCH, "4xH100", devices=2, layout=DATA)
    assert said(found) == dried(kind, "data") == real[0] == real[1]


@long("residual-Odd")
@slow("residual-Untoggled", "data tensor-Odd")
@pytest.mark.parametrize("kind", [Untoggled, Odd])
@pytest.mark.parametrize("name", ["data tensor", "residual"])
def test_so_do_ranks_of_a_tensor_axis(kind: type[Toggled], name: str) -> None:
    assert said(plan(kind, BATCH, "4xH100", devices=4, layout=LAYOUTS[name])) == dried(kind, name)


@long()
def test_shares_of_gradients_that_are_stored_in_parts_are_summed_along_tensor() -> None:
    found = plan(Toggled, BATCH, "4xH100", devices=4, layout=LAYOUTS["stored residual"])
    assert said(found, "tensor") == dried(Toggled, "stored residual", "tensor")


def said(found: Any, axis: str = "data") -> int:
    return int(found.as_dict()["layouts"][0]["ranks"][0]["sent"][axis])


def dried(kind: type[Toggled], name: str, along: str = "data") -> int:
    return dried_by(kind, LAYOUTS[name], along)


def dried_by(kind: type[Toggled], layout: dict[str, Any], along: str) -> int:
    return round(by_axis(dry_run(kind, BATCH, layout, devices=ranks_of(layout)).sent)[along])


def counted(kind: type[Toggled], layout: dict[str, Any]) -> int:
    torch.manual_seed(0)
    return round(trained(kind(), DataLoader(torch.ones(32, 12), batch_size=8), layout).sent["data"])  # type: ignore[arg-type]


def test_what_is_not_counted_of_backwards_is_told() -> None:
    (note,) = plan(Untoggled, BATCH, "4xH100", devices=2, layout=FSDP).notes
    assert "layers that no backward of training_step comes to" in note


def test_a_step_by_hand_is_one_of_the_optimizer() -> None:
    """As a Trainer has it, which accumulates no gradients of such a module."""
    for asked in ({"accumulate_grad_batches": 2}, {"layout": DATA, "global_batch": 64}):
        with pytest.raises(ValueError, match="Toggled optimizes by hand .* takes no accumulate_grad_batches"):
            plan(Toggled, BATCH, machine="8xH100", devices=2, **asked)  # type: ignore[arg-type]
    found = plan(Toggled, BATCH, machine="8xH100", devices=2, global_batch=64).layouts
    assert found and all((one.candidate.accumulated, one.candidate.samples) == (1, 64) for one in found)
