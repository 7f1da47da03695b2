"""Weights on which the user's hooks hang before a run stay whole, and the others are stored in parts."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.fsdp.kept_whole import kept_whole, told
from lightning_par.fsdp.stored_parameter import Stored
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import Net, Points, check, compare, trained

HOOKED = ("head.weight", "net.0.weight")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tensor": dict(tensor_parallel_size=2),
    "sequence": dict(sequence_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2),
    "pipeline_reshard": dict(pipeline_parallel_size=2, reshard_after_forward=True),
}


class Clamped(Net):
    """Its hooks are not linear: the mean over replicas of what they give is not what they give of the mean."""

    def __init__(self) -> None:
        super().__init__()
        for name in HOOKED:
            self.get_parameter(name).register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        self.stored: set[str] = set()

    def on_train_start(self) -> None:
        self.stored = {name for name, p in self.named_parameters() if isinstance(p, Stored)}


def _fit(more: dict[str, Any], data_parallel: str, alike: bool) -> Any:
    batches = [[x[4 * i : 4 * i + 4] for x in (Points().x, Points().y)] for i in range(4)]
    if not alike and int(os.environ.get("RANK", "0")) % 2:
        batches = batches[::-1]
    module = Clamped()
    strategy = partial(HybridParallelStrategy, data_parallel_size=2, data_parallel=data_parallel, **more)
    data = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    found = trained(module, data, strategy, use_distributed_sampler=False)
    if surface.world_size() > 1 and data_parallel == "fsdp":
        assert module.stored and module.stored.isdisjoint(HOOKED)
    return found


@slow(but=["fsdp", "tensor", "pipeline"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_meet_what_they_meet_on_one_device(name: str, pool: Pool) -> None:
    check(pool, _fit, LAYOUTS[name], "fsdp", True, world=4 if LAYOUTS[name] else 2)


def test_hooks_meet_each_replicas_own_gradient_as_under_ddp(pool: Pool) -> None:
    reference, *_ = pool.run(2, _fit, {}, "ddp", False)
    for result in pool.run(2, _fit, {}, "fsdp", False):
        assert not compare(reference["weights"], result["weights"])
    (plain,) = pool.run(1, _fit, {}, "ddp", True)
    assert compare(reference["weights"], plain["weights"])  # the replicas' batches do differ


def test_what_stays_whole_is_named_with_its_reason() -> None:
    layer = nn.Linear(2, 2)
    assert kept_whole(layer, ()) == {}
    layer.bias.register_hook(lambda grad: grad)
    assert list(kept_whole(layer, ())) == ["bias"]
    assert kept_whole(layer, (), trains=False) == {}
    many = dict.fromkeys("abcde", "is packed")
    assert told(many) == "a, b, c and 2 more stay whole: each is packed."
    assert told({"a": "is packed"}) == "a stays whole: it is packed."
    assert told({}) == ""
