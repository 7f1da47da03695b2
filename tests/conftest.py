"""Fixtures that every test may ask for."""

from __future__ import annotations

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the ranks of a test share few cores
# torch's store asks for the name of each client's address, and waits 5 s where a name server drops that question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.pool import Pool

torch.set_num_threads(1)

# The files that take longest come first, so that processes that share them out end at the same time.
LONGEST = """
    law/test_found law/test_equality fsdp/test_fully_sharded law/test_hybrid_equality sharded/rules/test_rules
    strategies/test_launch strategies/test_registry pipeline/test_surface verdict/test_check law/test_features
    absent/test_deferred_fit pipeline/effects/test_backward_state pipeline/placement/test_equality
    sequence/test_counts strategies/test_surface_training checkpoint/test_matrix optim/test_optimizers
    pipeline/run/test_counts pipeline/test_checkpoints strategies/test_surface_random strategies/test_surface_weights
    strategies/test_exits pipeline/test_surface_logging strategies/test_surface_logging
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The rows of tables in ``slow_rows.txt`` are much like others, and there is no time for them but in test-all."""
    slow = set((Path(__file__).parent / "slow_rows.txt").read_text().splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    order = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Whichever tests ran before in this process, a test draws the same numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    """The rows of a test of the module that will run, each by its parameters: for what runs for all of them at once."""

    def rows(test: str) -> list[dict[str, Any]]:
        items = [item for item in request.session.items if isinstance(item, pytest.Function)]
        mine = [item for item in items if item.module is request.module and item.originalname == test]
        return [item.callspec.params for item in mine]

    return rows


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks on this host: ``pool.run(2, function, *args)``."""
    started = Pool()
    yield started
    started.close()
