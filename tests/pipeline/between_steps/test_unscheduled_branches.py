"""Training steps that go another way by values of the model, as they may in the middle of a run alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.surface import CLASSES, Net, check, loader, trained, trainer
from tests.pipeline.between_steps.test_unscheduled import LAYOUTS


class Late(Net):
    """What the loss is made of goes by the loss."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        h = self.net(batch[0])
        loss = self.branch(h, F.cross_entropy(self.head(h), batch[1]), batch)
        if loss is not None:
            self.log("train", loss.detach())
        return loss

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor | None:
        raise NotImplementedError


class Calls(Late):
    """Calls layers once more."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        return loss + self(batch[0] * 2).square().mean() if loss < 2.0 else loss


class UsesEarly(Late):
    """Uses a value of an early layer."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        return loss + h.square().mean() if loss < 2.0 else loss


class UsesWeights(Late):
    """Uses a weight of an early layer."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        return loss + self.net[0].weight.square().mean() if loss < 2.0 else loss


class Chooses(Late):
    """One of two losses, of which one comes of an early layer alone."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        other = 2.0 + 0.1 * h.square().mean()
        return loss if loss > other else other


class Scales(Late):
    """Goes another way behind the last layer, which leads to the same values."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        return loss * 2 if loss.item() < 2.0 else loss


class Skips(Late):
    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor | None:
        return None if loss.item() > 2.0 else loss


class Detaches(Late):
    """No gradient comes to the early layers."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(F.linear(h.detach(), self.head.weight), batch[1]) if loss.item() < 2.0 else loss


class CallsLast(Late):
    """Calls the last layer once more."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(h.detach()), batch[1]) if loss.item() < 2.0 else loss


class Decays(Late):
    """Uses a weight of an early layer in any case, and then goes another way, which leads to the same values."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        loss = loss + 0.01 * self.net[0].weight.square().mean()
        return loss * 2 if loss.item() < 2.0 else loss


class Freezes(Late):
    """Trains fewer weights from some loss on."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        if loss < 2.0:
            self.net[0].weight.requires_grad_(False)
        return loss


class Stored(Late):
    """By a number that is stored for the next step."""

    last = 10.0

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        result = loss + h.square().mean() if self.last < 2.0 else loss
        self.last = loss.item()
        return result


class HookStores(Late):
    """By a value that a hook stores from some time on."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.net[1].register_forward_hook(self.keep)

    def keep(self, layer: Any, given: Any, made: Tensor) -> None:
        if self.global_step > 2:
            self.kept.append(made)

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        kept, self.kept = self.kept, []
        self.kept.clear()
        return loss + sum((x.square().mean() for x in kept), torch.zeros(()).type_as(loss))


class Weighs(Late):
    """By each sample."""

    def branch(self, h: Tensor, loss: Tensor, batch: Any) -> Tensor:
        sure = self.head(h).softmax(-1).amax(-1) > 2 / CLASSES
        return loss + h[sure].square().mean() if sure.any() else loss


MODULES: dict[str, Callable[[], Net]] = {
    kind.__name__: kind
    for kind in (
        Calls,
        CallsLast,
        UsesEarly,
        UsesWeights,
        Chooses,
        Scales,
        Skips,
        Detaches,
        Decays,
        Freezes,
        Stored,
        HookStores,
        Weighs,
    )
}


def _fit(kind: str, layout: str) -> Any:
    return trained(MODULES[kind](), loader(12), LAYOUTS[layout][1], max_epochs=5)


CELLS = [f"{kind}-{layout}" for layout in LAYOUTS for kind in MODULES]


@long("UsesWeights-pipeline")
@slow(but=["Detaches-placement", "UsesWeights-pipeline"])
@pytest.mark.parametrize("cell", CELLS)
def test_branches_by_values_are_one_devices(cell: str, pool: Pool) -> None:
    kind, layout = cell.split("-")
    check(pool, _fit, kind, layout, world=LAYOUTS[layout][0])


def _told(kind: str, **layout: Any) -> list[str]:
    t = trainer(must_split=False, strategy=HybridParallelStrategy(pipeline_parallel_size=2, **layout))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        t.fit(MODULES[kind](), loader(8))
    return [str(one.message) for one in told if "layer by layer" in str(one.message)]


@long("Skips")
@slow("Decays", "Scales", "Stored")
@pytest.mark.parametrize("kind", ["Decays", "Scales", "Skips", "Stored", "UsesEarly"])
def test_what_the_last_stage_can_decide_alone_has_a_schedule(kind: str, pool: Pool) -> None:
    assert pool.run(2, _told, kind) == [[], []]


@long("Calls-calls 'net.0'")
@slow("CallsLast-*", "Detaches-*")
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("Calls", "calls 'net.0'"),
        ("CallsLast", "calls 'head'"),
        ("UsesWeights", "uses 'net.0.weight'"),
        ("Detaches", "takes gradients to other"),
    ],
)
def test_what_it_can_not_is_known_before_training(kind: str, what: str, pool: Pool) -> None:
    (told,), none = pool.run(2, _told, kind)
    assert none == [] and "test_unscheduled_branches.py" in told
    assert f"decides by a value of the model here, and {what}" in told
    with pytest.raises(RanksFailedError, match="microbatches=2: .* decides by a value of the whole batch"):
        pool.run(2, _told, kind, microbatches=2)
