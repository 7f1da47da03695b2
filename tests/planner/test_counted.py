"""What a plan says that each rank holds and sends, against real runs: exactly, to the byte. See `counted`."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_par.planner.replay.replay_run import ReplayRun
from lightning_par.planner.replay.untold import UntoldError
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.counted import CASES, LAYOUTS, TWO, differences, planned, planner, ranks_of, run

UNSPREAD = {"data", "ring", "ulysses", "all_gather", "ring_4"}
"""Layouts in which each rank has all gradients whole, and knows their norm by itself."""

IMPOSSIBLE = {
    ("gpt_5_heads", "ulysses"),
    ("gpt_5_heads", "pipeline_ulysses"),
    ("lstm", "interleaved"),
    ("lstm", "zbv"),
    ("lstm", "pipeline_4"),
}
"""What the strategies refuse: heads that don't divide, more stages than modules."""

ROWS = [(case, name) for case in CASES for name in LAYOUTS if (case, name) not in IMPOSSIBLE]
DEFAULT = [
    "gpt-shard_residual", "gpt_checkpointed-fsdp_kept", "gpt_parallel-fsdp", "hf_llama-ring",
    "lstm-fsdp_pipeline", "hf_bert-pipeline_ulysses", "mlp_deep-interleaved", "gpt_5_heads-all_gather",
]  # fmt: skip


OTHERS = [
    "mlp_custom_autograd-ring", "mlp_custom_autograd-tensor", "mlp_gradient_penalty-ring", "gan-ring",
    "gan-tensor", "gan-fsdp", "hf_t5-interleaved",
    "experts-tensor", "experts-ring", "hf_mixtral-tensor", "hf_deepseek-tensor",
    "mlp_gradient_penalty-tensor", "mlp_branches-tensor", "mlp_branches-data_tensor", "mlp_writes_in_place-tensor",
    "torch_attention-fsdp", "torch_attention_5_heads-fsdp", "hf_t5-fsdp", "mlp_gradient_penalty-fsdp",
    "mlp_statistics-1f1b", "torch_attention-1f1b", "torch_attention-pipeline_tensor",
]  # fmt: skip
"""Steps that run backward, clip or ask gradients themselves; masks that layers hand to other stages; experts, which get
as many tokens in all as was said; layers that look alike, of whose values different things become; a view of a weight
that a call within another uses; a tied embedding, of which the module that it is named by is not called; stages whose
values end in buffers, or have the size of the whole batch though nothing of it."""


@long(but=["mlp_custom_autograd-ring", "mlp_gradient_penalty-fsdp"])
@slow(
    but=[
        "mlp_branches-tensor",
        "mlp_custom_autograd-ring",
        "hf_t5-fsdp",
        "mlp_gradient_penalty-fsdp",
        "mlp_statistics-1f1b",
    ]
)
@pytest.mark.parametrize("row", OTHERS)
def test_steps_of_other_kinds_send_what_was_said(row: str, pool: Pool) -> None:
    case, name = row.split("-")
    layout = LAYOUTS[name]
    lines = differences(pool.run(ranks_of(layout), run, case, layout), planned(case, layout))
    assert not lines, "\n" + "\n".join(lines)


@long()
def test_what_goes_by_masks_of_a_split_batch_is_counted() -> None:
    assert planned("hf_mixtral", LAYOUTS["ring"])[0].sent["sequence"]


def test_what_cannot_be_run_again_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(planner("mlp_branches", "32-true", None), "_sent", {})
    monkeypatch.setattr(ReplayRun, "_run", fails)
    with pytest.raises(UntoldError, match=r"can't be told: linear at .*dense\.py:\d+ can't be run .*Error: no kernel$"):
        planned("mlp_branches", LAYOUTS["tensor"])


def test_what_has_the_whole_batch_s_size_crosses_so_with_each_microbatch() -> None:
    assert [rank.sent["pipeline"] for rank in planned("torch_attention", LAYOUTS["1f1b"])] == [9216, 9216]


def test_masks_that_layers_hand_to_other_stages_are_counted() -> None:
    assert planned("hf_t5", LAYOUTS["interleaved"])[0].sent["pipeline"] == 29316


def test_what_a_step_clips_by_itself_is_counted() -> None:
    assert planned("gan", LAYOUTS["tensor"])[0].sent["tensor"] == 628


def test_gradients_that_a_step_asks_of_its_batch_are_counted() -> None:
    assert planned("mlp_gradient_penalty", LAYOUTS["tensor"])[0].sent["tensor"] == 2952


MIXED = [(case, name) for case in ("gpt", "gpt_tied", "hf_llama", "mlp_deep") for name in TWO]


@long(but=["gpt-shard_residual", "gpt_checkpointed-fsdp_kept", "gpt_parallel-fsdp"])
@slow(but=DEFAULT)
@pytest.mark.parametrize(("case", "name"), ROWS, ids=[f"{case}-{name}" for case, name in ROWS])
def test_each_rank_holds_and_sends_what_was_said(case: str, name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    lines = differences(pool.run(ranks_of(layout), run, case, layout), planned(case, layout))
    assert not lines, "\n" + "\n".join(lines)


@slow(but=["gpt_tied-fsdp"])
@pytest.mark.parametrize(("case", "name"), MIXED, ids=[f"{case}-{name}" for case, name in MIXED])
def test_what_autocast_makes_of_messages_was_said(case: str, name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    found = pool.run(ranks_of(layout), run, case, layout, "bf16-mixed")
    lines = differences(found, planned(case, layout, "bf16-mixed"))
    assert not lines, "\n" + "\n".join(lines)


CLIPPED = [(case, name) for case in ("gpt", "gpt_tied", "mlp_deep", "lstm") for name in LAYOUTS
           if (case, name) not in IMPOSSIBLE]  # fmt: skip


@long("gpt_tied-1f1b")
@slow(but=["gpt_tied-1f1b", "mlp_deep-fsdp"])
@pytest.mark.parametrize(("case", "name"), CLIPPED, ids=[f"{case}-{name}" for case, name in CLIPPED])
def test_what_the_clip_sends_was_said(case: str, name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    found = pool.run(ranks_of(layout), run, case, layout, "32-true", 1.0)
    assert any(purpose == "clip" for one in found for _, purpose in one.by_purpose) == (name not in UNSPREAD)
    lines = differences(found, planned(case, layout, "32-true", 1.0))
    assert not lines, "\n" + "\n".join(lines)
