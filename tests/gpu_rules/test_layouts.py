"""A small GPT trains under every layout, on fake CUDA devices, to what one device trains to, and keeps NCCL's rules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_rules.layouts import LAYOUTS, ranks
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules
from tests.gpu_rules.training import Trained, differences, train
from tests.gpu_rules.waits import blocking
from tests.helpers.slow import slow

QUEUES = ("communicator", "rank")


@pytest.fixture(scope="module")
def one_device(pool: StrictPool) -> Trained:
    (trained,) = pool.run(1, train, None)
    return trained


FAST = "tensor_residual-rank fsdp-rank zbv-communicator".split()


@slow(but=FAST)
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_the_rules(pool: StrictPool, one_device: Trained, layout: str, queue: Any) -> None:
    pool.rules = Rules(queue=queue)
    trained = pool.run(ranks(layout), train, layout, grace=15.0)
    assert pool.broken() == []
    assert differences(one_device, trained[0]) <= 1e-9


@slow(but=["1f1b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_once_a_step(pool: StrictPool, layout: str) -> None:
    """Lightning itself reads a number of the device at each batch: whether rank 0 is to end."""
    trained = pool.run(ranks(layout), train, layout)
    assert [blocking(each.waits).total() for each in trained] == [1] * ranks(layout)
