"""The clip of gradients: what a Trainer's arguments mean, and which all-reduces of a norm a rank joins for it.

As `lightning_par.optim.clipping` makes them: one for each way in which parameters are spread, then one over stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from torch import nn

from lightning_par.planner.machine.links import Group, group_of, message_time
from lightning_par.planner.recording.optimizer_state import OptimizerState
from lightning_par.planner.recording.profile import Stages
from lightning_par.planner.times.layout_work import LayoutWork

Clip = Literal["", "norm", "value"]
_OVER_STAGES = 8  # bytes: stages may differ in dtype


def read_clip(value: Any, algorithm: Any = None) -> Clip:
    """What the Trainer's ``gradient_clip_val`` and ``gradient_clip_algorithm`` do; empty: nothing.

    Raises:
        ValueError: the Trainer would take one of them for none.

    Example::

        assert read_clip(1.0) == "norm" and read_clip(0) == read_clip(None) == ""
    """
    if value is not None and not isinstance(value, (int, float)):
        raise ValueError(f"gradient_clip_val must be a number or None, got {value!r}.")
    named = "norm" if algorithm is None else str(getattr(algorithm, "value", algorithm)).lower()
    if named not in ("norm", "value"):
        raise ValueError(f"gradient_clip_algorithm must be 'norm' or 'value', got {algorithm!r}.")
    return "" if value is None or value <= 0 else named  # type: ignore[return-value]


def clips_itself(module: nn.Module) -> bool:
    """Whether ``module`` has a `configure_gradient_clipping` of its own."""
    return sum("configure_gradient_clipping" in vars(kind) for kind in type(module).__mro__) > 1  # one is Lightning's


@dataclass(frozen=True)
class NormSum:
    """An all-reduce of a norm.

    Attributes:
        axis: along which, as a plan names it.
        group: of ranks.
        nbytes: of the norm.
    """

    axis: str
    group: Group
    nbytes: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return 2 * self.nbytes * (self.group.size - 1) / self.group.size


def norm_sums(work: LayoutWork, pipeline: int) -> list[NormSum]:
    """Those that a rank with the index ``pipeline`` joins in a step of the optimizer; where the step clips by itself,
    each norm is taken to be of weights that are spread in all of these ways."""
    one, devices, replicas = work.one, work.run.machine.devices, work.replicas
    layout = one.layout
    times = work.run.tree.norms or (work.run.clip == "norm")
    if not times:
        return []
    together = Group(replicas.size * layout.tensor, min(replicas.inside * layout.tensor, devices))
    found = []
    for (stored, split), trained in _spread(
        work.profile.stages, one.schedule, layout.pipeline, replicas.size if one.stored else 1, work.run.optimizer
    )[pipeline].items():
        group = together if stored and split else replicas if stored else group_of(layout.tensor, 1, devices)
        nbytes = max(4, work.run.precision.gradients) if trained else 4
        found.append(NormSum("data" if stored else "tensor", group, nbytes))
    if layout.pipeline > 1:
        group = group_of(layout.pipeline, layout.sequence * layout.tensor, devices)
        found.append(NormSum("pipeline", group, _OVER_STAGES))
    return found * times


def norm_seconds(work: LayoutWork) -> dict[str, float]:
    """Seconds in which the rank that waits longest waits for them, by axis."""
    found: dict[str, float] = {}
    for pipeline in range(work.one.layout.pipeline):
        own: dict[str, float] = {}
        for x in norm_sums(work, pipeline):
            own[x.axis] = own.get(x.axis, 0.0) + message_time("all_reduce", x.nbytes, x.group, work.run.machine)
        found = {axis: max(found.get(axis, 0.0), own.get(axis, 0.0)) for axis in {**found, **own}}
    return found


@lru_cache(maxsize=1024)
def _spread(
    stages: Stages, schedule: str, pipeline: int, storing: int, optimizer: OptimizerState
) -> Sequence[Mapping[tuple[bool, bool], bool]]:
    """Of each rank along the pipeline, the ways in which parameters that it counts are spread.

    A way is whether ``storing`` ranks store parts, and whether the tensor axis splits them; with it, whether any such
    parameter is trained. Of a parameter that several stages hold the first rank counts it.
    """
    seen: set[str] = set()
    found: list[dict[tuple[bool, bool], bool]] = []
    for own in stages.by_rank(schedule, pipeline):
        ways: dict[tuple[bool, bool], bool] = {}
        for x in stages.held(own):
            if x.name in seen or not optimizer.steps(x.name):
                continue
            seen.add(x.name)
            stored = storing > 1 and x.stored_dim(storing) is not None
            if stored or x.dim is not None:
                way = stored, x.dim is not None
                ways[way] = ways.get(way, False) or x.trained
        found.append(ways)
    return found
