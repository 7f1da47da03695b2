"""The files that take longest come first, so that processes that share them out end at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

LONGEST = """
    sharded/patches/test_unchanged law/test_found law/test_equality strategies/test_compiled_blocks
    fsdp/test_fully_sharded law/test_hybrid_equality sharded/rules/test_rules pretrained/test_generate
    strategies/test_launch strategies/test_registry pipeline/test_surface verdict/test_check law/test_features
    absent/test_deferred_fit pipeline/effects/test_backward_state pipeline/placement/test_equality
    sequence/test_counts strategies/test_surface_training checkpoint/test_matrix optim/test_optimizers
    pipeline/run/test_counts pipeline/test_checkpoints strategies/test_surface_random strategies/test_surface_weights
    strategies/test_exits pipeline/test_surface_logging strategies/test_surface_logging
""".split()


def longest_first(items: list[pytest.Item], names: Sequence[str] = LONGEST) -> None:
    """Sort ``items`` in place.

    Raises:
        pytest.UsageError: a name is no file's.
    """
    files = [Path(__file__).parents[1] / f"{name}.py" for name in names]
    missing = [name for name, file in zip(names, files) if not file.exists()]
    if missing:
        raise pytest.UsageError(f"tests.helpers.longest names files that are not there: {', '.join(missing)}")
    order = {file: place for place, file in enumerate(files)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
