"""What is predicted of a layout's step: seconds, bytes of each rank, bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import nn

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.machine.machines import Machine
from lightning_par.planner.machine.precisions import Precision
from lightning_par.planner.recording.optimizer_state import OptimizerState
from lightning_par.planner.recording.uses import Use
from lightning_par.planner.times.local_work import Recompute


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of the pipeline: what it always holds, and its peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    peak: float

    @property
    def live(self) -> float:
        """Bytes of what a step makes and lets go: activations, and buffers of communication."""
        return self.activations + self.buffers


@dataclass(frozen=True)
class HeldBytes:
    """That one rank always holds."""

    parameters: float
    gradients: float
    optimizer: float


class EachRank(Protocol):
    """What each rank holds, and sends in a step of the optimizer by axis; see `messages/rank_bytes.py`."""

    def held(self, pipeline: int, tensor: int, replica: int) -> HeldBytes: ...

    def sent(self, pipeline: int, tensor: int, replica: int) -> dict[str, float]: ...

    def most_sent(self) -> dict[str, float]: ...

    def most_sent_outside(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Prediction:
    """What a layout costs.

    Attributes:
        candidate: the layout.
        seconds: of one step of the optimizer.
        parts: the seconds of its parts, by name.
        bubble: the share of the pipeline's time in which ranks wait.
        stages: memory of the first rank of each place along the pipeline.
        each: what each rank holds and sends.
        beside: the same as ``stages`` of the ranks with these indices along the tensor and sequence axes.
        memory: that a device has for a run.
        flops: of the model in one step, forward and backward once, over all replicas.
        tokens: in one step.
        peak_flops: of all devices.
    """

    candidate: Candidate
    seconds: float
    parts: dict[str, float]
    bubble: float
    stages: tuple[RankMemory, ...]
    each: EachRank
    beside: Callable[[int, int], tuple[RankMemory, ...]]
    memory: float
    flops: float
    tokens: float
    peak_flops: float

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that the rank that sends most sends in a step, by axis; counted when it is asked for."""
        return self.each.most_sent()

    @property
    def peak(self) -> float:
        return max(one.peak for one in self.stages)

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Of what the devices could do in that time, the share that the model's own FLOPs are."""
        return self.flops / (self.seconds * self.peak_flops)


@dataclass(frozen=True, eq=False)
class ModuleUses:
    """The module that is planned, and what its step does with its modules.

    Attributes:
        module: without memory.
        calls: the modules that the step calls, in order.
        uses: of each parameter, the calls of modules that use it.
        backwards: that the step runs itself: before each, how many calls had begun.
        trained: of each of these, the parameters that require a gradient as it begins; replicas average them all then.
        hooked: how many hooks of the user's the gradients of parameters meet, by these' first names.
        norms: of gradients, by which the step clips them itself.
    """

    module: nn.Module
    calls: tuple[str, ...]
    uses: Mapping[str, Sequence[Use]]
    backwards: tuple[int, ...] = ()
    trained: tuple[frozenset[str], ...] = ()
    hooked: Mapping[str, int] = field(default_factory=dict)
    norms: int = 0

    def after(self, call: int) -> int:
        """How many backwards the step had run as a call began."""
        return sum(begun <= call for begun in self.backwards)

    def last_call(self, path: str) -> int:
        """The number of the last call of a module; -1: there is none."""
        return max((i for i, called in enumerate(self.calls) if called == path), default=-1)


@dataclass(frozen=True)
class PlannedRun:
    """What is the same for all layouts of one run.

    Attributes:
        machine: that it runs on.
        devices: over all hosts.
        precision: of the Trainer.
        optimizer: what it keeps.
        recompute: what backward computes again.
        fused: whether functions that walk over memory are fused.
        tokens: in one sample.
        tree: the module and its uses.
        casts_once: whether no weight is taken twice in a step by what autocast runs in low precision.
        clip: of gradients, by their joint norm or value by value; empty: there is none.
        asynchronous: whether GPUs gather tokens, and sum them, beside products of others, as this package does.
    """

    machine: Machine
    devices: int
    precision: Precision
    optimizer: OptimizerState
    recompute: Recompute
    fused: bool
    tokens: float
    tree: ModuleUses
    casts_once: bool = True
    clip: Literal["", "norm", "value"] = ""
    asynchronous: bool = True
