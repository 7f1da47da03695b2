"""The strategy of any product of axes, of which the other four are presets."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from lightning_par.mesh.layout import AxisName, Layout, Size
from lightning_par.pipeline.part import StagesPart
from lightning_par.pipeline.placement.settings import Chooser
from lightning_par.pipeline.plan.settings import ScheduleName
from lightning_par.pipeline.run.engine import Engine
from lightning_par.sequence.plan import check_sequence_dim
from lightning_par.sequence.scheme import check_asked, ulysses_size
from lightning_par.sharded.random_streams import Draws, check_draws
from lightning_par.strategies.base import StrategyMixin
from lightning_par.strategies.grace import GracePeriod
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.parts import Wanted
from lightning_par.strategies.presets.settings import check_reshard, settings_of
from lightning_par.strategies.saving import check_distributed
from lightning_par.tensor.plan import check_styles


class HybridParallelMixin(StrategyMixin):
    """Any product of axes.

    Args:
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes the devices that
            the other sizes leave.
        pipeline_parallel_size: Ranks that share one copy of the model, layer by layer.
        sequence_parallel_size: Ranks that share a sequence.
        tensor_parallel_size: Ranks that share every layer's weights.
        data_parallel: ``"ddp"``: each copy of the model stores all of its weights. ``"fsdp"``: the ranks that use the
            same weights, along data and sequence, store a part each, and of gradients and the optimizer's state.
            Weights are gathered where they are used, and let go.
        reshard_after_forward: Whether weights that ``"fsdp"`` gathered for forward are let go, and gathered again for
            backward. ``"auto"`` does so without a pipeline; in a pipeline they stay for all microbatches of a step.
            ``True`` takes the least memory, ``False`` the fewest messages.
        schedule: As for `PipelineParallelStrategy`.
        microbatches: As for `PipelineParallelStrategy`; with a ``placement``, ``"auto"`` takes 1.
        stages: As for `PipelineParallelStrategy`.
        placement: As for `LayerPlacementStrategy`, in place of ``schedule`` and ``stages``. A dict also says how many
            devices a copy of the model has; otherwise ``pipeline_parallel_size`` does.
        max_memory: As for `LayerPlacementStrategy`.
        allow_batch_coupling: As for `PipelineParallelStrategy`.
        verify: As for `PipelineParallelStrategy`.
        attention: As for `SequenceParallelStrategy`.
        sequence_dim: As for `SequenceParallelStrategy`.
        plan: As for `TensorParallelStrategy`.
        shard_residual: As for `TensorParallelStrategy`; not beside a sequence axis.
        draws: As for `TensorParallelStrategy`.
        save_distributed_checkpoint: As for `TensorParallelStrategy`.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default the one for the accelerator.
        timeout: How long a rank waits for another before it gives up. ``None`` takes torch's own default.
        hang_report_after: How long a rank waits for others until a report says which rank holds up the run, and where:
            seconds or a timedelta shorter than ``timeout``. ``"auto"`` takes 5 minutes, or half of ``timeout`` where
            that is shorter; ``None`` reports nothing.
        grace_period: How long a job has to save and end after SIGTERM, Ctrl-C, or SLURM's signal to be queued again,
            in seconds. ``"auto"``: what SLURM says, where it is known, and 30 seconds.
        start_method: How processes are started where no launcher (torchrun, SLURM) did.

    Raises:
        ValueError: at once for an argument that is unknown, or that goes with another one than those given; when the
            Trainer is made, if the sizes don't multiply to ``devices * num_nodes``, or ``shard_residual`` meets a
            sequence axis.
        TypeError: an argument is of another type than those it may have.

    Example::

        Trainer(strategy=HybridParallelStrategy(sequence_parallel_size=2, tensor_parallel_size=2), devices=4)
    """

    own_axis: AxisName = "data"
    """The axis that takes the devices which nobody asked for."""

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        pipeline_parallel_size: int | Literal["auto"] = 1,
        sequence_parallel_size: int | Literal["auto"] = 1,
        tensor_parallel_size: int | Literal["auto"] = 1,
        data_parallel: Literal["ddp", "fsdp"] = "ddp",
        reshard_after_forward: bool | Literal["auto"] = "auto",
        schedule: ScheduleName = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages: dict[str, int] | list[str] | None = None,
        placement: Literal["balanced"] | dict[str, int] | Chooser | None = None,
        max_memory: dict[int, int | str] | None = None,
        allow_batch_coupling: bool = False,
        verify: bool = True,
        attention: Literal["auto", "ring", "ulysses", "all_gather"] | dict[str, int] = "auto",
        sequence_dim: int | dict[str, int] | None = None,
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
        check_styles(plan)
        check_asked(attention)
        check_sequence_dim(sequence_dim)
        self.settings = settings_of(
            schedule, microbatches, stages, placement, max_memory, allow_batch_coupling, type(self).__name__
        )
        if data_parallel not in ("ddp", "fsdp"):
            raise ValueError(f"data_parallel must be 'ddp' or 'fsdp', got {data_parallel!r}.")
        check_reshard(reshard_after_forward, data_parallel)
        super().__init__(process_group_backend, timeout, hang_report_after, grace_period, start_method)
        self.data_parallel = data_parallel
        self.verify = verify
        self.draws = check_draws(draws)
        self.reshard_after_forward = reshard_after_forward
        self.save_distributed_checkpoint = check_distributed(save_distributed_checkpoint)
        self.data_parallel_size: Size = data_parallel_size
        self.pipeline_parallel_size: Size = pipeline_parallel_size
        self.sequence_parallel_size: Size = sequence_parallel_size
        self.tensor_parallel_size: Size = tensor_parallel_size
        self.attention = attention
        self.sequence_dim = sequence_dim
        self.plan = plan
        self.shard_residual = shard_residual

    def resolve_layout(self, world_size: int) -> Layout:
        sizes = {axis: getattr(self, f"{axis}_parallel_size") for axis in Layout.axes()}
        layout = self.settings.resolve(world_size, own=self.own_axis, **sizes)
        ulysses_size(self.attention, layout.sequence)
        if self.shard_residual and layout.sequence > 1:
            raise ValueError(
                f"shard_residual=True shares out the residual stream's tokens over the tensor axis, but "
                f"sequence_parallel_size={layout.sequence} shares them out already. Write shard_residual=False."
            )
        return layout

    def wanted(self) -> Wanted:
        return Wanted(
            self.settings,
            self.plan,
            self.shard_residual,
            self.attention,
            self.sequence_dim,
            self.data_parallel,
            self.reshard_after_forward,
            self.verify,
            self.draws,
            self.timeout,
            type(self).__name__,
            self.namespace,
        )

    @property
    def engine(self) -> Engine | None:
        """What runs the steps where layers are spread over ranks; None before a run has spread the model."""
        stages = self.parts.of(StagesPart)
        return None if stages is None else stages.engine
