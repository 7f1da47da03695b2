"""A function that draws on one stage draws from a stream of its own, and leaves the generator where it stood."""

from __future__ import annotations

import pytest
import torch

from lightning_par.pipeline.effects.random_draws import drawing
from lightning_par.sharded.functions import DRAWS
from tests.fact_trials.calls import Call, calls_of

CALLS = [call for name in sorted(DRAWS) for call in calls_of(name)]


def _drawn(call: Call, *key: int) -> list[torch.Tensor]:
    args, kwargs = call.given()
    before = torch.get_rng_state()
    with drawing(key, call.func):
        results = call.on(args, kwargs)
    assert torch.equal(torch.get_rng_state(), before)
    return [x for x in (results if isinstance(results, tuple) else (results,)) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_draw_goes_by_its_key_alone(call: Call) -> None:
    first = _drawn(call, 1, 2)
    torch.rand(3)  # another stage's
    again, others = _drawn(call, 1, 2), [_drawn(call, 1, key) for key in range(3, 12)]
    assert all(map(torch.equal, first, again))
    assert not all(torch.equal(x, y) for other in others for x, y in zip(first, other))
