"""What a dry run says that a rank writes to a distributed checkpoint, against the directories of real runs."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, dry_run
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.planner.counted import batch_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "fsdp": {"data_parallel_size": 2, "data_parallel": "fsdp"},
}


class _Saves(Callback):
    """While the run goes on: after it each rank holds all."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def _save(case: str, layout: dict[str, Any], path: str) -> None:
    model = MODELS[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=HybridParallelStrategy(**layout, save_distributed_checkpoint=True),
            max_steps=2, callbacks=[_Saves(path)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model.module(), DataLoader(model.data(0), batch_size=model.batch_size))  # type: ignore[arg-type]


def _written(path: Path) -> list[tuple[int, int]]:
    """By each rank: bytes of tensors, and how many pieces; a tied weight is there once, by all of its names."""
    metadata = FileSystemReader(path).read_metadata()
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for index, stored in metadata.storage_data.items():
        tensor: Any = metadata.state_dict_metadata.get(index.fqn)
        if not hasattr(tensor, "chunks"):
            continue
        (chunk,) = (x for x in tensor.chunks if x.offsets == index.offset)
        size = chunk.sizes.numel() * tensor.properties.dtype.itemsize
        found[int(stored.relative_path[2])][stored.offset] = size
    return [(sum(sizes.values()), len(sizes)) for _, sizes in sorted(found.items())]


@slow("gpt-tensor", "unet-data")
@pytest.mark.parametrize(
    ("case", "name"), [("gpt", "tensor"), ("gpt_tied", "fsdp"), ("gpt_tied", "tensor"), ("unet", "data")]
)
def test_each_rank_writes_what_was_said(case: str, name: str, pool: Pool, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    pool.run(2, _save, case, layout, str(tmp_path / "last.ckpt"))
    told = [dry_run(MODELS[case].module, batch_of(case), layout, devices=2, rank=rank).saved for rank in range(2)]
    assert told == _written(tmp_path / "last.ckpt")


def test_of_a_pipeline_it_is_not_known() -> None:
    layout = {"pipeline_parallel_size": 2, "microbatches": 2}
    found = dry_run(MODELS["gpt"].module, batch_of("gpt"), layout, devices=2)
    assert found.saved is None and found.as_dict()["distributed_checkpoint"] is None
