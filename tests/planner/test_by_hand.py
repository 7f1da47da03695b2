"""What a plan says is sent of weights, stored in parts, by steps that run backward themselves, against a dry run."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import dry_run, plan
from tests.helpers.slow import slow
from tests.planner.counted import APART, AXES

FSDP = {"data_parallel_size": 2, "data_parallel": "fsdp"}
LAYOUTS = {"fsdp": FSDP, "kept": FSDP | {"reshard_after_forward": False}}


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


ROWS = [(Toggled, "fsdp"), (Toggled, "kept"), (Frozen, "fsdp"), (Frozen, "kept"), (Shared, "fsdp"), (Shared, "kept")]


@slow("Toggled-fsdp", "Frozen-kept")
@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_each_backward_is_counted_by_itself(kind: type[Toggled], name: str) -> None:
    batch = torch.ones(8, 12)
    found = plan(kind, batch, "4xH100", devices=2, layout=LAYOUTS[name])
    sent = dry_run(kind, batch, LAYOUTS[name], devices=2).sent.items()
    counted = sum(size for (axis, why), size in sent if AXES.get(axis) == "data" and why not in APART)
    assert found.as_dict()["layouts"][0]["ranks"][0]["sent"]["data"] == round(counted)
    assert [note.split(": ")[0] for note in found.notes] == ["not known"] * (kind is Shared)


def test_what_is_not_counted_of_backwards_is_told() -> None:
    (note,) = plan(Untoggled, torch.ones(8, 12), "4xH100", devices=2, layout=FSDP).notes
    assert "layers that no backward of training_step comes to" in note
