"""What the planner says of the run that is about to be traced, by the lines of a breakdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_par.pipeline.part import StagesPart
from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.messages.clipped import read_clip
from lightning_par.planner.planner import Planner
from lightning_par.python_state import generators
from lightning_par.trace.breakdown import BUBBLE, COMPUTE, EXPOSED
from lightning_par.trace.spans import Prediction
from lightning_par.trial.first_step import FirstStep

if TYPE_CHECKING:
    from lightning_par.planner.prediction import Prediction as Planned

_COMPUTE = ("forward", "backward", "recompute", "optimizer")


class Predictor:
    """A run's step as the planner has recorded it, before the module is laid out over ranks.

    Args:
        first: the run's module and batch.
        machine: as `lightning_par.plan` takes it.
        eager: whether nothing is compiled.

    Raises:
        ValueError: the machine is unknown, or the step can't be recorded; the message says why.
    """

    def __init__(self, first: FirstStep, machine: str, eager: bool) -> None:
        trainer = first.trainer
        self.machine = machine
        hosts, self._devices = read_machine(machine, first.world.size)
        with generators.kept():
            clip = read_clip(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            precision = str(trainer.precision)
            self._planner = Planner(first.module, first.batch, hosts, precision, "none", not eager, clip)
            for module in self._planner.tree.module.modules():
                for name, x in module.named_buffers(recurse=False):
                    setattr(module, name, x.clone())  # it has the user's own, which are about to be laid out
        self._assumed = ["backward computes nothing again", *self._planner.notes]
        if trainer.accumulate_grad_batches > 1:
            self._assumed.append("each batch is a step of the optimizer")

    def of(self, strategy: Any) -> Prediction:
        """What is said of the layout of ``strategy``, which by now knows into how many microbatches it cuts a batch.

        Raises:
            ValueError: there is no plan of such a layout; the message says why.
        """
        with generators.kept():
            planned = self._planner.evaluate(layout_arguments(strategy), self._devices)
        groups = strategy.groups
        return by_line(planned, self.machine, groups.averaging.name, groups.pipeline.name, self._assumed)


def layout_arguments(strategy: Any) -> dict[str, Any]:
    """`HybridParallelStrategy`'s arguments for what ``strategy`` does.

    Raises:
        ValueError: it places layers by hand, which the planner does not know.
    """
    wanted, layout = strategy.wanted(), strategy.groups.layout
    found: dict[str, Any] = {f"{name}_parallel_size": size for name, size in zip(layout.axes(), layout.sizes)}
    found |= {"data_parallel": wanted.data_parallel, "shard_residual": wanted.shard_residual}
    found["reshard_after_forward"] = wanted.reshard_after_forward
    if layout.sequence > 1:
        found["attention"] = wanted.attention
    stages = strategy.parts.of(StagesPart)
    if stages is None:
        return found
    if not hasattr(wanted.settings, "schedule"):
        raise ValueError("a placement by hand has no plan")
    found |= {"schedule": wanted.settings.schedule, "microbatches": stages.spread.microbatches}
    if wanted.settings.stages is not None:
        found["stages"] = wanted.settings.stages
    return found


def by_line(planned: Planned, machine: str, data: str, pipeline: str, assumed: list[str]) -> Prediction:
    """A planned step by the lines of a breakdown; what the planner has under no name is its pipeline's messages.

    Args:
        planned: the layout's step.
        machine: on which.
        data: the ledger's name of the axis that gradients are averaged over.
        pipeline: that of the pipeline axis.
        assumed: see `Prediction`.
    """
    parts: Mapping[str, float] = planned.parts
    lines: dict[str, float] = defaultdict(float)
    lines[COMPUTE] = sum(parts[name] for name in _COMPUTE)
    for name in ("tensor", "sequence"):
        lines[EXPOSED + name] += parts[name]
    lines[EXPOSED + data] += parts["gather"] + parts["replicas"]
    lines[BUBBLE] = parts["bubble"]
    rest = planned.seconds - sum(lines.values())
    if planned.candidate.layout.pipeline > 1:
        lines[EXPOSED + pipeline] += rest
    else:
        lines[COMPUTE] += rest
    return Prediction(machine, {name: seconds for name, seconds in lines.items() if seconds}, tuple(assumed))
