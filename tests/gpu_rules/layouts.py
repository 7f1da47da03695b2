"""The layouts that the harness tries: every strategy, schedule and way of attention, on two and on four ranks."""

from __future__ import annotations

from typing import Any

TP, PP, SP, DP = (
    dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2, microbatches=4), dict(sequence_parallel_size=2),
    dict(data_parallel_size=2),
)  # fmt: skip
PLACES = {"tokens": 0, "positions": 1, "blocks.0": 0, "blocks.1": 1, "head": 0}

TWO: dict[str, dict[str, Any]] = {
    "tensor": TP,
    "tensor_residual": TP | dict(shard_residual=True),
    "gpipe": PP | dict(schedule="gpipe"),
    "1f1b": PP | dict(schedule="1f1b"),
    "interleaved": PP | dict(schedule="interleaved_1f1b"),
    "izb": PP | dict(schedule="interleaved_zero_bubble"),
    "zbv": PP | dict(schedule="zbv"),
    "ring": SP | dict(attention="ring"),
    "ulysses": SP | dict(attention="ulysses"),
    "all_gather": SP | dict(attention="all_gather"),
    "data": DP,
    "fsdp": DP | dict(data_parallel="fsdp"),
    "placement": dict(placement=PLACES),
}
FOUR: dict[str, dict[str, Any]] = {
    "1f1b4": PP | dict(schedule="1f1b", pipeline_parallel_size=4),
    "interleaved4": PP | dict(schedule="interleaved_1f1b", pipeline_parallel_size=4),
    "zbv4": PP | dict(schedule="zbv", pipeline_parallel_size=4),
    "ring4": SP | dict(attention="ring", sequence_parallel_size=4),
    "ulysses_ring": dict(sequence_parallel_size=4, attention={"ulysses": 2, "ring": 2}),
    "data_tensor": DP | TP,
    "pipe_tensor": PP | TP,
    "pipe_ring": PP | SP | dict(attention="ring"),
    "fsdp_pipe": DP | PP | dict(data_parallel="fsdp"),
    "fsdp_pipe_reshard": DP | PP | dict(data_parallel="fsdp", reshard_after_forward=True),
    "fsdp_tensor": DP | TP | dict(data_parallel="fsdp"),
    "data_zbv": DP | PP | dict(schedule="zbv"),
}
LAYOUTS = TWO | FOUR
"""Arguments of the hybrid strategy, which all others are presets of, by name."""


def ranks(layout: str) -> int:
    return 4 if layout in FOUR else 2
