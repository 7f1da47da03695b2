"""With ``draws="one_device"`` the law holds with dropout on, and all generators stand where one device's stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers import equality
from tests.helpers.differences import differences
from tests.helpers.equality import Result
from tests.helpers.models import DRAWING
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_parallel_size=2),
    "tp2-residual": dict(tensor_parallel_size=2, shard_residual=True),
    "sp2-ring": dict(sequence_parallel_size=2, attention="ring"),
    "sp2-ulysses": dict(sequence_parallel_size=2, attention="ulysses"),
    "sp2-gather": dict(sequence_parallel_size=2, attention="all_gather"),
    "sp4-product": dict(sequence_parallel_size=4, attention={"ulysses": 2, "ring": 2}),
    "sp2-tp2": dict(hybrid=True, sequence_parallel_size=2, tensor_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2, microbatches=4),
    "pp2-whole": dict(pipeline_parallel_size=2, microbatches=1),
    "pp2-uneven": dict(pipeline_parallel_size=2, microbatches=3),
    "placement": dict(placement="balanced"),
    "pp2-tp2": dict(hybrid=True, pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2),
    "pp2-sp2": dict(hybrid=True, pipeline_parallel_size=2, sequence_parallel_size=2, microbatches=2),
    **{f"pp2-{name}": dict(pipeline_parallel_size=2, microbatches=4, schedule=name) for name in SCHEDULES},
    "pp4-zbv": dict(pipeline_parallel_size=4, microbatches=4, schedule="zbv"),
    "tp1": dict(tensor_parallel_size=1),
    "fsdp-sp2": dict(hybrid=True, sequence_parallel_size=2, data_parallel="fsdp"),
}
SCHEDULED = [*(f"pp2-{name}" for name in SCHEDULES if name != "1f1b"), "pp4-zbv"]
_SIZES = ("tensor_parallel_size", "sequence_parallel_size", "pipeline_parallel_size")


def _run(case: str, layout: dict[str, Any] | None, folder: str, **options: Any) -> tuple[Result, Tensor]:
    """The result, and where torch's generator stands after it."""
    layout = None if layout is None else {**layout, "draws": "one_device"}
    return equality.run(case, layout, folder, **options), torch.get_rng_state()


def compared(pool: Pool, case: str, layout: dict[str, Any], folder: Path, **options: Any) -> list[str]:
    ((reference, state),) = pool.run(1, _run, case, None, str(folder / "one"), **options)
    ranks = 2 if "placement" in layout else 1
    for size in _SIZES:
        ranks *= layout.get(size, 1)
    found = []
    for rank, (result, stands) in enumerate(pool.run(ranks, _run, case, layout, str(folder), **options)):
        found += [f"rank {rank}: {line}" for line in equality.compare(reference, result)]
        if not torch.equal(state, stands):
            found.append(f"rank {rank}: torch's generator does not stand where one device's does")
    return found


CASES = [case for case in DRAWING if case != "draws_by_sign"]  # which no pipeline can do
TENSORS = [(case, layout) for case in CASES for layout in ("tp2", "tp2-residual")]
SEQUENCES = [
    *(("gpt_drops", layout) for layout in LAYOUTS if "sp" in layout and "p2-tp" not in layout and "pp" not in layout),
    *((case, "sp2-ring") for case in CASES if case != "gpt_drops"),
]
PIPELINES = [
    *((case, layout) for case in CASES for layout in ("pp2", "pp2-whole")),
    *((case, layout) for case in ("gpt_drops", "gpt_drops_checkpointed") for layout in SCHEDULED),
    *((case, layout) for case in ("gpt_drops", "encoder_drops") for layout in ("pp2-tp2", "pp2-sp2")),
    *((case, "placement") for case in ("gpt_drops", "lstm_drops", "draws", "vae_drops", "hf_bert_drops")),
    ("gpt_drops", "pp2-uneven"),
    ("draws", "pp2-uneven"),
]
ROWS = [*TENSORS, *PIPELINES, *SEQUENCES, ("gpt_drops", "sp2-tp2"), ("gpt_drops", "tp1"), ("encoder_drops", "sp2-tp2")]


@long()
@slow(but=["gpt_drops-pp2"])
@pytest.mark.parametrize(("case", "layout"), ROWS, ids=[f"{case}-{layout}" for case, layout in ROWS])
def test_a_layout_draws_what_one_device_draws(case: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    lines = compared(pool, case, LAYOUTS[layout], tmp_path)
    assert not lines, "\n" + "\n".join(lines[:20])


def test_a_kind_of_draws_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="draws must be 'per_shard' .* or 'one_device' .* got 'same'"):
        HybridParallelStrategy(draws="same")  # type: ignore[arg-type]


