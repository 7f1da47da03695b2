"""Features that forward hooks keep of several layers, in objects that the step empties or makes anew, and goes by."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import CLASSES, Net, check, kept, loader, trained, trainer, weights, world_size

PLACED = {"placement": {"net": 0, "head": 1}}
CUT = {"pipeline_parallel_size": 2, "microbatches": 2}


class Layer(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(inputs, 8), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.lin(x))


class Features(Net):
    """The loss goes by what hooks have kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Layer(6), Layer(8), Layer(8))
        self.head = nn.Linear(8, CLASSES)
        self.features: Any = {}
        self.hang()

    def hang(self) -> None:
        for name in ("0.lin", "1.act", "2"):
            self.net.get_submodule(name).register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, layer: nn.Module, given: Any, made: Tensor) -> None:
        self.features[name] = made

    def taken(self) -> list[Tensor]:
        """The features, of which nothing is left."""
        found, self.features = self.features, {}
        return [*found.values()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(x.square().mean() for x in self.taken())


class Listed(Features):
    def __init__(self) -> None:
        super().__init__()
        self.features = deque()

    def keep(self, name: str, layer: nn.Module, given: Any, made: Tensor) -> None:
        self.features.append(made)

    def taken(self) -> list[Tensor]:
        found, self.features = self.features, deque()
        return [*found]


class Spaced(Features):
    """At the step's beginning there is another object, whose attributes they are."""

    def __init__(self) -> None:
        super().__init__()
        self.features = SimpleNamespace()

    def keep(self, name: str, layer: nn.Module, given: Any, made: Tensor) -> None:
        setattr(self.features, name.replace(".", "_"), made)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.features = SimpleNamespace()
        return super().training_step(batch, batch_idx)

    def taken(self) -> list[Tensor]:
        return [*vars(self.features).values()]


class ByDevice(Features):
    """As in libraries: a dict for each device, which the first step makes, and later ones exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.features = defaultdict(dict)

    def keep(self, name: str, layer: nn.Module, given: Any, made: Tensor) -> None:
        self.features[made.device][name] = made

    def taken(self) -> list[Tensor]:
        ((device, found),) = self.features.items()
        self.features[device] = {}
        return [*found.values()]


class Bank(Callback):
    """Holds what the step lets go, or keeps features itself."""

    def __init__(self) -> None:
        self.held: Any = None
        self.features: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.held = pl_module.features

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for held in (self.held, self.features):
            self.seen += [kept(held[name]) for name in sorted(held)]


class InCallback(Features):
    """They are kept at the trainer, by a callback of the user's."""

    def keep(self, name: str, layer: nn.Module, given: Any, made: Tensor) -> None:
        self.trainer.callbacks[0].features[name] = made  # type: ignore[attr-defined]

    def taken(self) -> list[Tensor]:
        return [*self.trainer.callbacks[0].features.values()]  # type: ignore[attr-defined]


class OnStart(Features):
    """Hooks come when the module is laid out."""

    def hang(self) -> None:
        pass

    def on_fit_start(self) -> None:
        super().hang()


def _trained(kind: type[Features], layout: dict[str, Any]) -> Any:
    return trained(kind(), loader(12), partial(HybridParallelStrategy, **layout), max_epochs=2)


@long("placed-Listed")
@slow(but=["placed-Listed", "cut-Spaced"])
@pytest.mark.parametrize("kind", [Features, Listed, Spaced, ByDevice, OnStart], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", [PLACED, CUT], ids=["placed", "cut"])
def test_features_of_hooks_are_one_devices(kind: type[Features], layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _trained, kind, layout)


def _held(kind: type[Features], layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module, bank = kind(), Bank()
    t = trainer([bank], must_split=False, strategy=HybridParallelStrategy(**layout) if world_size() > 1 else "auto")
    t.fit(module, loader(12))
    return {"seen": {str(n): x for n, x in enumerate(bank.seen)}, "weights": weights(module)}


@long("cut-Features")
@slow(but=["cut-Features", "placed-InCallback"])
@pytest.mark.parametrize("kind", [Features, InCallback], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", [PLACED, CUT], ids=["placed", "cut"])
def test_what_a_callback_holds_of_them_is_one_devices(kind: type[Features], layout: dict[str, Any], pool: Pool) -> None:
    """Though the module lets the object go within the step."""
    check(pool, _held, kind, layout)
