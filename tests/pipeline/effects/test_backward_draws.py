"""What hooks on gradients draw: streams of their own, or refused where draws are to be one device's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline.effects.backward_draws import drawing_in_backward
from lightning_par.sharded.run_state import RunState
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.surface import Net, loader


def test_draws_in_backward_have_streams_of_their_own() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()

    def drawn(*key: int) -> Tensor:
        with drawing_in_backward(key, "a hook"):
            return torch.rand(3)

    assert not torch.equal(drawn(1, 2), drawn(1, 3)) and torch.equal(drawn(1, 2), drawn(1, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_they_are_refused_where_they_are_to_be_one_devices() -> None:
    state = RunState()
    state.streams.whole = True
    with state.entered():
        with drawing_in_backward((1,), "a hook"):
            pass
        drew: list[str] = []
        with drawing_in_backward((1,), "a hook", drew):
            torch.rand(3)
        assert len(drew) == 1
        with pytest.raises(NotImplementedError, match="a hook draws random numbers in backward"):
            with drawing_in_backward((1,), "a hook"):
                torch.rand(3)


class Noisy(Net):
    """Gradients of activations and of a weight get some noise."""

    def __init__(self) -> None:
        super().__init__()
        self.of_weight, self.of_hidden = list[float](), list[float]()

    def on_fit_start(self) -> None:
        self.head.weight.register_hook(partial(self.noise, self.of_weight))

    def noise(self, drawn: list[float], grad: Tensor) -> Tensor:
        noise = torch.randn_like(grad)
        drawn.append(float(noise.sum()))
        return grad + 0.01 * noise

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(batch[0])
        hidden.register_hook(partial(self.noise, self.of_hidden))
        return torch.nn.functional.cross_entropy(self.head(hidden), batch[1])


def _fit(draws: Any) -> Any:
    strategy = PipelineParallelStrategy(2, microbatches=1, draws=draws)
    module, trainer = Noisy(), surface.trainer([], must_split=False, strategy=strategy, max_epochs=1)
    try:
        trainer.fit(module, loader(28))
    except NotImplementedError as error:
        return str(error)
    return [*module.of_weight, *module.of_hidden], torch.get_rng_state()


def test_ranks_of_a_pipeline_go_on_alike_whatever_hooks_draw(pool: Pool) -> None:
    (drawn, first), (_, second) = pool.run(2, _fit, "per_shard")
    assert torch.equal(first, second) and len({*drawn}) == len(drawn) > 2


def test_hooks_that_draw_under_a_pipeline_are_refused_where_draws_are_one_devices(pool: Pool) -> None:
    assert all("draws random numbers in backward" in x for x in pool.run(2, _fit, "one_device"))
