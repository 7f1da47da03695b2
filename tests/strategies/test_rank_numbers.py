"""Numbers of ranks in the user's hooks and samplers: what is computed with them is one device's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_par.strategies.rank_numbers import CopyRank, Count, RankInStep
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

SAMPLES, BATCH = 8, 2


class Sum(pl.LightningModule):
    def __init__(self, sampler: str) -> None:
        super().__init__()
        self.sampler, self.first, self.second = sampler, nn.Linear(4, 4), nn.Linear(4, 1)
        self.seen: list[float] = []
        self.mean = 0.0
        self.batch = BATCH

    def setup(self, stage: str) -> None:
        """As Lightning's example of ImageNet: a batch's samples are shared out among devices."""
        strategy: Any = self.trainer.strategy
        self.batch = BATCH * 2 // (self.trainer.num_devices * self.trainer.num_nodes)
        assert self.batch == BATCH * 2 // (strategy.num_processes * strategy.num_nodes)
        assert self.trainer.num_devices == strategy.num_processes == 2, "a comparison is of processes"

    def train_dataloader(self) -> Any:
        data = torch.arange(float(SAMPLES))[:, None].expand(-1, 4)
        if not self.sampler:
            return DataLoader(data, batch_size=BATCH)
        sampler: Any = DistributedSampler(data, shuffle=False)  # type: ignore[arg-type]
        if self.sampler == "batches":
            return DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH, False))  # type: ignore[arg-type]
        return DataLoader(data, batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch[:, 0].tolist()
        return self.second(self.first(batch).relu()).sum()

    def on_train_epoch_end(self) -> None:
        self.mean = float(self.all_gather(torch.tensor(float(sum(self.seen)))).sum() / self.trainer.world_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Counting(Callback):
    """As users write it: samples that all ranks have seen, and what one process alone does."""

    def __init__(self) -> None:
        self.samples, self.ranks, self.printed = 0, 0, ""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.samples += len(batch) * trainer.world_size
        self.ranks += trainer.global_rank == 1
        self.printed = f"{trainer.global_rank} of {trainer.world_size}"

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}


def _counted(strategy: str, sampler: str) -> Any:
    counting, module = Counting(), Sum(sampler)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, callbacks=counting,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=not sampler,
    )  # fmt: skip
    trainer.fit(module)
    return counting.samples, counting.ranks, counting.printed, module.seen, module.mean, module.batch


@slow(but=["tensor_parallel-plain", "tensor_parallel-batches"])
@pytest.mark.parametrize("sampler", ["", "samples", "batches"], ids=["plain", "samples", "batches"])
@pytest.mark.parametrize(
    "strategy", ["tensor_parallel", "pipeline_parallel", "sequence_parallel", "hybrid_parallel", "ddp"]
)
def test_samples_are_counted_and_drawn_once(pool: Pool, strategy: str, sampler: str) -> None:
    told = pool.run(2, _counted, strategy, sampler)
    replicas = 2 if strategy in ("hybrid_parallel", "ddp") else 1
    every = [float(x) for x in range(SAMPLES)]
    for rank, (samples, first, printed, seen, mean, batch) in enumerate(told):
        assert samples == SAMPLES, "each sample once"
        assert batch == 2 * BATCH // replicas, "of replicas"
        assert first == rank * SAMPLES // BATCH // replicas, "a comparison is of processes"
        assert printed == f"{rank} of 2"
        assert sorted(seen) == every if replicas == 1 else sorted(seen + told[1 - rank][3]) == every
        assert mean == sum(every) / replicas


def test_the_rank_of_a_copy_is_compared_as_its_number() -> None:
    first, second = CopyRank(0, processes=1, copies=2), CopyRank(1, processes=3, copies=2)
    assert not first and first < 1 and not first > 0 and first == 0 and first != 1
    assert second and 0 < second < 2 and second <= 1 and not second >= 2 and second == 1
    assert second == 3 and second >= 3 and second > 2.5, "beyond the copies it is the process"
    assert first < second and first != second and second == CopyRank(1, processes=3, copies=2)
    assert second == RankInStep(1, processes=2, own=3) and second < Count(2, processes=4)
    assert (second == torch.arange(3)).tolist() == (torch.arange(3) == second).tolist() == [False, True, False]
    alone = CopyRank(0, processes=1, copies=1)
    assert alone == 1 and alone == 0 and alone < 1, "as where a test lets one process fail"
