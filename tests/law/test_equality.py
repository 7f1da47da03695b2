"""A layout changes speed and memory, never results: (model x layout) trains to what one device trains to.

Models are in `tests.helpers.models`, what is compared and how closely in `tests.helpers.equality`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import equality
from tests.helpers.equality import Result
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True)
class Row:
    """A model, a layout, and how the Trainer is set up."""

    case: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.case in MODELS and self.layout in LAYOUTS, f"no such row: {self}"

    def __str__(self) -> str:
        return "-".join([self.case, self.layout, *(f"{key}={value}" for key, value in self.options.items())])


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": dict(tensor_parallel_size=1),
    "tp2": dict(tensor_parallel_size=2),
    "tp2-residual": dict(tensor_parallel_size=2, shard_residual=True),
    "tp4": dict(tensor_parallel_size=4),
    "dp2-tp2-residual": dict(tensor_parallel_size=2, data_parallel_size=2, shard_residual=True),
    "dp2": dict(tensor_parallel_size=1, data_parallel_size=2),
    "dp2-tp2": dict(tensor_parallel_size=2, data_parallel_size=2),
    "sp2": dict(sequence_parallel_size=2),
    "sp2-ring": dict(sequence_parallel_size=2, attention="ring"),
    "sp2-gather": dict(sequence_parallel_size=2, attention="all_gather"),
    "sp4-ring": dict(sequence_parallel_size=4, attention="ring"),
    "sp4-product": dict(sequence_parallel_size=4, attention={"ulysses": 2, "ring": 2}),
    "dp2-sp2": dict(sequence_parallel_size=2, data_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2, microbatches=2),
    "pp2-auto": dict(pipeline_parallel_size=2),
    "pp2-uneven": dict(pipeline_parallel_size=2, microbatches=3),  # of batches of 4
    "pp4": dict(pipeline_parallel_size=4, microbatches=4),
    "dp2-pp2": dict(pipeline_parallel_size=2, data_parallel_size=2, microbatches=2),
}

# For the layouts of 4 ranks, what differs there: heads and sizes that don't divide, groups of gradients, sums.
PRODUCT = "gpt_swiglu gpt_tied loss_ignore loss_accuracy gpt_groups mlp_functional lstm vit hf_bert".split()
SELECTION = """
    gpt_masked gqa_repeat gpt_5_heads gpt_tied gpt_vocab_51 loss_z loss_accuracy mlp_odd encoder_decoder hf_llama
""".split()

# Tokens in dim 0 and dim 1, losses over split classes, layers outside islands, gradients of gradients.
RESIDUAL = """
    gpt_swiglu loss_ignore loss_z gpt_groups encoder_decoder torch_encoder_length_first vit lstm mlp_gradient_penalty
    gan hf_llama hf_t5
""".split()

# Each for something that a pipeline does: skips, shared denominators, weights and values used in several stages, state,
# metrics, hooks, shapes that change, samples that mix.
CUT = """
    encoder_decoder loss_accuracy loss_ragged mlp_l2 mlp_reused_linear mlp_hooked mlp_clamped mlp_statistics gpt_lora
    gpt_groups gpt_own_clip gpt_grad_norm gpt_checkpointed recommender lstm vit lightning_demo hf_t5
