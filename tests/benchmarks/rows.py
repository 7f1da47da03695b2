"""The rows of the table of benchmarks: what each strategy trains, and against what; see `tests.benchmarks.table`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    LayerPlacementStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from tests.benchmarks import loops, peers, pipeline_step, placement_step, sequence_step
from tests.benchmarks.measured import Against, Measured
from tests.benchmarks.meter import BYTES, PROCESSOR, SECONDS, WARM
from tests.benchmarks.peers import Here
from tests.benchmarks.pipeline_step import Sizes
from tests.benchmarks.rounds import Ratio, Rounds
from tests.benchmarks.trainer_side import QUIET

LOOP = "by hand"
MICROBATCHES = 4


def optimizer_of(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    # An eps this large lets a gradient's size show in the weights: AdamW's own hides a factor.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-2)


class GPT(pipeline_step.GPT):
    optimizer_of = staticmethod(optimizer_of)


class BackAndForth(placement_step.BackAndForth):
    optimizer_of = staticmethod(optimizer_of)


@dataclass(frozen=True)
class Size:
    """Of a row's model and its batch.

    Args:
        gpt: of all rows but placement.
        sequence: of the rows that split a sequence: few samples that are long.
        placement: its width.
    """

    gpt: Sizes
    sequence: Sizes
    placement: int


SIZES = {
    "tiny": Size(Sizes(16, 8, 16, 2, 4, 4), Sizes(16, 16, 16, 1, 1, 4), 16),
    "small": Size(Sizes(32, 32, 64, 4, 4, 8), Sizes(32, 64, 64, 4, 1, 8), 32),
    "large": Size(Sizes(384, 128, 1024, 4, 4, 48), Sizes(384, 1024, 1024, 2, 1, 48), 1024),
}


@dataclass(frozen=True)
class Row:
    """A strategy, and what it is measured against.

    Args:
        strategy: makes ours.
        loop: makes the loop by hand of a copy of the model.
        peers: make the stock ones, by name; where there is none, why.
        own_samples: whether each rank trains on samples of its own.
        long: whether it trains on few samples that are long.
        ranks: how many it takes, if not as many as asked for.
    """

    strategy: Callable[[Sizes, int], Any]
    loop: Callable[[Any, Sizes, int], Any]
    peers: dict[str, Callable[[Any, Sizes, Here], Any]]
    none: str = ""
    own_samples: bool = False
    long: bool = False
    ranks: int | None = None

    def sizes(self, size: Size) -> Sizes:
        return size.sequence if self.long else size.gpt


def cuts(sizes: Sizes, ranks: int) -> list[int]:
    """Before which blocks each stage begins, and the number of blocks."""
    return [sizes.layers * stage // ranks for stage in range(ranks + 1)]


def _pipeline(sizes: Sizes, ranks: int) -> Any:
    names = [f"blocks.{cut}" for cut in cuts(sizes, ranks)[1:-1]]
    return PipelineParallelStrategy(ranks, schedule="1f1b", microbatches=MICROBATCHES, stages=names)


WHOLE = {"tokens.weight": "replicate", "head.weight": "replicate"}  # as the loop by hand and the plan by hand have them
ROWS: dict[str, Row] = {
    "tensor": Row(
        lambda sizes, ranks: TensorParallelStrategy(ranks, plan=WHOLE),
        lambda model, sizes, ranks: loops.Tensors(model),
        {"`ModelParallelStrategy`, plan by hand": lambda model, _, here: peers.model_parallel_tensor(model, here)},
    ),
    "pipeline": Row(
        _pipeline,
        lambda model, sizes, ranks: loops.OneFOneB(model, cuts(sizes, ranks), MICROBATCHES),
        {
            "`torch.distributed.pipelining`": lambda model, sizes, here: pipeline_step.ByHand(
                model, "1f1b", cuts(sizes, here.ranks), MICROBATCHES
            )
        },
    ),
    "sequence, ring": Row(
        lambda sizes, ranks: SequenceParallelStrategy(ranks, attention="ring"),
        lambda model, sizes, ranks: sequence_step.ByHand(model),
        {"torch's `context_parallel`": lambda model, _, here: peers.ContextParallel(model)},
        long=True,
    ),
    "sequence, ulysses": Row(
        lambda sizes, ranks: SequenceParallelStrategy(ranks, attention="ulysses"),
        lambda model, sizes, ranks: loops.Ulysses(model),
        {},
        none="neither torch nor Lightning has one",
        long=True,
    ),
    "placement": Row(
        lambda sizes, ranks: LayerPlacementStrategy(BackAndForth.placement),
        lambda model, sizes, ranks: placement_step.ByHand(model),
        {},
        none="neither torch nor Lightning has one",
        ranks=2,
    ),
    "fsdp": Row(
        lambda sizes, ranks: HybridParallelStrategy(data_parallel_size=ranks, data_parallel="fsdp"),
        lambda model, sizes, ranks: loops.FullyShard(model),
        {
            "`ModelParallelStrategy`, `fully_shard`": lambda model, _, here: peers.model_parallel_fully_shard(
                model, here
            ),
            "`FSDPStrategy`": lambda model, _, here: peers.fsdp(model, here),
        },
        own_samples=True,
    ),
    "data": Row(
        lambda sizes, ranks: HybridParallelStrategy(data_parallel_size=ranks),
        lambda model, sizes, ranks: loops.Replicated(model),
        {"Lightning's DDP": lambda model, _, here: peers.ddp(model, here)},
        own_samples=True,
    ),
}


def measure(name: str, size: str, rounds: int, dtype: str = "float64", accelerator: str = "cpu") -> Measured | None:
    """A row on this rank; rank 0 has what came of it.

    Args:
        name: of `ROWS`.
        size: of `SIZES`.
        rounds: how many that count.
        dtype: of weights and activations.
        accelerator: for the Trainers, "cpu" or "gpu".

    Raises:
        Exception: what our step or the loop by hand raises. What a peer raises is in what comes back.
    """
    row, ranks, rank = ROWS[name], int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sizes, steps = row.sizes(SIZES[size]), WARM + rounds
    torch.manual_seed(0)
    module: Any = BackAndForth(SIZES[size].placement) if name == "placement" else GPT(sizes)
    module.to(getattr(torch, dtype))
    torch.manual_seed(1 + rank * row.own_samples)
    batches = _batches(module, sizes, SIZES[size].placement, steps, dtype)
    here = Here(ranks, accelerator, batches)
    before = {n: x.detach().clone() for n, x in module.named_parameters()}
    ends: dict[str, dict[str, Tensor]] = {}

    def then(trainer: Trainer, module: LightningModule, sides: dict[str, Any]) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        ends["ours"] = {n: x.cpu() for n, x in state.items() if not rank}  # others have no values
        ends.update({n: side.weights() for n, side in sides.items()})

    taken = Rounds(
        {LOOP: lambda model: row.loop(model, sizes, ranks)}
        | {n: (lambda model, make=make: make(model, sizes, here)) for n, make in row.peers.items()},
        may_fail=row.peers, count_bytes=True, then=then,
    )  # fmt: skip
    trainer = Trainer(
        strategy=row.strategy(sizes, ranks), max_steps=steps, callbacks=[taken], **here.arguments, **QUIET
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    if rank:
        return None
    by_hand = ends[LOOP]
    return Measured(
        name, size, _in_words(name, sizes, SIZES[size].placement, row), dist.get_backend(),
        apart=_apart(ends["ours"], by_hand), moved=_apart(before, by_hand),
        sides=[_against(n, taken, ends, by_hand) for n in taken.made],
    )  # fmt: skip


def _batches(module: Any, sizes: Sizes, width: int, steps: int, dtype: str) -> list[Tensor]:
    if isinstance(module, BackAndForth):
        return [torch.randn(width // 8, width, dtype=getattr(torch, dtype)) for _ in range(steps)]
    return [torch.randint(sizes.vocabulary, (sizes.microbatches, sizes.length)) for _ in range(steps)]


def _in_words(name: str, sizes: Sizes, width: int, row: Row) -> str:
    if name == "placement":
        return f"4 layers, C={width}, batch {width // 8}"
    each = " a rank" if row.own_samples else ""
    return f"GPT, C={sizes.width}, T={sizes.length}, {sizes.layers} blocks, batch {sizes.microbatches}{each}"


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two weights; infinite where one is missing."""
    if set(a) != set(b):
        return float("inf")
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def _against(name: str, taken: Rounds, ends: dict[str, Any], by_hand: dict[str, Tensor]) -> Against:
    if name in taken.failed:
        return Against(name, error=taken.failed[name])
    ours, theirs = taken.ours, taken.others[name]
    return Against(
        name, Ratio.of(ours, theirs, SECONDS), Ratio.of(ours, theirs, PROCESSOR),
        ours[WARM - 1][BYTES] / theirs[WARM - 1][BYTES], _apart(ends[name], by_hand),
    )  # fmt: skip
