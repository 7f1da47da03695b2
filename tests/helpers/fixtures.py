"""Fixtures that every test may ask for; a plugin of each process that runs tests, see `tests.conftest`."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_par.sharded import patches
from tests.helpers.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Whichever tests ran before in this process, a test draws the same numbers."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed also keeps the stack for each kind of device
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """What outlives a test with patches of torch is that test's to mend, not that of whichever runs after it."""
    before = _patched()
    yield
    if not _patched() <= before:
        gc.collect()
        gc.freeze()  # what is left, as the compiler, is not looked through again after the next test
        # A test that failed lives on in its traceback.
        assert _patched() <= before or hasattr(sys, "last_value"), "torch is left patched"


def _patched() -> set[patches.Patches]:
    return {kind for kind in (patches.SHARDED, patches.STORED, patches.SHARES) if kind.are_installed}


@pytest.fixture
def shares() -> Iterator[None]:
    """For cases whose backwards begin with shares of gradients."""
    with patches.SHARES.installed():
        yield


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    """The rows of a test of the module that will run, each by its parameters: for what runs for all of them at once.
    A test without rows is one, without parameters."""

    def rows(test: str) -> list[dict[str, Any]]:
        items = [item for item in request.session.items if isinstance(item, pytest.Function)]
        mine = [item for item in items if item.module is request.module and item.originalname == test]
        return [item.callspec.params if hasattr(item, "callspec") else {} for item in mine]

    return rows


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """Memory that an earlier run gave up would hide what is taken."""
    started = Pool()
    yield started
    started.close()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Ranks on this host: ``pool.run(2, function, *args)``."""
    from tests.gpu_rules.plugin import strict_pool  # pytest wants to load a plugin before others import it

    started = strict_pool(pytestconfig) or Pool()
    yield started
    started.close()
