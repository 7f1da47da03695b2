"""How processes share tests out, file by file: those that take longest first, so that all end at the same time; and
files that need ranks of a kind of their own go to one process, which starts them once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

LONGEST = """
    gpu_rules/test_layouts gpu_rules/test_strict_group sharded/rules/test_rules law/test_found pipeline/test_surface
    pipeline/run/test_replay strategies/test_launch fsdp/test_fully_sharded law/test_equality dry/test_dry_run
    pipeline/effects/test_unit_outputs sharded/patches/test_unchanged pipeline/test_surface_logging
    pipeline/run/test_counts strategies/test_preemption verdict/test_check mesh/test_rendezvous sequence/test_input
    law/test_draws planner/test_counted checkpoint/test_matrix pretrained/test_generate fsdp/test_block_uses
    strategies/test_registry strategies/test_surface_random optim/test_optimizers dry/test_odd_modules
    sequence/test_counts pipeline/run/test_message_order pipeline/test_input sharded/patches/test_imports
    pipeline/between_steps/test_module_calls dry/test_counted strategies/test_stop_iteration
    checkpoint/test_checkpoints strategies/test_compiled_blocks absent/test_deferred absent/test_deferred_fit
    strategies/test_surface_weights law/test_two_strategies strategies/test_surface_training
    optim/test_optimizer_habits pretrained/test_save checkpoint/test_directories sharded/test_repeated_calls
    pipeline/effects/test_backward_outputs strategies/test_surface_logging checkpoint/test_urls private/test_strays
    law/test_fuzz fsdp/test_kept_views checkpoint/test_safety dry/test_saved callbacks/test_replica_guard
    strategies/test_auto_parallel checkpoint/test_kill planner/test_by_hand pretrained/test_adapters
    planner/test_stage_trial pipeline/placement/test_input strategies/test_surface_runs pretrained/test_load
""".split()


FAKE_DEVICES = "tests/gpu_rules/"


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


class FilesOfAKind(LoadFileScheduling):
    """Files are shared out; those below ``tests/gpu_rules``, whose ranks have fake devices, as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        return FAKE_DEVICES if nodeid.startswith(FAKE_DEVICES) else str(super()._split_scope(nodeid))
