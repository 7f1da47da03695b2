"""Layers on devices of the user's choice train to what one device trains to; see `tests.helpers.equality`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import equality
from tests.helpers.equality import Result
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.law.test_equality import one_device as one_device  # a fixture

SEED = {"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 0}
BRANCHES = {"trunk": 0, "left": 0, "middle": 1, "right": 1, "join": 0, "head": 1}
UNET = {"down?": 0, "middle": 1, "up": 0, "last": 1}
LSTM = {"embed": 0, "rnn": 1, "head": 1}
GPT = {"tokens": 0, "positions": 1, "blocks.0": 0, "blocks.1": 1, "head": 0}  # `norm` follows the block before it
WRITES = {"first": 0, "second": 1, "eats": 0, "third": 1}


@dataclass(frozen=True)
class Row:
    """A model, where its layers are, and how the Trainer is set up."""

    case: str
    placement: Any
    options: dict[str, Any] = field(default_factory=dict)  # of the strategy and of `equality.run`

    @property
    def places(self) -> int:
        return max(self.placement.values()) + 1 if isinstance(self.placement, dict) else 2

    @property
    def copies(self) -> int:
        return int(self.options.get("data_parallel_size", 1))

    def __str__(self) -> str:
        places = "".join(map(str, self.placement.values())) if isinstance(self.placement, dict) else self.placement
        return "-".join([self.case, places, *(f"{key}={value}" for key, value in self.options.items())])


ROWS = [
    # two devices
    Row("mlp_back_and_forth", SEED),
    Row("mlp_back_and_forth", SEED, dict(microbatches=3)),  # of batches of 4
    Row("mlp_branches", BRANCHES),
    Row("mlp_branches", BRANCHES, dict(microbatches=2)),
    Row("unet", UNET),
    Row("unet", UNET, dict(microbatches=2)),
    Row("lstm", LSTM, dict(microbatches=2)),
    Row("lstm_cell", {"embed": 0, "cell": 0, "head": 1}),  # back and forth at every token
    Row("gpt_tied", GPT, dict(microbatches=2)),
    # three
    Row("mlp_back_and_forth", {"fc1": 0, "fc2": 2, "fc3": 1, "fc4": 2}),
    Row("mlp_branches", {"trunk": 2, "left": 0, "middle": 1, "right": 2, "join": 0, "head": 1}, dict(microbatches=2)),
    Row("unet", {"down1": 0, "down2": 1, "middle": 2, "up": 1, "last": 0}),
    Row("lstm", {"embed": 0, "rnn": 1, "head": 2}),
    Row("gpt_tied", {"tokens": 1, "blocks.0": 2, "blocks.1": 0, "head": 2}, dict(microbatches=2)),
    # what steps do: weights and values used in several places, denominators, state, hooks, other lengths, mixed samples
    Row("mlp_writes_in_place", WRITES),
    Row("mlp_writes_in_place", WRITES, dict(microbatches=2)),
    Row("mlp_writes_into_view", {"up": 0, "norm": 1, "down": 0}, dict(microbatches=2)),
    Row("mlp_writes_into_view", {"up": 0, "norm": 1, "down": 1}),
    Row("gpt_tied_matmul", {"tokens": 0, "blocks.*": 1, "norm": 0}),
    Row("gpt_shared_blocks", {"tokens": 0, "blocks": 1, "head": 0}),
    Row("mlp_reused_linear", {"net.first": 0, "net.middle": 1, "net.last": 0}),
    Row("loss_ragged", {"blocks.1": 1, "tokens": 0}, dict(microbatches=2)),
    Row("loss_accuracy", "balanced", dict(microbatches=2)),
    Row("encoder_decoder", {"encoder": 0, "decoder": 1}, dict(microbatches=2)),
    Row("mlp_batch_norm", {"net.0": 0, "net.1": 1, "net.3": 0}),
    Row("mlp_statistics", {"net.0": 0, "net.2": 1, "net.4": 0, "net.6": 1}),
    Row("mlp_hooked", "balanced"),
    Row("mlp_l2", {"net.0": 1, "net.2": 0, "net.4": 1}),
    Row("mlp_target_network", {"net.[02]": 0, "target.[02]": 0, "net.[46]": 1, "target.[46]": 1}),
    Row("contrastive", "balanced"),
    Row("hf_t5", {"model.encoder": 0, "model.decoder": 1}),
    # clipping, accumulation, copies of the model
    Row("mlp_branches", BRANCHES, dict(clip=0.001, clip_algorithm="value")),
    Row("lstm", LSTM, dict(accumulate=3)),
    Row("mlp_back_and_forth", SEED, dict(data_parallel_size=2, accumulate=2)),
    Row("gpt_tied", GPT, dict(data_parallel_size=2, microbatches=2)),
]
STRATEGY = ("microbatches", "data_parallel_size")
LOW = [
    Row("gpt", GPT, dict(microbatches=2, precision=precision))
    for precision in ("bf16-mixed", "16-mixed", "bf16-true", "32-true")
]


def _train(pool: Pool, row: Row, folder: Path, **more: Any) -> list[Result]:
    layout = {"placement": row.placement} | {key: row.options[key] for key in STRATEGY if key in row.options}
    options = {key: value for key, value in row.options.items() if key not in STRATEGY}
    return pool.run(
        row.places * row.copies, equality.run, row.case, layout=layout, folder=str(folder), data_size=row.copies,
        **options, **more,
    )  # fmt: skip


def _reference(one_device: Callable[..., Result], row: Row, **more: Any) -> Result:
    options = {key: value for key, value in row.options.items() if key not in STRATEGY}
    return one_device(row.case, data_size=row.copies, **options, **more)


@long()
@slow(but=["mlp_reused_linear-010"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_placement_never_changes_results(
    row: Row, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    reference = _reference(one_device, row)
    results = _train(pool, row, tmp_path)
    broken = {rank: equality.compare(reference, result, row.copies) for rank, result in enumerate(results)}
    lines = [f"rank {rank}: {line}" for rank, found in broken.items() for line in found]
    assert not lines, "\n" + "\n".join(lines[:40]) + f"\n{len(lines)} in all"


@slow()
@pytest.mark.parametrize("row", LOW, ids=lambda row: row.options["precision"])
def test_in_low_precision_a_placement_errs_at_most_twice_as_much_as_one_device(
    row: Row, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    single, exact = _reference(one_device, row, eps=0.01), one_device(row.case, eps=0.01)
    results = _train(pool, row, tmp_path, eps=0.01)
    lines = [f"rank {i}: {line}" for i, one in enumerate(results) for line in equality.compare_low(exact, single, one)]
    assert not lines, "\n" + "\n".join(lines)


@long()
@slow("lstm-011", "unet-0101")
@pytest.mark.parametrize("row", [Row("mlp_back_and_forth", SEED), Row("lstm", LSTM), Row("unet", UNET)], ids=str)
def test_with_one_microbatch_the_checkpoint_is_bitwise_that_of_one_device(
    row: Row, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    # Without clipping, whose norm sums over devices in another order.
    results = _train(pool, row, tmp_path, clip=None)
    reference = _reference(one_device, row, clip=None)
    assert equality.compare(reference, results[0], tolerance=0.0) == []
