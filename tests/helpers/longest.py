"""The files that take longest come first, so that processes that share them out end at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

LONGEST = """
    pipeline/run/test_replay law/test_found sharded/patches/test_unchanged pipeline/effects/test_unit_outputs
    pipeline/test_surface law/test_equality fsdp/test_fully_sharded strategies/test_launch
    pipeline/run/test_message_order verdict/test_check planner/test_counted strategies/test_preemption
    dry/test_saved gpu_rules/test_layouts gpu_rules/test_strict_group planner/test_run_setup
    planner/test_stage_trial planner/test_peaks dry/test_counted pipeline/test_surface_logging test_module_state
    pipeline/run/test_counts sequence/test_input law/test_two_strategies law/test_draws tensor/test_plan
    gpu_rules/test_fake_device mesh/test_rendezvous planner/test_counts pipeline/between_steps/test_module_calls
    dry/test_dry_run fsdp/test_block_uses checkpoint/test_matrix law/test_fuzz strategies/test_compiled_blocks
    strategies/test_registry trial/test_guesses private/test_strays gpu_rules/test_delivery
    pretrained/test_generate sharded/test_compiled_graph pipeline/test_input optim/test_optimizers
    planner/test_used_again strategies/test_surface_training checkpoint/test_checkpoints
    planner/test_machine_at_hand sequence/test_counts fsdp/test_kept_views pretrained/test_save
    absent/test_deferred_fit strategies/test_surface_random pipeline/trial/test_study
    strategies/test_surface_runs gpu_rules/test_dry_run strategies/test_surface_weights
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
