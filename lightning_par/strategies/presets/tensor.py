"""The strategy of the tensor axis."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from lightning_par.mesh.layout import AxisName
from lightning_par.sharded.random_streams import Draws
from lightning_par.strategies.grace import GracePeriod
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.presets.hybrid import HybridParallelMixin


class TensorParallelMixin(HybridParallelMixin):
    """Splits every layer's weights over the devices; what is left of the devices becomes data parallel.

    Args:
        tensor_parallel_size: Ranks that share one copy of the model. ``"auto"`` takes all that ``data_parallel_size``
            leaves.
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes the devices that
            ``tensor_parallel_size`` leaves, or 1 if that is ``"auto"``, too.
        plan: How to split modules by name, where the plan found by itself is not wanted: patterns such as
            ``"blocks.*.mlp.up"`` to ``"colwise"``, ``"rowwise"`` or ``"replicate"``.
        shard_residual: Share out the tokens of the residual stream between islands: norms and dropout then work on a
            part of the sequence, and each all-reduce becomes an all-gather and a reduce-scatter, of the same bytes.
            (Megatron calls this sequence parallelism.)
        draws: What random numbers of a step are, such as dropout's masks. ``"per_shard"``: tensors that all ranks hold
            have one device's, and parts of tensors numbers of their own, the same whenever layout and seed are.
            ``"one_device"``: all are one device's, with the same seed, in every layout; each rank draws them for whole
            tensors, and keeps its part.
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
        ValueError: at once for a style or a start method that is unknown; when the Trainer is made, if the sizes don't
            multiply to ``devices * num_nodes``.

    Example::

        Trainer(strategy=TensorParallelStrategy(tensor_parallel_size=2), devices=4)
    """

    own_axis: AxisName = "tensor"

    def __init__(
        self,
        tensor_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        plan: dict[str, str] | None = None,
        shard_residual: bool = False,
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
            tensor_parallel_size=tensor_parallel_size,
            plan=plan,
            shard_residual=shard_residual,
            draws=draws,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            hang_report_after=hang_report_after,
            grace_period=grace_period,
            start_method=start_method,
        )