""".split()
MIXED = ["mlp_batch_norm", "contrastive", "hf_bert"]
UNSCHEDULED = ["gan", "mlp_gradient_penalty", "experts"]

PIPELINES = [
    *(Row(case, "pp2") for case in CUT),
    *(Row(case, "pp2-auto") for case in (*MIXED, *UNSCHEDULED)),
    *(Row(case, "pp2-uneven") for case in ("loss_ignore", "unet")),
    *(Row(case, "pp2", dict(schedule=schedule)) for schedule in SCHEDULES for case in ("gpt_tied", "unet")),
    Row("gpt_tied", "pp4", dict(schedule="1f1b")),
    Row("loss_ignore", "pp4", dict(schedule="gpipe")),
    Row("unet", "pp4", dict(schedule="interleaved_1f1b")),
    Row("hf_gpt2", "pp4", dict(schedule="interleaved_zero_bubble")),
    Row("gpt_tied", "pp4", dict(schedule="zbv")),
    *(Row(case, "dp2-pp2") for case in ("loss_ignore", "vit")),
    Row("gpt_tied", "dp2-pp2", dict(schedule="zbv")),
    # accumulation, clipping
    Row("gpt_tied", "pp2", dict(schedule="zbv", accumulate=3)),
    Row("gpt_checkpointed", "pp2", dict(schedule="zbv")),  # blocks that lie on two ranks
    Row("gpt", "dp2-pp2", dict(accumulate=2)),
    Row("gpt_tied", "pp2", dict(clip=0.001, clip_algorithm="value")),
    Row("gpt", "pp2", dict(clip=None)),
]

# Masks of all kinds, queries and keys of other lengths, denominators, tokens that are picked, layers that gather,
# gradients of gradients, several optimizers.
TOKENS = """
    gpt_tied gpt_masked gpt_sdpa_mask gqa_sdpa loss_ignore loss_ragged loss_accuracy gpt_checkpointed gpt_own_clip
    gpt_lora torch_encoder_length_first encoder_decoder lightning_demo lstm causal_conv vit vit_16 hf_vit hf_bert
    hf_llama hf_mistral hf_t5 hf_whisper mlp_gradient_penalty gan
""".split()

SEQUENCES = [
    *(Row(case, "sp2") for case in TOKENS),
    *(Row(case, "sp2-ring") for case in ("gpt_tied", "gqa_sdpa", "hf_t5")),
    Row("gqa_sdpa", "sp2-gather"),
    *(Row(case, "sp4-ring") for case in ("gpt_5_heads", "causal_conv")),
    Row("gpt_tied", "sp4-product"),
    Row("loss_ignore", "dp2-sp2"),
    Row("gpt_groups", "dp2-sp2", dict(accumulate=2)),
]

ROWS = [
    *(Row(case, "tp2") for case in MODELS),
    *(Row(case, "tp4") for case in SELECTION),
    *(Row(case, "dp2-tp2") for case in PRODUCT),
    *(Row(case, "tp2-residual") for case in RESIDUAL),
    Row("gpt_tied", "dp2-tp2-residual", dict(accumulate=2)),
    *(Row(case, "dp2") for case in ("gpt", "mlp", "loss_ignore", "vit")),
    *(Row(case, "tp1") for case in ("gpt", "mlp_batch_norm", "gan")),
    # accumulation, clipping
    *(Row(case, "tp2", dict(accumulate=3)) for case in ("gpt_tied", "mlp_l2")),
    *(Row(case, "dp2-tp2", dict(accumulate=2)) for case in ("gpt", "vit")),
    *(Row(case, "tp2", dict(clip=0.001, clip_algorithm="value")) for case in ("gpt", "mlp_odd")),
    Row("gpt_swiglu", "tp2", dict(clip=None)),
    *PIPELINES,
    *SEQUENCES,
]

LOW = (
    [
        Row(case, layout, dict(precision=precision))
        for precision in ("bf16-mixed", "bf16-true", "16-mixed", "32-true")
        for case, layout in (("gpt", "tp2"), ("gpt_swiglu", "dp2-tp2"), ("vit", "tp2"), ("hf_llama", "tp2"))
    ]
    + [
        Row(case, "pp2", dict(precision=precision, schedule=schedule))
        for precision in ("bf16-mixed", "bf16-true", "16-mixed", "32-true")
        for case, schedule in (("gpt", "1f1b"), ("gpt_tied", "zbv"))
    ]
    + [
        Row("gqa_sdpa", layout, dict(precision=precision))
        for precision, layout in (("bf16-mixed", "sp2"), ("bf16-true", "sp2-ring"), ("16-mixed", "sp2-ring"))
    ]
)


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
    layout, options = dict(LAYOUTS[row.layout]), dict(row.options)
    data_size = layout.get("data_parallel_size", 1)
    world_size = prod(size for name, size in layout.items() if name.endswith("_size"))
    if "schedule" in options:
        layout["schedule"] = options.pop("schedule")
    return data_size, pool.run(
        world_size, equality.run, row.case, layout=layout, folder=str(folder), data_size=data_size, **options
    )


def _of_one_device(row: Row) -> dict[str, Any]:
    return {name: option for name, option in row.options.items() if name != "schedule"}


@long("mlp_gradient_penalty-tp2", "gan-tp2")
@slow(
    but=[
        "gan-tp2",
        "gpt-dp2",
        "gpt_tied-sp2",
        "hf_llama-tp2",
        "mlp_batch_norm-tp2",
        "mlp_gradient_penalty-tp2",
        "mlp_hooked-pp2",
    ]
)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_layout_never_changes_results(
    row: Row, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    data_size, results = _train(pool, row, tmp_path)
    reference = one_device(row.case, data_size=data_size, **_of_one_device(row))
    broken = {rank: equality.compare(reference, result, data_size) for rank, result in enumerate(results)}
    lines = [f"rank {rank}: {line}" for rank, found in broken.items() for line in found]
    assert not lines, "\n" + "\n".join(lines[:40]) + f"\n{len(lines)} in all"


@long()
@slow(but=["gpt-tp2-precision=bf16-mixed"])
@pytest.mark.parametrize("row", LOW, ids=str)
def test_in_low_precision_a_layout_errs_at_most_twice_as_much_as_one_device(
    row: Row, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    # Where a gradient is nearly zero, AdamW with its small eps makes a full step of the noise: a matter of luck.
    row = replace(row, options={**row.options, "eps": 0.01})
    lines = _errors(row, pool, one_device, tmp_path)
    assert not lines, "\n" + "\n".join(lines)


SEEDS = (1234, 10, 20, 30)
"""A few losses are far, or one device's near, by luck, too: of one run they say little."""


