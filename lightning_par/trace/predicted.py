"""What the planner says of the run that is about to be traced, by the lines of a breakdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_par.pipeline.part import StagesPart
from lightning_par.python_state import generators
from lightning_par.trace.breakdown import BUBBLE, COMPUTE, EXPOSED
from lightning_par.trace.spans import Prediction
from lightning_par.trial.first_step import FirstStep

if TYPE_CHECKING:
    from lightning_par.planner.prediction import Prediction as Planned

_COMPUTE = ("forward", "backward", "recompute", "optimizer")


def predict(first: FirstStep, strategy: Any, machine: str) -> Prediction:
    """What `lightning_par.plan` says of the layout of ``strategy``, on ``first``'s module and batch.

    Raises:
        ValueError: it can't be planned; the message says why.
    """
    from lightning_par.planner.make_plan import make_plan

    arguments = layout_arguments(strategy)
    eager = strategy.compiler is None
    with generators.kept():
        found = make_plan(
            first.module, first.batch, machine, strategy.groups.layout.world_size, arguments,
            str(first.trainer.precision), None, "none", eager,
        )  # fmt: skip
    assumed = ["backward computes nothing again", *found.notes]
    if first.trainer.accumulate_grad_batches > 1:
        assumed.append("each batch is a step of the optimizer")
    return by_line(found.layouts[0], machine, strategy.groups.averaging.name, strategy.groups.pipeline.name, assumed)


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
