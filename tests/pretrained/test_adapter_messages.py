"""What moves when adapters are trained, counted by purpose: what their base layers need, and little more.

A Llama of L layers whose base is frozen, with adapters of rank r on all of its linear layers; b·s tokens, h features.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.pretrained.adapted import BATCH, LENGTH, trained

L, r, h, FFN, KV = 2, 4, 32, 64, 16
TOKENS = BATCH * LENGTH
STREAM, LOW = TOKENS * h, TOKENS * r  # an activation between layers, and one between the two halves of an adapter
ADAPTERS = L * r * ((h + h) + 2 * (h + KV) + (h + h) + 2 * (h + FFN) + (FFN + h))  # elements of their weights

LAST = 1  # layers above the first adapter, where this is in the last
LORA = {
    ("enter", "all_reduce", STREAM): 2 * L + 1 - 1,  # backward: as the base's; the frozen embedding asks for none
    ("leave", "all_reduce", STREAM): 2 * L + 1,  # forward: as the base's
    ("enter", "all_reduce", LOW): 5 * L,  # backward: q, k, v, gate, up
    ("leave", "all_reduce", LOW): 2 * L,  # forward: o, down
    ("loss", "all_reduce", TOKENS): 3,
}
EXPECTED: dict[str, dict[tuple[str, str, int], int]] = {
    "lora": LORA,
    "lora_last": LORA
    | {
        ("enter", "all_reduce", STREAM): 2 * LAST,
        ("enter", "all_reduce", LOW): 5 * LAST,
        ("leave", "all_reduce", LOW): 2 * LAST,
    },
    "dora": LORA
    | {
        ("leave", "all_reduce", LOW): 2 * L + L,  # and o's update as a matrix, of h·r as many elements
        ("leave", "all_reduce", FFN * r): L,  # down's
        ("leave", "all_reduce", h): 2 * L,  # the norms of their rows
    },
    "ia3": {key: count for key, count in LORA.items() if key[2] != LOW},
}


def _calls(rank: dict[str, Any], *axes: str) -> Counter[tuple[str, str, int]]:
    """How many calls in a step, by purpose, verb and elements; the clip's apart."""
    return Counter((t.purpose, t.verb, t.numel) for t in rank["transfers"] if t.axis in axes and t.purpose != "clip")


@long()
@slow(but=["lora"])
@pytest.mark.parametrize("adapter", EXPECTED)
def test_activations_move_as_often_as_the_base_needs(pool: Pool, adapter: str) -> None:
    for rank in pool.run(2, trained, adapter, "tensor"):
        assert _calls(rank, "tensor") == EXPECTED[adapter]
        assert not [t for t in rank["transfers"] if t.purpose in ("gradients", "parameters", "gather", "scatter")]
        assert rank["state_elements"] == 2 * rank["trained_elements"]
        if adapter == "lora":  # an all-reduce among two sends its bytes once
            sent = sum(t.sent for t in rank["transfers"] if t.purpose in ("enter", "leave"))
            assert sent == ((4 * L + 1) * STREAM + 7 * L * LOW) * 8


@slow()
def test_a_sharded_residual_stream_moves_as_many_bytes(pool: Pool) -> None:
    for rank in pool.run(2, trained, "lora", "residual"):
        assert _calls(rank, "tensor") == {
            ("enter", "all_gather", STREAM): 2 * L + 1,
            ("leave", "reduce_scatter", STREAM): 2 * L + 1,
            ("enter", "reduce_scatter", STREAM): 2 * L + 1 - 1,
            ("leave", "all_gather", STREAM): 2 * L,
            ("enter", "all_gather", LOW): 5 * L,
            ("enter", "reduce_scatter", LOW): 5 * L,
            ("leave", "reduce_scatter", LOW): 2 * L,
            ("leave", "all_gather", LOW): 2 * L,
            ("loss", "all_reduce", TOKENS): 4,
        }


@slow(but=["data"])
@pytest.mark.parametrize("layout", ["data", "sequence", "fsdp"])
def test_gradients_that_move_are_those_of_adapters(pool: Pool, layout: str) -> None:
    for rank in pool.run(2, trained, "lora", layout, False, 1 if layout == "sequence" else 2):
        moved = _calls(rank, "data", "gradients")
        flags = L * 7 * 2  # whether there is a gradient: two weights a layer that has an adapter
        if layout == "fsdp":
            scattered = [t for t in rank["transfers"] if t.verb == "reduce_scatter"]
            assert {t.purpose for t in scattered} == {"parameters"}
            assert sum(t.nbytes for t in scattered) == (ADAPTERS + 2 * flags) * 8  # to each of the two ranks
            assert rank["state_elements"] == ADAPTERS  # two a weight, of which this rank has half
        else:
            assert moved["gradients", "all_reduce", ADAPTERS + flags] == 1
            assert {purpose for purpose, _, _ in moved} == {"gradients"}
            assert rank["state_elements"] == 2 * ADAPTERS


@slow()
@pytest.mark.parametrize("adapter", ["lora", "lora_last", "lora_first"])
def test_no_gradient_crosses_to_stages_before_the_first_adapter(pool: Pool, adapter: str) -> None:
    first, last = pool.run(2, trained, adapter, "pipeline")
    crossed = [t for t in first["transfers"] if t.purpose == "gradients of activations"]
    assert len(crossed) == (0 if adapter == "lora_last" else 2)  # of each of two microbatches
    assert all(t.numel == STREAM // 2 for t in crossed)
    assert not [t for rank in (first, last) for t in rank["transfers"] if t.purpose == "gradients" and t.nbytes > 64]
