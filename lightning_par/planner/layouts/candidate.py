"""The layouts that are priced: sizes of the axes, the schedule, and how a batch is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_par.mesh.layout import Layout
from lightning_par.pipeline.plan.schedule import SCHEDULES, stages_per_rank

_SIZES = ("data", "pipeline", "sequence", "tensor")
_PUBLISHED = {"interleaved": "interleaved_1f1b", "zb_1p": "zb1p", "zb_h1": "zb1p", "zb_v": "zbv", "zb_2p": "zb2p",
              "zb_h2": "zb2p"}  # fmt: skip
_SPLIT = ("interleaved_zero_bubble", "zbv", "zb1p", "zb2p")
EXTRA = ("micro_batch_size", "stages_per_rank", "token_order")
"""Keys of a layout that the strategies don't have: what a published run did."""


@dataclass(frozen=True)
class Candidate:
    """One layout, and how the samples of a step are cut.

    Attributes:
        layout: sizes of the axes.
        stored: whether replicas store a part of each weight, gradient and state.
        reshard: whether gathered weights are let go between forward and backward.
        schedule: of the pipeline.
        chunks: stages on each rank.
        microbatches: of one training step, each forward and backward once.
        micro: samples in each of them.
        accumulated: training steps for each step of the optimizer.
        shard_residual: whether the residual stream is sharded over the tensor axis.
        attention: the scheme of the sequence axis.
        contiguous: whether its ranks have tokens that follow one another, as some published runs had.
    """

    layout: Layout
    stored: bool = False
    reshard: bool = True
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    micro: float = 1
    accumulated: int = 1
    shard_residual: bool = False
    attention: Any = "ring"
    contiguous: bool = False

    @property
    def stages(self) -> int:
        return self.layout.pipeline * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule runs the weights' part of a backward by itself."""
        return self.layout.pipeline > 1 and self.schedule in _SPLIT

    @property
    def samples(self) -> float:
        """In one step of the optimizer, over all replicas."""
        return self.layout.data * self.micro * self.microbatches * self.accumulated

    def arguments(self) -> dict[str, Any]:
        """As `HybridParallelStrategy` takes them."""
        found: dict[str, Any] = {f"{name}_parallel_size": getattr(self.layout, name) for name in _SIZES}
        if self.stored:
            found["data_parallel"] = "fsdp"
        if self.layout.pipeline > 1:
            found |= {"schedule": self.schedule, "microbatches": self.microbatches}
            if self.chunks != 1 and self.chunks != stages_per_rank(self.schedule):
                found["stages_per_rank"] = self.chunks
        if self.layout.sequence > 1:
            found["attention"] = self.attention
        if self.shard_residual:
            found["shard_residual"] = True
        return found


def read_candidate(asked: Mapping[str, Any], devices: int, batch: int, samples: int | None) -> Candidate:
    """The layout of a dict of `HybridParallelStrategy`'s arguments.

    Args:
        asked: the arguments; also `EXTRA`.
        devices: processes.
        batch: samples of one batch, as one replica's training step gets it.
        samples: of one step of the optimizer over all replicas; None takes one batch for each replica.

    Raises:
        ValueError: a key is unknown, or sizes don't fit.

    Example::

        one = read_candidate({"tensor_parallel_size": 2}, devices=8, batch=4, samples=None)
        assert (one.layout.data, one.samples) == (4, 16)
    """
    known = {f"{name}_parallel_size" for name in _SIZES} | set(_OPTIONS) | set(EXTRA)
    unknown = [key for key in asked if key not in known]
    if unknown:
        raise ValueError(f"--layout has {unknown[0]!r}; it can have {', '.join(sorted(known))}.")
    layout = Layout.resolve(devices, "data", **{n: asked.get(f"{n}_parallel_size", _default(n)) for n in _SIZES})
    schedule = str(asked.get("schedule", "1f1b")).lower().replace("-", "_")
    schedule = _PUBLISHED.get(schedule, schedule)
    if schedule not in (*SCHEDULES, "zb1p", "zb2p"):
        raise ValueError(f"There is no schedule {asked['schedule']!r}; there are {', '.join(map(repr, SCHEDULES))}.")
    chunks = int(asked.get("stages_per_rank") or (stages_per_rank(schedule) if schedule in SCHEDULES else 1))
    chunks = chunks if layout.pipeline > 1 else 1
    if schedule == "interleaved_1f1b" and chunks == 1:
        schedule = "1f1b"
    micro, count, accumulated = _cut(asked, layout, batch, samples)
    stored = asked.get("data_parallel", "ddp") == "fsdp"
    reshard = asked.get("reshard_after_forward", "auto")
    return Candidate(
        layout, stored, layout.pipeline == 1 if reshard == "auto" else bool(reshard), schedule, chunks, count, micro,
        accumulated, bool(asked.get("shard_residual", False)) and layout.tensor > 1,
        asked.get("attention", "auto"), asked.get("token_order", "zigzag") == "contiguous",
    )  # fmt: skip


_OPTIONS = ("data_parallel", "reshard_after_forward", "schedule", "microbatches", "attention", "shard_residual",
            "allow_batch_coupling", "verify", "save_distributed_checkpoint")  # fmt: skip


def _default(name: str) -> Any:
    return "auto" if name == "data" else 1


def _cut(asked: Mapping[str, Any], layout: Layout, batch: int, samples: int | None) -> tuple[float, int, int]:
    """Samples of a microbatch, microbatches of a training step, training steps of one of the optimizer."""
    each = batch if samples is None else max(samples / layout.data, 1)  # samples of a replica
    if samples is not None and samples < layout.data:
        raise ValueError(
            f"--global-batch {samples} is fewer samples than the {layout.data} replicas of {layout}. Write at least "
            f"{layout.data}, or more devices along another axis."
        )
    micro, count = asked.get("micro_batch_size"), asked.get("microbatches", "auto")
    if micro is not None:
        return float(micro), *_counted(layout, round(each / float(micro)))
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return _cut_in(count, layout, batch, each, samples is None)
    if count != "auto":
        raise ValueError(f"microbatches must be a positive int or 'auto', got {count!r}.")
    if layout.pipeline > 1:
        # A whole batch goes through the pipeline sample by sample, which keeps its bubble smallest.
        whole = batch if each >= batch and each % batch == 0 else round(each)
        return 1, max(whole, 1), max(1, round(each / whole))
    return (batch, 1, max(1, round(each / batch))) if each >= batch else (each, 1, 1)


def _cut_in(count: int, layout: Layout, batch: int, each: float, alone: bool) -> tuple[float, int, int]:
    """In ``count`` microbatches; a batch that can't be cut so is one of them."""
    if layout.pipeline == 1:
        micro = each / count if batch == each or batch * count == each else batch
        return (micro, *_counted(layout, round(each / micro))) if each >= batch else (each, 1, 1)
    if batch % count == 0 and each >= batch:
        return batch / count, count, max(1, round(each / batch))
    if alone:
        return batch, count, 1
    if each < count:
        raise ValueError(
            f"A replica has {each:g} samples a step, fewer than microbatches={count}. Write fewer, or a larger "
            "--global-batch."
        )
    return each / count, count, 1


def _counted(layout: Layout, count: int) -> tuple[int, int]:
    count = max(1, count)
    return (count, 1) if layout.pipeline > 1 else (1, count)
