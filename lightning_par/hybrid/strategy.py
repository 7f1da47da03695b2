"""The strategy of any product of axes."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from lightning_par.launch import StartMethod
from lightning_par.layout import Layout, Size
from lightning_par.pipeline.rows import RowSpread
from lightning_par.pipeline.settings import Settings
from lightning_par.pipeline.staged import StagedMixin
from lightning_par.pipeline.strategy import ScheduleName
from lightning_par.sequence.plan import check_sequence_dim
from lightning_par.sequence.scheme import check_asked, ulysses_size
from lightning_par.strategy.saving import check_distributed
from lightning_par.tensor.plan import check_styles


class HybridParallelMixin(StagedMixin):
    """Any product of axes.

    Args:
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes the devices that
            the other sizes leave.
        pipeline_parallel_size: Ranks that share one copy of the model, layer by layer.
        sequence_parallel_size: Ranks that share a sequence.
        tensor_parallel_size: Ranks that share every layer's weights.
        schedule: As for `PipelineParallelStrategy`.
        microbatches: As for `PipelineParallelStrategy`.
        stages: As for `PipelineParallelStrategy`.
        allow_batch_coupling: As for `PipelineParallelStrategy`.
        attention: As for `SequenceParallelStrategy`.
        sequence_dim: As for `SequenceParallelStrategy`.
        plan: As for `TensorParallelStrategy`.
        shard_residual: As for `TensorParallelStrategy`; not beside a sequence axis.
        save_distributed_checkpoint: As for `TensorParallelStrategy`.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default the one for the accelerator.
        timeout: How long a rank waits for another before it gives up. ``None`` takes torch's own default.
        start_method: How processes are started where no launcher (torchrun, SLURM) did.

    Raises:
        ValueError: at once for an argument that is unknown; when the Trainer is made, if the sizes don't multiply to
            ``devices * num_nodes``, or ``shard_residual`` meets a sequence axis.

    Example::

        Trainer(strategy=HybridParallelStrategy(sequence_parallel_size=2, tensor_parallel_size=2), devices=4)
    """

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        pipeline_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        schedule: ScheduleName = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages: dict[str, int] | list[str] | None = None,
        allow_batch_coupling: bool = False,
        attention: Literal["auto", "ring", "ulysses", "all_gather"] | dict[str, int] = "auto",
        sequence_dim: int | dict[str, int] | None = None,
        plan: dict[str, str] | None = None,
        shard_residual: bool = False,
        save_distributed_checkpoint: bool | Literal["async"] = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: StartMethod = "auto",
    ) -> None:
        check_styles(plan)
        check_asked(attention)
        check_sequence_dim(sequence_dim)
        self.settings = Settings(schedule, microbatches, stages, allow_batch_coupling)
        super().__init__(process_group_backend, timeout, start_method)
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
        layout = Layout.resolve(
            world_size,
            own="data",
            data=self.data_parallel_size,
            pipeline=self.pipeline_parallel_size,
            sequence=self.sequence_parallel_size,
            tensor=self.tensor_parallel_size,
        )
        ulysses_size(self.attention, layout.sequence)
        if self.shard_residual and layout.sequence > 1:
            raise ValueError(
                f"shard_residual=True shares out the residual stream's tokens over the tensor axis, but "
                f"sequence_parallel_size={layout.sequence} shares them out already. Write shard_residual=False."
            )
        if layout.pipeline > 1:
            self.settings.stage_count(layout.pipeline)
        return layout

    def make_spread(self, timeout: timedelta) -> RowSpread:
        return RowSpread(self.groups, self.settings, timeout)
