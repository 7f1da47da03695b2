"""The strategies and the callbacks for ``pytorch_lightning``; for ``lightning.pytorch`` see `lightning_par` itself."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ParallelStrategy

from lightning_par.callbacks.parallel_trace import ParallelTraceMixin
from lightning_par.callbacks.replica_guard import ReplicaGuardMixin
from lightning_par.callbacks.schedule_trace import ScheduleTraceMixin
from lightning_par.callbacks.throughput import ThroughputMixin
from lightning_par.strategies.namespace import PYTORCH_LIGHTNING
from lightning_par.strategies.presets.auto import AutoParallelMixin
from lightning_par.strategies.presets.hybrid import HybridParallelMixin
from lightning_par.strategies.presets.pipeline import PipelineParallelMixin
from lightning_par.strategies.presets.placement import LayerPlacementMixin
from lightning_par.strategies.presets.sequence import SequenceParallelMixin
from lightning_par.strategies.presets.tensor import TensorParallelMixin


class TensorParallelStrategy(TensorParallelMixin, ParallelStrategy):  # type: ignore[misc]  # typed for the other
    __doc__ = TensorParallelMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class PipelineParallelStrategy(PipelineParallelMixin, ParallelStrategy):  # type: ignore[misc]  # typed for the other
    __doc__ = PipelineParallelMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class SequenceParallelStrategy(SequenceParallelMixin, ParallelStrategy):  # type: ignore[misc]  # typed for the other
    __doc__ = SequenceParallelMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class LayerPlacementStrategy(LayerPlacementMixin, ParallelStrategy):  # type: ignore[misc]  # typed for the other
    __doc__ = LayerPlacementMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class HybridParallelStrategy(HybridParallelMixin, ParallelStrategy):  # type: ignore[misc]  # typed for the other
    __doc__ = HybridParallelMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class AutoParallelStrategy(AutoParallelMixin, ParallelStrategy):  # type: ignore[misc]  # typed for the other
    __doc__ = AutoParallelMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class ScheduleTrace(ScheduleTraceMixin, Callback):  # type: ignore[misc]  # typed for the other
    __doc__ = ScheduleTraceMixin.__doc__


class ParallelTrace(ParallelTraceMixin, Callback):  # type: ignore[misc]  # typed for the other
    __doc__ = ParallelTraceMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class ReplicaGuard(ReplicaGuardMixin, Callback):  # type: ignore[misc]  # typed for the other
    __doc__ = ReplicaGuardMixin.__doc__
    namespace = PYTORCH_LIGHTNING


class Throughput(ThroughputMixin, Callback):  # type: ignore[misc]  # typed for the other
    __doc__ = ThroughputMixin.__doc__
    namespace = PYTORCH_LIGHTNING