def _errors(row: Row, pool: Pool, one_device: Callable[..., Result], folder: Path) -> list[str]:
    runs: dict[int, list[tuple[Result, Result, Result]]] = {}
    data_size = 1
    for seed in SEEDS:
        seeded = replace(row, options={**row.options, "seed": seed})
        data_size, results = _train(pool, seeded, folder / str(seed))
        exact = one_device(row.case, data_size=data_size, eps=0.01, seed=seed)
        single = one_device(row.case, data_size=data_size, **_of_one_device(seeded))
        for rank, result in enumerate(results):
            runs.setdefault(rank, []).append((exact, single, result))
    return [f"rank {rank}: {line}" for rank, of in runs.items() for line in equality.compare_low_of(of, data_size)]


def _drawing(case: str, schedule: str) -> tuple[Result, Tensor]:
    """The result, and where torch's generator stands after it."""
    result = equality.run(case, layout=dict(pipeline_parallel_size=2, microbatches=2, schedule=schedule))
    return result, torch.get_rng_state()


@long()
@slow(but=["vae-1f1b"])
@pytest.mark.parametrize(("case", "schedule"), [("gpt_residual_dropout", "zbv"), ("vae", "1f1b")])
def test_draws_of_a_pipeline_repeat_bitwise_and_leave_all_generators_alike(
    case: str, schedule: str, pool: Pool
) -> None:
    # Draws are keyed by stage and microbatch, so one device's masks can't be had.
    first, second = (pool.run(2, _drawing, case, schedule) for _ in range(2))
    assert [equality.compare(one, other, tolerance=0.0) for (one, _), (other, _) in zip(first, second)] == [[], []]
    states = [state for _, state in [*first, *second]]
    assert all(torch.equal(states[0], state) for state in states)


def test_every_case_trains_on_one_device_the_same_way_twice(one_device: Callable[..., Result], pool: Pool) -> None:
    """The comparison itself: equal runs are found equal, a changed entry is found."""
    reference = one_device("gpt")
    (again,) = pool.run(1, equality.run, "gpt")
    assert equality.compare(reference, again) == []
    again.checkpoint["state_dict"]["head.weight"][3, 4] += 2e-9 * max(w.abs().max() for w in reference.after.values())
    assert [line.split(":")[0] for line in equality.compare(reference, again)] == ["weight head.weight"]
