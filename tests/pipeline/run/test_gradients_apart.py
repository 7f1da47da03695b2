"""Under a pipeline, ``.grad`` in a layer's forward is one device's; in backward it is, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy
from lightning_par.pipeline.run.gradients_apart import GradientsApart
from lightning_par.sharded.patches import STORED
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, check, compare, loader, metrics, weights


class Looks(nn.Linear):
    """Its output goes by its weight's gradient, which it may change."""

    def __init__(self, width: int, out: int, halves: bool) -> None:
        super().__init__(width, out)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        held = self.weight.grad
        y = super().forward(x)
        if held is None or not self.training:
            return y
        if self.halves:
            held.mul_(0.5)
        return y + held.norm()


class Forward(Net):
    halves = False

    def __init__(self) -> None:
        super().__init__()
        self.net[0], self.net[2] = Looks(6, 16, self.halves), Looks(16, 8, self.halves)
        self.head.register_forward_hook(lambda m, a, y: y if m.weight.grad is None else y * m.weight.grad.norm())


class Halves(Forward):
    halves = True


class Tied(Net):
    """Two stages use a weight at whose gradient a hook looks."""

    layer = "head"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU())
        self.head = nn.Linear(6, 6)
        self.head.weight = self.net[0].weight
        self.seen: list[Tensor | None] = []

    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - batch[0]).square().mean()

    def on_fit_start(self) -> None:
        self.get_submodule(self.layer).register_full_backward_hook(self.look)

    def look(self, layer: Any, into: Any, out: Any) -> None:
        held = layer.weight.grad
        self.seen.append(None if held is None else held.norm())


class OfAnother(Tied):
    layer = "net.2"


class Changed(OfAnother):
    """A hook of the weight's own changes it."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.net[2].weight.register_hook(lambda grad: grad * 0.5)


class InStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("held", float(self.net[0].weight.grad is not None))
        return super().training_step(batch, batch_idx)


def _fit(kind: type[Net], microbatches: int = 1, schedule: str = "1f1b") -> Any:
    module = kind()
    t = trainer(microbatches=microbatches, schedule=schedule, max_epochs=2, accumulate_grad_batches=3)
    try:
        t.fit(module, loader(28))
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    seen = {str(n): x for n, x in enumerate(getattr(module, "seen", [])) if x is not None}
    return {"metrics": metrics(t), "seen": seen, "weights": weights(module)}


ROWS: dict[str, tuple[type[Net], int, str]] = {
    "forward": (Forward, 1, "1f1b"),
    "forward, interleaved": (Forward, 1, "interleaved_1f1b"),
    "forward, cut": (Forward, 4, "1f1b"),
    "forward, cut, zbv": (Forward, 4, "zbv"),
    "halves": (Halves, 1, "1f1b"),
    "of another": (OfAnother, 1, "1f1b"),
}


@long("forward, cut, zbv")
@slow(but=["forward, cut, zbv", "halves"])
@pytest.mark.parametrize("row", ROWS)
def test_gradients_that_layers_and_hooks_look_at_are_one_devices(pool: Pool, row: str) -> None:
    kind, microbatches, schedule = ROWS[row]
    (found,) = pool.run(1, _fit, kind)
    for seen in pool.run(2, _fit, kind, microbatches, schedule):
        assert not isinstance(seen, str), seen
        assert not (lines := compare(found, seen, 1e-7)), lines


def _fit_beside(kind: type[Net]) -> Any:
    """As under fsdp, which has a way of its own for ``x.grad``."""
    with STORED.installed():
        return _fit(kind)


def test_they_are_seen_where_torchs_own_way_to_them_is_replaced(pool: Pool) -> None:
    (found,) = pool.run(1, _fit, Halves)
    for seen in pool.run(2, _fit_beside, Halves):
        assert not (lines := compare(found, seen, 1e-7)), lines


REFUSED: dict[str, tuple[type[Net], int, tuple[str, ...]]] = {
    "tied": (Tied, 1, ("test_gradients_apart.py:", "'net.0.weight'", "several stages")),
    "changed": (Changed, 1, ("test_gradients_apart.py:", "'net.2.weight'", "hooks of its own")),
    "halves, cut": (Halves, 4, ("once for each microbatch",)),
}


@slow(but=["tied", "changed"])
@pytest.mark.parametrize("row", REFUSED)
def test_gradients_that_come_otherwise_are_refused_on_all_ranks(pool: Pool, row: str) -> None:
    kind, microbatches, words = REFUSED[row]
    for message in pool.run(2, _fit, kind, microbatches):
        assert isinstance(message, str) and all(word in message for word in words), message


def test_what_earlier_batches_left_in_parts_of_weights_is_watched() -> None:
    whole, part = (torch.ones(2, requires_grad=True) for _ in range(2))
    part.grad = torch.ones(2)
    with GradientsApart([whole], cut=True, stored=[part]) as apart:
        apart.in_backward()
        apart.in_forward()
        part.grad.mul_(0.5)
        with pytest.raises(NotImplementedError, match="once for each microbatch"):
            apart.in_backward()


def _fit_stored(kind: type[Net]) -> Any:
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, data_parallel="fsdp", microbatches=4)
    t = surface.trainer([], must_split=False, strategy=strategy, max_epochs=2, accumulate_grad_batches=3)
    try:
        t.fit(kind(), loader(28))
    except (NotImplementedError, RuntimeError) as error:
        return str(error)


@slow()
def test_a_layer_that_changes_gradients_of_stored_weights_for_each_microbatch_is_refused(pool: Pool) -> None:
    found = pool.run(4, _fit_stored, Halves)
    assert all(found) and any("once for each microbatch" in x for x in found), found


class Retains(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(batch[0])
        hidden.retain_grad()
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


def test_an_activation_that_keeps_its_gradient_has_no_schedule(pool: Pool) -> None:
    check(pool, _fit, Retains)
    for message in pool.run(2, _fit, Retains, 2):
        assert "test_gradients_apart.py:" in message and "(retain_grad)" in message, message


def test_a_step_that_looks_at_another_stages_gradient_is_refused(pool: Pool) -> None:
    found = [x for x in pool.run(2, _fit, InStep) if isinstance(x, str)]
    assert len(found) == 2 and any("'net.0.weight', which is on another stage" in x for x in found), found
