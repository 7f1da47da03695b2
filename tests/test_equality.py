"""A layout changes speed and memory, never results: (model x layout) trains to what one device trains to.

Models are in `tests.models`, what is compared and how closely in `tests.equality`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import equality
from tests.equality import Result
from tests.models import MODELS
from tests.pool import Pool


@dataclass(frozen=True)
class Row:
    """A model, a layout, and how the Trainer is set up."""

    case: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.case, self.layout, *(f"{key}={value}" for key, value in self.options.items())])


LAYOUTS: dict[str, dict[str, int]] = {
    "tp1": dict(tensor_parallel_size=1),
    "tp2": dict(tensor_parallel_size=2),
    "tp4": dict(tensor_parallel_size=4),
    "dp2": dict(tensor_parallel_size=1, data_parallel_size=2),
    "dp2-tp2": dict(tensor_parallel_size=2, data_parallel_size=2),
}

# One of each kind, for the layouts of 4 ranks.
PRODUCT = """
    gpt gpt_separate gpt_swiglu gqa_repeat gpt_tied loss_ignore loss_accuracy gpt_groups mlp_odd mlp_functional
    torch_encoder lightning_demo lstm vit hf_gpt2 hf_bert
""".split()
SELECTION = """
    gpt gpt_view_3hd gpt_masked gpt_swiglu gqa_repeat gpt_5_heads gpt_tied gpt_vocab_51 loss_z loss_accuracy mlp_odd
    mlp_l2 encoder_decoder torch_encoder hf_llama hf_t5
""".split()

ROWS = [
    *(Row(case, "tp2") for case in MODELS),
    *(Row(case, "tp4") for case in SELECTION),
    *(Row(case, "dp2-tp2") for case in PRODUCT),
    *(Row(case, "dp2") for case in ("gpt", "mlp", "loss_ignore", "vit")),
    *(Row(case, "tp1") for case in ("gpt", "mlp_batch_norm", "gan")),
    # accumulation, clipping
    *(Row(case, "tp2", dict(accumulate=3)) for case in ("gpt_tied", "mlp_l2")),
    *(Row(case, "dp2-tp2", dict(accumulate=2)) for case in ("gpt", "vit")),
    *(Row(case, "tp2", dict(clip=0.001, clip_algorithm="value")) for case in ("gpt", "mlp_odd")),
    Row("gpt_swiglu", "tp2", dict(clip=None)),
]

LOW = [
    Row(case, layout, dict(precision=precision))
    for precision in ("bf16-mixed", "bf16-true", "16-mixed", "32-true")
    for case, layout in (("gpt", "tp2"), ("gpt_swiglu", "dp2-tp2"), ("vit", "tp2"), ("hf_llama", "tp2"))
]


@pytest.fixture(scope="session")
def one_device(pool: Pool) -> Callable[..., Result]:
    """A case on one device, run once a session for each set of options."""
    kept: dict[Any, Result] = {}

    def get(case: str, **options: Any) -> Result:
        key = (case, *sorted(options.items(), key=str))
        if key not in kept:
            (kept[key],) = pool.run(1, equality.run, case, **options)
        return kept[key]

    return get


def _train(pool: Pool, row: Row, folder: Path) -> tuple[int, list[Result]]:
    """Every rank's result, and the size of the data axis."""
    layout = LAYOUTS[row.layout]
    data_size = layout.get("data_parallel_size", 1)
    world_size = data_size * layout["tensor_parallel_size"]
    return data_size, pool.run(
        world_size, equality.run, row.case, layout=layout, folder=str(folder), data_size=data_size, **row.options
    )


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_layout_never_changes_results(
    row: Row, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    data_size, results = _train(pool, row, tmp_path)
    reference = one_device(row.case, data_size=data_size, **row.options)
    broken = {rank: equality.compare(reference, result, data_size) for rank, result in enumerate(results)}
    lines = [f"rank {rank}: {line}" for rank, found in broken.items() for line in found]
    assert not lines, "\n" + "\n".join(lines[:40]) + f"\n{len(lines)} in all"


@pytest.mark.parametrize("row", LOW, ids=str)
def test_in_low_precision_a_layout_errs_at_most_twice_as_much_as_one_device(
    row: Row, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    # Where a gradient is nearly zero, AdamW with its small eps makes a full step of the noise: a matter of luck.
    row.options["eps"] = 0.01
    data_size, results = _train(pool, row, tmp_path)
    exact = one_device(row.case, data_size=data_size, eps=0.01)
    single = one_device(row.case, data_size=data_size, **row.options)
    broken = {rank: equality.compare_low(exact, single, result, data_size) for rank, result in enumerate(results)}
    lines = [f"rank {rank}: {line}" for rank, found in broken.items() for line in found]
    assert not lines, "\n" + "\n".join(lines)


def test_every_case_trains_on_one_device_the_same_way_twice(one_device: Callable[..., Result], pool: Pool) -> None:
    """The comparison itself: equal runs are found equal, a changed entry is found."""
    reference = one_device("gpt")
    (again,) = pool.run(1, equality.run, "gpt")
    assert equality.compare(reference, again) == []
    again.checkpoint["state_dict"]["head.weight"][3, 4] += 2e-9 * max(w.abs().max() for w in reference.after.values())
    assert [line.split(":")[0] for line in equality.compare(reference, again)] == ["weight head.weight"]