@slow()
def test_what_draws_more_or_fewer_numbers_by_values_gathers_or_is_refused(pool: Pool, tmp_path: Path) -> None:
    assert not compared(pool, "draws_by_sign", LAYOUTS["tp2"], tmp_path)
    with pytest.raises(RanksFailedError, match="draws as many random numbers as values of the model say.*per_shard"):
        compared(pool, "draws_by_sign", LAYOUTS["pp2-whole"], tmp_path)


REPLICAS = {
    "dp2-tp2": dict(hybrid=True, data_parallel_size=2, tensor_parallel_size=2),
    "dp2-pp2": dict(hybrid=True, data_parallel_size=2, pipeline_parallel_size=2, microbatches=2),
    "fsdp2": dict(hybrid=True, data_parallel_size=2, data_parallel="fsdp"),
}


@slow()
@pytest.mark.parametrize("layout", REPLICAS)
def test_replicas_draw_alike_whatever_their_layout(layout: str, pool: Pool, tmp_path: Path) -> None:
    """One device that accumulates draws for one replica's batch after the other's: it is no reference."""
    plain = pool.run(2, _run, "gpt_drops", dict(hybrid=True, data_parallel_size=2), str(tmp_path / "plain"))
    ranks = 2 if layout == "fsdp2" else 4
    found = []
    for rank, (result, stands) in enumerate(
        pool.run(ranks, _run, "gpt_drops", REPLICAS[layout], str(tmp_path / layout))
    ):
        reference, state = plain[result.replica]
        found += [f"rank {rank}: {line}" for line in equality.compare(reference, result)]
        assert torch.equal(state, stands)
    assert not found, "\n".join(found[:20])


def _epochs(
    layout: str, folder: str, epochs: int, resumes: bool = False, directory: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights after so many epochs, in the second of which the run may begin, and where the generator stands."""
    torch.manual_seed(9 if resumes else 1)
    wanted: Any = {**LAYOUTS[layout], "draws": "one_device", "save_distributed_checkpoint": directory}
    wanted.pop("hybrid", None)
    trainer = Trainer(
        strategy=HybridParallelStrategy(**wanted), accelerator="cpu", devices=2, max_epochs=epochs,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    case = DRAWING["gpt_drops"]
    module = case.module().double()  # else Lightning loads weights in float32
    samples: Any = case.data(0)[:16]
    checkpoint = Path(folder) / "first"
    trainer.fit(module, DataLoader(samples, 4, shuffle=True), ckpt_path=checkpoint if resumes else None)
    if epochs == 1:
        trainer.save_checkpoint(checkpoint)
    return {name: x.detach().clone() for name, x in module.state_dict().items()}, torch.get_rng_state()


@long()
@slow(but=["tp2-pp2-True"])
@pytest.mark.parametrize(
    ("first", "then", "directory"),
    [("tp2", "pp2", True), ("pp2", "sp2-ring", True), ("sp2-ulysses", "tp2-residual", True), ("pp2", "tp2", False)],
)
def test_a_run_that_goes_on_under_another_layout_goes_on_with_the_same_masks(
    first: str, then: str, directory: bool, pool: Pool, tmp_path: Path
) -> None:
    weights, state = pool.run(2, _epochs, first, str(tmp_path), 2)[0]
    pool.run(2, _epochs, first, str(tmp_path), 1, directory=directory)
    for found, stands in pool.run(2, _epochs, then, str(tmp_path), 2, True, directory):
        assert not differences(weights, found, 1e-9)
        assert torch.equal(state, stands)


@long()
@slow(but=["tensor"])
@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_compiled_code_that_draws_is_refused(strategy: str, pool: Pool) -> None:
    for said in pool.run(2, _compiled, strategy):
        assert "compiled code draws numbers of its own" in said and "draws='per_shard'" in said


def _compiled(strategy: str) -> str:
    wanted: Any = {f"{strategy}_parallel_size": 2}
    trainer = Trainer(
        strategy=HybridParallelStrategy(**wanted, draws="one_device"), accelerator="cpu", devices=2, max_steps=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    case = DRAWING["gpt_drops"]
    module: Any = case.module()
    for block in module.blocks:
        block.compile(backend="eager")
    samples: Any = case.data(0)[:4]
    try:
        trainer.fit(module, DataLoader(samples, 4))
    except Exception as error:
        return str(error)
    return "it trained"
