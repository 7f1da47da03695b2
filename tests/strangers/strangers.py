"""Every stranger under every strategy that fits: equal to one device, or truly refused.

Run by `make test-strangers`, which installs the packages; a plain pytest collects no file of this name. Where a package
is missing, this fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.helpers.pool import Pool
from tests.strangers.outcome import References, run
from tests.strangers.stranger import Stranger

MOST = 0.6  # of a transformer's parameters, on any rank under tensor parallelism
PACKAGES = (
    "chemprop",
    "litgpt",
    "neuralforecast",
    "peft",
    "pytorch_forecasting",
    "scvi",
    "segmentation_models",
    "timm",
    "torch_geometric",
    "transformers",
)


def _cases() -> Iterator[tuple[str, str, str]]:
    for package in PACKAGES:
        found: dict[str, Stranger] = import_module(f"tests.strangers.{package}").STRANGERS
        yield from ((package, name, strategy) for name, one in found.items() for strategy in one.strategies())


@pytest.fixture(scope="module")
def references() -> Iterator[dict[str, References]]:
    """By package, each with ranks of its own: what one changes in a process is no other's."""
    known: dict[str, References] = {}
    yield known
    for one in known.values():
        one.pool.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("package", "name", "strategy"), _cases())
def test_strangers_train_as_on_one_device(
    package: str, name: str, strategy: str, references: dict[str, References]
) -> None:
    for other in [other for other in references if other != package]:
        references.pop(other).pool.close()
    if package not in references:
        references[package] = References(Pool())
    stranger: Stranger = import_module(f"tests.strangers.{package}").STRANGERS[name]
    got = run(package, name, strategy, references[package])
    if strategy in stranger.refused:
        assert got.state == "raised" and re.search(stranger.refused[strategy], got.text), got
        return
    assert got.state == "equal", f"{got.state}: {got.text}"
    if stranger.transformer and strategy == "tensor_parallel":
        assert got.share <= MOST, f"a rank holds {got.share:.0%} of the parameters"
    if strategy == "pipeline_parallel":
        assert got.microbatches == stranger.microbatches, got.uncut
