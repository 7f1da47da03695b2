"""A dry run: one rank's own training steps, by the strategy's own code, on tensors without values, and no other rank.

`world` is the process group in which nothing moves (`Axis.dry`), `weights` what stands for parameters before and after
they are cut, `strategy` what of a strategy is another's where nobody can be waited for, `counts` what is counted, `run`
the Trainer around it, `accelerator` its devices, `command` the command line.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_par.dry.counts import Counts


def dry_run(
    module: Any,
    batch: Any,
    layout: Mapping[str, Any],
    *,
    devices: int,
    rank: int = 0,
    devices_per_host: int = 8,
    precision: str | int = "32-true",
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    accelerator: str = "cpu",
) -> Counts:
    """What one rank of a run holds and sends in a step, found by running that rank alone. Nothing is computed.

    The Trainer and the strategy run as they will, set-up, forward, backward, clip and optimizer, on tensors that have
    shapes and no values; what would be sent is counted where it would leave. The second step of the optimizer counts.
    What the module or the layout would raise on that rank is raised here.

    Args:
        module: a LightningModule, its class, or a function that makes one; one that is there is copied, without its
            weights.
        batch: one batch as a replica's loader gives it, before `on_before_batch_transfer` and the like; a DataLoader, a
            LightningDataModule, or a function that makes one.
        layout: `HybridParallelStrategy`'s arguments.
        devices: over all hosts.
        rank: which of them.
        devices_per_host: of each host.
        precision: as the Trainer's.
        accumulate_grad_batches: as the Trainer's.
        gradient_clip_val: as the Trainer's.
        gradient_clip_algorithm: as the Trainer's.
        accelerator: "cpu", or "gpu" for tensors of a CUDA device, where there is one, which need not be this rank's.

    Returns:
        Bytes and messages of that rank, and what a checkpoint takes of it; printable.

    Raises:
        ValueError: an argument is out of range; the layout can't be; the module can't be built, or
            its step asks for the values of tensors. The message says what to write instead.
        NotImplementedError: the module asks another stage of a pipeline, outside of a step.
        TypeError: ``module`` makes no LightningModule.
        RuntimeError: this process is a rank of a run already.

    Example::

        found = lightning_par.dry_run(MyModule, batch, {"tensor_parallel_size": 8}, devices=1024, rank=517)
        print(found)
        print(found.sent["tensor", "leave"])
    """
    from lightning_par.dry.run import DryRank, run_rank
    from lightning_par.planner.recording.given_batch import read_batch

    asked = DryRank(
        rank, devices, devices_per_host, layout, precision, accumulate_grad_batches, gradient_clip_val,
        gradient_clip_algorithm, accelerator,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        return run_rank(module, read_batch(batch), asked)
    finally:
        gc.collect()  # a Trainer and its module hold each other, and patches of torch stay while there are shards
