"""What a plan says ranks send by more layouts than are run, against dry runs: ``python -m tests.planner.dried``.

Of each layout the first, the middle and the last rank are dry run, by themselves. Printed are the rows that differ,
with what is sent for which purpose, those that can't be run, and how many are exact.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import warnings
from collections import defaultdict
from typing import Any

from lightning_par import dry_run
from lightning_par.planner.messages.dried import APART, AXES
from lightning_par.planner.report import layout_dict
from tests.helpers.models import MODELS
from tests.planner.counted import CASES, batch_of, planner, ranks_of

_PP = dict(pipeline_parallel_size=2, microbatches=2)
_TP, _SP, _DP = dict(tensor_parallel_size=2), dict(sequence_parallel_size=2), dict(data_parallel_size=2)
_FSDP = dict(data_parallel_size=2, data_parallel="fsdp")
_KEPT, _LET_GO = dict(reshard_after_forward=False), dict(reshard_after_forward=True)
_RESIDUAL = _TP | dict(shard_residual=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero_bubble": _PP | dict(schedule="interleaved_zero_bubble"),
    "data_zero_bubble": _PP | _DP | dict(schedule="interleaved_zero_bubble"),
    "zbv_fsdp": _PP | _FSDP | dict(schedule="zbv"),
    "zbv_fsdp_let_go": _PP | _FSDP | _LET_GO | dict(schedule="zbv"),
    "interleaved_fsdp_let_go": _PP | _FSDP | _LET_GO | dict(schedule="interleaved_1f1b"),
    "zbv_tensor": _PP | _TP | dict(schedule="zbv"),
    "zbv_ulysses": _PP | _SP | dict(attention="ulysses", schedule="zbv"),
    "residual_4": _RESIDUAL | dict(tensor_parallel_size=4),
    "residual_data": _RESIDUAL | _DP,
    "residual_fsdp": _RESIDUAL | _FSDP,
    "residual_fsdp_kept": _RESIDUAL | _FSDP | _KEPT,
    "residual_pipeline": _RESIDUAL | _PP,
    "residual_pipeline_data": _RESIDUAL | _PP | _DP,
    "tensor_fsdp_kept": _TP | _FSDP | _KEPT,
    "tensor_ulysses": _TP | _SP | dict(attention="ulysses"),
    "all_gather_data": _SP | _DP | dict(attention="all_gather"),
    "ulysses_fsdp": _SP | _FSDP | dict(attention="ulysses"),
    "ring_stores": _SP | dict(data_parallel="fsdp", attention="ring"),
    "ring_tensor_fsdp": _SP | _TP | _FSDP | dict(attention="ring"),
    "pipeline_tensor_fsdp": _PP | _TP | _FSDP,
    "pipeline_tensor_fsdp_let_go": _PP | _TP | _FSDP | _LET_GO,
    "pipeline_ring_fsdp": _PP | _SP | _FSDP | dict(attention="ring"),
    "pipeline_ring_fsdp_let_go": _PP | _SP | _FSDP | _LET_GO | dict(attention="ring"),
    "all": _PP | _SP | _TP | _FSDP | dict(attention="ring"),
}


def dried(case: str, name: str, rank: int) -> dict[tuple[str, str], float]:
    """Bytes that a rank sends in a dry run, by axis as the ledger names it, and purpose."""
    layout = LAYOUTS[name]
    with contextlib.redirect_stdout(io.StringIO()):  # the start-up tables
        found = dry_run(MODELS[case].module, batch_of(case), layout, devices=ranks_of(layout), rank=rank).sent
    return {(axis, why): size for (axis, why), size in found.items() if axis in AXES and why not in APART}


def differences(case: str, name: str) -> list[str]:
    """In words, of the ranks that are dry run.

    Raises:
        ValueError: the layout can't be, or can't be dry run.
    """
    ranks = ranks_of(LAYOUTS[name])
    said = layout_dict(planner(case).evaluate(LAYOUTS[name], ranks))["ranks"]
    found = []
    for rank in sorted({0, ranks // 2, ranks - 1}):
        purposes = dried(case, name, rank)
        sent: dict[str, float] = defaultdict(float)
        for (axis, _), size in purposes.items():
            sent[AXES[axis]] += size
        for axis, size in sent.items():
            predicted = said[rank]["sent"][axis]
            if predicted != round(size):
                mine = {why: size for (along, why), size in purposes.items() if AXES[along] == axis}
                found.append(f"rank {rank}: sent along {axis}: {predicted:,} predicted, {size:,.0f} dry run, {mine}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    exact = rows = 0
    for case in asked.model or CASES:
        for name in asked.layout or LAYOUTS:
            try:
                found = differences(case, name)
            except (ValueError, TypeError, RuntimeError) as error:
                print(f"{case} {name}: not run: {str(error)[:160]}", flush=True)
                continue
            rows += 1
            exact += not found
            for line in found:
                print(f"{case} {name}: {line}", flush=True)
    print(f"{exact} of {rows} exact")


if __name__ == "__main__":
    main()
