"""The strategy that puts layers where the user says."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from lightning_par.mesh.layout import AxisName
from lightning_par.pipeline.placement.settings import Chooser
from lightning_par.sharded.random_streams import Draws
from lightning_par.strategies.grace import GracePeriod
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.presets.hybrid import HybridParallelMixin


class LayerPlacementMixin(HybridParallelMixin):
    """Puts each layer on the device that you say, in any order, back and forth; left-over devices are data parallel.

    Args:
        placement: Module names or patterns to device indices, as ``{"encoder": 0, "decoder.*": 1, "head": 0}``; or a
            function of a module's name and the module that returns an index, or None where it is to follow the module
            around it; or ``"balanced"``, which gives each device a run of layers with about as many bytes of parameters
            and activations. A module that is not named follows the one around it, or else the layer before it.
            Indices count from 0 in each copy of the model.
        microbatches: Into how many parts each batch is cut, so that devices work on different ones at a time.
            ``"auto"`` takes 1.
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes what devices a dict
            leaves, and one copy otherwise.
        max_memory: The bytes that devices may hold of parameters and of the activations of a batch, as
            ``{0: "2GB", 1: 4_000_000_000}``. ``"balanced"`` keeps to it; a placement that does not is refused. Leave
            room for gradients and the optimizer's state.
        allow_batch_coupling: Where samples need one another, as in BatchNorm, train each of ``microbatches`` as a batch
            of its own, which is not what one device does.
        verify: As for `PipelineParallelStrategy`.
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
        ValueError: at once for an index that is negative, or an amount of memory that is none; when the Trainer is
            made, if the devices don't fit ``devices * num_nodes``; before training, on all ranks, if a name matches no
            module, a module is given two devices, or the layers don't fit into ``max_memory``.
        TypeError: an argument is of another type than those it may have.

    Example::

        Trainer(strategy=LayerPlacementStrategy({"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 0}), devices=2)
    """

    own_axis: AxisName = "pipeline"

    def __init__(
        self,
        placement: Literal["balanced"] | dict[str, int] | Chooser = "balanced",
        microbatches: int | Literal["auto"] = 1,
        data_parallel_size: int | Literal["auto"] = "auto",
        max_memory: dict[int, int | str] | None = None,
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
            pipeline_parallel_size="auto",
            microbatches=microbatches,
            placement=placement,
            max_memory=max_memory,
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
