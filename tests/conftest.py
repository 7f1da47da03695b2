"""Fixtures that every test may ask for."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the ranks of a test share few cores

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks on this host: ``pool.run(2, function, *args)``."""
    started = Pool()
    yield started
    started.close()
