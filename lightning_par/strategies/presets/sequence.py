"""The strategy of the sequence axis."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from lightning_par.mesh.layout import AxisName
from lightning_par.sharded.random_streams import Draws
from lightning_par.strategies.grace import GracePeriod
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.presets.hybrid import HybridParallelMixin


class SequenceParallelMixin(HybridParallelMixin):
    """Splits long sequences over the devices, attention exact; each device holds the whole model.

    What others also call context parallelism. (Megatron's "sequence parallelism" is ``shard_residual`` of
    `TensorParallelStrategy`.)

    Args:
        sequence_parallel_size: Ranks that share a sequence. ``"auto"`` takes all that ``data_parallel_size`` leaves.
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes the devices that
            ``sequence_parallel_size`` leaves, or 1 if that is ``"auto"``, too.
        attention: ``"ring"`` passes keys and values round, ``"ulysses"`` exchanges heads for tokens, ``"all_gather"``
            gathers keys and values; ``{"ulysses": 2, "ring": 4}`` does both on 8 ranks. ``"auto"`` takes what moves the
            fewest bytes.
        sequence_dim: Which dim of the batch's tensors is the sequence, where it is not found out by itself: one for
            all, or a dict of the batch's keys. A wrong one costs speed, not results.
        draws: As for `TensorParallelStrategy`.
        save_distributed_checkpoint: Save checkpoints as directories to which each rank writes what it holds, which any
            layout loads. ``"async"`` writes them while training goes on, from a copy in the host's memory. Otherwise
            they are single files, as one device writes them.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default the one for the accelerator.
        timeout: How long a rank waits for another before it gives up. ``None`` takes torch's own default.
        hang_report_after: How long a rank waits for others until a report says which rank holds up the run, and where:
            seconds or a timedelta shorter than ``timeout``. ``"auto"`` takes 5 minutes, or half of ``timeout`` where
            that is shorter; ``None`` reports nothing.
        grace_period: How long a job has to save and end after SIGTERM, Ctrl-C, or SLURM's signal to be queued again,
            in seconds. ``"auto"``: what SLURM says, where it is known, and 30 seconds.
        start_method: How processes are started where no launcher (torchrun, SLURM) did: ``"popen"`` runs the script
            again, ``"spawn"``, ``"fork"`` and ``"forkserver"`` go through ``multiprocessing``. ``"auto"`` is
            ``"popen"`` for scripts and ``"fork"`` in notebooks.

    Raises:
        ValueError: at once for an unknown attention or start method; when the Trainer is made, if the sizes don't
            multiply to ``devices * num_nodes``.
        TypeError: ``sequence_dim`` is neither an int nor a dict of ints.

    Example::

        Trainer(strategy=SequenceParallelStrategy(attention="ring"), devices=4)
    """

    own_axis: AxisName = "sequence"

    def __init__(
        self,
        sequence_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        attention: Literal["auto", "ring", "ulysses", "all_gather"] | dict[str, int] = "auto",
        sequence_dim: int | dict[str, int] | None = None,
        draws: Draws = "per_shard",
        save_distributed_checkpoint: bool | Literal["async"] = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        hang_report_after: timedelta | float | Literal["auto"] | None = "auto",
        grace_period: GracePeriod = "auto",
        start_method: StartMethod = "auto",
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            sequence_parallel_size=sequence_parallel_size,
            attention=attention,
            sequence_dim=sequence_dim,
            draws=draws,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            hang_report_after=hang_report_after,
            grace_period=grace_period,
            start_method=start_method,
        )
