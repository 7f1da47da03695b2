"""What a plan says a rank sends and holds, against the worked example of the limits, which real runs are counted by.

L = 4 layers, h = 64 features, 16 of keys, V = 96 words, b = 2 sequences of s = 32 tokens, in single precision:
`tests.tensor.test_counts` and `tests.sequence.test_counts` count real runs of the same module by the same numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_par.planner import plan
from lightning_par.sequence import scheme
from tests.helpers.slow import long, slow
from tests.tensor.test_counts import FFN, KV, LAYERS, Counted, V, b, h, s

BATCH = torch.zeros(b, s, dtype=torch.long)


def planned(layout: dict[str, Any], mlp: str = "swiglu", devices: int = 2) -> dict[str, Any]:
    found = plan(lambda: Counted(mlp), BATCH, "8xH100", devices=devices, layout=layout)
    (one,) = found.as_dict()["layouts"]
    return dict(one)


@long()
@slow("False-gelu", "True-swiglu", "False-swiglu")
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_tensor_axis_sends_four_all_reduces_a_layer(mlp: str, sharded: bool) -> None:
    sent = planned({"tensor_parallel_size": 2, "shard_residual": sharded}, mlp)["sent"]
    labels = b * s * 8 / 2 if sharded else 0  # each rank has half of the tokens, and gathers their targets
    assert sent["tensor"] == 73_728 * 4 + 192 * 4 + labels


@long()
@slow("65536-8192")
@pytest.mark.parametrize(("small", "elements"), [(0, 12_288), (scheme.SMALL, 8_192)])
def test_a_ring_sends_keys_and_values_three_times(small: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few stay for backward: they are sent once, and their gradients."""
    monkeypatch.setattr(scheme, "SMALL", small)
    # and the loss is a mean over ranks: one number forward, one backward
    assert planned({"sequence_parallel_size": 2, "attention": "ring"})["sent"]["sequence"] == elements * 4 + 2 * 4


@long()
def test_a_pipeline_sends_the_residual_stream_there_and_its_gradient_back() -> None:
    sent = planned({"pipeline_parallel_size": 2, "microbatches": 2})["sent"]
    assert sent["pipeline"] == b * s * h * 4  # each rank one way


def test_replicas_sum_their_gradients_once() -> None:
    size = sum(p.numel() + 1 for p in Counted("swiglu").parameters())  # and whether there is one
    assert planned({"data_parallel_size": 2})["sent"]["data"] == size * 4


def test_a_rank_holds_its_part() -> None:
    module = Counted("swiglu")
    whole = sum(p.numel() for n, p in module.named_parameters() if _is_whole(n, p))
    held = whole + sum(p.numel() // 2 for n, p in module.named_parameters() if not _is_whole(n, p))
    for rank in planned({"tensor_parallel_size": 2})["ranks"]:
        assert rank["parameters"] == rank["gradients"] == held * 4
        number = len(list(module.parameters()))
        assert rank["optimizer"] == held * 8 + number * 4  # two moments, and a count of steps


def _is_whole(name: str, p: torch.Tensor) -> bool:
    return name == "positions.weight" or (p.ndim == 1 and not name.endswith(("gate.bias", "up.bias")))


def test_parts_of_replicas_are_half_of_all() -> None:
    size = sum(p.numel() for p in Counted("swiglu").parameters())
    for rank in planned({"data_parallel_size": 2, "data_parallel": "fsdp"})["ranks"]:
        assert rank["parameters"] == pytest.approx(size * 4 / 2, rel=1e-3)


def test_the_sizes_are_those_of_the_example() -> None:
    assert (LAYERS, h, KV, FFN, V, b, s) == (4, 64, 16, 172, 96, 2, 32)


@long()
def test_what_leaves_a_host_is_told_apart() -> None:
    found = planned({"data_parallel_size": 4, "tensor_parallel_size": 4}, devices=16)
    assert found["sent_between_hosts"]["tensor"] == 0  # 4 of a host's 8
    assert found["sent_between_hosts"]["data"] == found["sent"]["data"] / 2  # 2 of 4 replicas are on a host


@long()
def test_what_is_computed_again_is_sent_again() -> None:
    layout = {"tensor_parallel_size": 2}
    once, twice = (
        plan(lambda: Counted("swiglu"), BATCH, "8xH100", devices=2, layout=layout, recompute=recompute).layouts[0].sent
        for recompute in ("none", "full")
    )
    assert twice["tensor"] - once["tensor"] == 2 * LAYERS * b * s * h * 4  # a layer's two all-reduces over 2 ranks
