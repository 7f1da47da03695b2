"""The strategies and the callbacks for ``lightning.pytorch``; for ``pytorch_lightning`` see `lightning_par.pl`."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy

from lightning_par.callbacks.parallel_trace import ParallelTraceMixin
from lightning_par.callbacks.replica_guard import ReplicaGuardMixin
from lightning_par.callbacks.schedule_trace import ScheduleTraceMixin
from lightning_par.callbacks.throughput import ThroughputMixin
from lightning_par.strategies.namespace import LIGHTNING
from lightning_par.strategies.presets.auto import AutoParallelMixin
from lightning_par.strategies.presets.hybrid import HybridParallelMixin
from lightning_par.strategies.presets.pipeline import PipelineParallelMixin
from lightning_par.strategies.presets.placement import LayerPlacementMixin
from lightning_par.strategies.presets.sequence import SequenceParallelMixin
from lightning_par.strategies.presets.tensor import TensorParallelMixin


class TensorParallelStrategy(TensorParallelMixin, ParallelStrategy):
    __doc__ = TensorParallelMixin.__doc__
    namespace = LIGHTNING


class PipelineParallelStrategy(PipelineParallelMixin, ParallelStrategy):
    __doc__ = PipelineParallelMixin.__doc__
    namespace = LIGHTNING


class SequenceParallelStrategy(SequenceParallelMixin, ParallelStrategy):
    __doc__ = SequenceParallelMixin.__doc__
    namespace = LIGHTNING


class LayerPlacementStrategy(LayerPlacementMixin, ParallelStrategy):
    __doc__ = LayerPlacementMixin.__doc__
    namespace = LIGHTNING


class HybridParallelStrategy(HybridParallelMixin, ParallelStrategy):
    __doc__ = HybridParallelMixin.__doc__
    namespace = LIGHTNING


class AutoParallelStrategy(AutoParallelMixin, ParallelStrategy):
    __doc__ = AutoParallelMixin.__doc__
    namespace = LIGHTNING


class ScheduleTrace(ScheduleTraceMixin, Callback):
    __doc__ = ScheduleTraceMixin.__doc__


class ParallelTrace(ParallelTraceMixin, Callback):
    __doc__ = ParallelTraceMixin.__doc__
    namespace = LIGHTNING


class ReplicaGuard(ReplicaGuardMixin, Callback):
    __doc__ = ReplicaGuardMixin.__doc__
    namespace = LIGHTNING


class Throughput(ThroughputMixin, Callback):
    __doc__ = ThroughputMixin.__doc__
    namespace = LIGHTNING
