"""What a dry run counts of each rank, against what a plan says of it, to the byte; plans against real runs in
`tests.planner.test_counted`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_par import dry_run
from lightning_par.planner.messages.dried import by_axis
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.models import MODELS
from tests.helpers.slow import long, slow
from tests.planner.counted import CASES, LAYOUTS, Counted, batch_of, differences, planned, ranks_of
from tests.planner.test_counted import CLIPPED, IMPOSSIBLE

ROWS = [(case, name) for case in CASES for name in LAYOUTS if (case, name) not in IMPOSSIBLE]
DEFAULT = ["gpt-ring"]


@long()
@slow(but=DEFAULT)
@pytest.mark.parametrize(("case", "name"), ROWS, ids=[f"{case}-{name}" for case, name in ROWS])
def test_each_rank_holds_and_sends_what_was_said(case: str, name: str) -> None:
    layout = LAYOUTS[name]
    counted = [dried(case, layout, rank) for rank in range(ranks_of(layout))]
    lines = differences(counted, planned(case, layout))
    assert not lines, "\n" + "\n".join(lines)


def dried(
    case: str, layout: dict[str, Any], rank: int, precision: str = "32-true", clip: float | None = None
) -> Counted:
    torch.manual_seed(0)
    found = dry_run(
        MODELS[case].module, batch_of(case), layout, devices=ranks_of(layout), rank=rank, precision=precision,
        gradient_clip_val=clip,
    )  # fmt: skip
    return Counted(found.parameters, found.gradients, found.optimizer, by_axis(found.sent), found.sent)


MIXED = [("gpt", "tensor"), ("gpt", "1f1b"), ("mlp_deep", "fsdp"), ("hf_llama", "ring")]


@long()
@slow(but=["mlp_deep-fsdp"])
@pytest.mark.parametrize(("case", "name"), MIXED, ids=[f"{case}-{name}" for case, name in MIXED])
def test_autocast_moves_what_was_said(case: str, name: str) -> None:
    layout = LAYOUTS[name]
    counted = [dried(case, layout, rank, "bf16-mixed") for rank in range(ranks_of(layout))]
    lines = differences(counted, planned(case, layout, "bf16-mixed"))
    assert not lines, "\n" + "\n".join(lines)


@long()
@slow(but=["mlp_deep-pipeline_tensor"])
@pytest.mark.parametrize(("case", "name"), CLIPPED, ids=[f"{case}-{name}" for case, name in CLIPPED])
def test_the_clip_sends_what_was_said(case: str, name: str) -> None:
    layout = LAYOUTS[name]
    counted = [dried(case, layout, rank, clip=1.0) for rank in range(ranks_of(layout))]
    lines = differences(counted, planned(case, layout, clip=1.0))
    assert not lines, "\n" + "\n".join(lines)


def test_the_peak_has_what_an_lstm_keeps_for_backward() -> None:
    module: Any = MODELS["lstm"].module()
    with LiveBytes() as live:
        module.loss(batch_of("lstm")).backward()
    found = dry_run(MODELS["lstm"].module, batch_of("lstm"), {"data_parallel_size": 2}, devices=2)
    assert found.peak - found.kept == pytest.approx(live.peak, rel=0.05)
