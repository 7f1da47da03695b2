"""Ranks on fake CUDA devices and under the strict group; where there can be none, tests are skipped, saying why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu_rules import build
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules


@pytest.fixture(scope="session")
def strict_cpu() -> Iterator[StrictPool]:
    """CPU ranks whose group keeps NCCL's rules."""
    pool = StrictPool("cpu")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[StrictPool]:
    """In this folder, ranks have fake CUDA devices: bodies of other tests run on them as they are."""
    why = build.missing()
    if why is not None:
        pytest.skip(why)
    pool = StrictPool("cuda")
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _usual_rules(request: pytest.FixtureRequest) -> None:
    for name in {"pool", "strict_cpu"} & set(request.fixturenames):
        request.getfixturevalue(name).rules = Rules()
