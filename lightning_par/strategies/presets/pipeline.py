"""The strategy of the pipeline axis."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from lightning_par.mesh.layout import AxisName
from lightning_par.pipeline.plan.settings import ScheduleName
from lightning_par.sharded.random_streams import Draws
from lightning_par.strategies.grace import GracePeriod
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.presets.hybrid import HybridParallelMixin


class PipelineParallelMixin(HybridParallelMixin):
    """Cuts the model into stages that work on one microbatch after another; left-over devices become data parallel.

    Args:
        pipeline_parallel_size: Ranks that share one copy of the model, layer by layer. ``"auto"`` takes all that
            ``data_parallel_size`` leaves.
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes the devices that
            ``pipeline_parallel_size`` leaves, or 1 if that is ``"auto"``, too.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"`` or ``"zbv"``. The last
            three have two stages a rank, and so twice the messages for a smaller bubble.
        microbatches: Into how many parts each batch is cut. ``"auto"`` takes enough for a bubble of at most 10 percent,
            or 1 where samples need one another, as in BatchNorm.
        stages: Where the balanced cut is not wanted: module names or patterns to stages, as ``{"encoder.*": 0,
            "head": 1}``, or the names of the modules with which the stages after the first begin.
        allow_batch_coupling: Where samples need one another, train each of ``microbatches`` as a batch of its own,
            which is not what one device does: BatchNorm then sees a microbatch, an in-batch loss its samples alone.
        verify: Before the first optimizer step, run a few samples of the first batch whole twice and cut once, with all
            effects undone, and compare; what differs is refused, or the batch is left whole, with a warning.
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
        ValueError: at once for an unknown schedule or start method or a wrong count; when the Trainer is made, if the
            sizes don't multiply to ``devices * num_nodes`` or the schedule can't have so many stages.
        TypeError: ``stages`` is neither a dict nor a list.

    Example::

        Trainer(strategy=PipelineParallelStrategy(schedule="1f1b", microbatches=8), devices=4)
    """

    own_axis: AxisName = "pipeline"

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        schedule: ScheduleName = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages: dict[str, int] | list[str] | None = None,
        allow_batch_coupling: bool = False,
        verify: bool = True,
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
            pipeline_parallel_size=pipeline_parallel_size,
            schedule=schedule,
            microbatches=microbatches,
            stages=stages,
            allow_batch_coupling=allow_batch_coupling,
            verify=verify,
            draws=draws,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            hang_report_after=hang_report_after,
            grace_period=grace_period,
            start_method=start_method,
        )
