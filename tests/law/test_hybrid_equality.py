"""Products of axes train to what one device trains to; see `tests.helpers.equality`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import equality
from tests.helpers.equality import Result
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.law.test_equality import one_device as one_device  # a fixture

SP_TP = dict(sequence_parallel_size=2, tensor_parallel_size=2)
PP_TP = dict(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2)
DP = dict(data_parallel_size=2)
PP_SP = dict(pipeline_parallel_size=2, sequence_parallel_size=2, microbatches=2)
GPT = {"tokens": 0, "positions": 1, "blocks.0": 0, "blocks.1": 1, "head": 0}

ROWS: list[tuple[str, dict[str, Any]]] = [
    *((case, SP_TP) for case in ("gpt_lora", "hf_llama", "vit")),
    ("gpt_tied", SP_TP | dict(attention="ring")),
    *((case, PP_TP) for case in ("gpt_tied", "encoder_decoder", "hf_t5")),
    ("gpt_tied", PP_TP | dict(schedule="zbv")),
    ("gpt", PP_TP | dict(shard_residual=True)),
    ("gpt_checkpointed", PP_TP | dict(shard_residual=True)),
    *((case, PP_SP) for case in ("loss_ignore", "encoder_decoder", "lstm")),
    ("gpt_tied", PP_SP | dict(schedule="interleaved_zero_bubble", attention="ring")),
    ("gpt", DP | dict(sequence_parallel_size=2)),
    ("gpt", DP | SP_TP),
    ("gpt_tied", DP | PP_SP),
    ("loss_ignore", DP | PP_TP),
    ("gpt_tied", PP_SP | SP_TP),
    ("gpt_tied", DP | PP_SP | SP_TP),
    # layers placed by hand, each on several ranks
    ("gpt_tied", PP_TP | dict(placement=GPT)),
    ("gpt_tied", PP_SP | dict(placement=GPT)),
    ("encoder_decoder", PP_TP | dict(placement={"encoder": 0, "decoder": 1})),
]


def _name(row: tuple[str, dict[str, Any]]) -> str:
    options = (f"{name.split('_')[0]}={value}" for name, value in row[1].items() if name != "placement")
    return "-".join([row[0], *options, *["placed"] * ("placement" in row[1])])


@slow(but=["gpt-data=2-sequence=2"])
@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_a_product_of_axes_never_changes_results(
    row: tuple[str, dict[str, Any]], pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    case, layout = row
    data_size = layout.get("data_parallel_size", 1)
    ranks = prod(size for name, size in layout.items() if name.endswith("_size"))
    results = pool.run(
        ranks, equality.run, case, layout=dict(layout, hybrid=True), folder=str(tmp_path), data_size=data_size
    )
    reference = one_device(case, data_size=data_size)
    broken = {rank: equality.compare(reference, result, data_size) for rank, result in enumerate(results)}
    lines = [f"rank {rank}: {line}" for rank, found in broken.items() for line in found]
    assert not lines, "\n" + "\n".join(lines[:40]) + f"\n{len(lines)} in all"
