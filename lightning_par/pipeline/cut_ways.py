"""A step cut into stages, and what may be done about a module that hinders it: open it, close it, hand more out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from lightning_par.pipeline.plan.stage_ranges import HandsOut, Stages
from lightning_par.pipeline.plan.units import ancestors, close, walk
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.pipeline.trial.survey import Survey


@dataclass(frozen=True)
class Cut:
    """A step cut into stages: what it does, the plan, and the program, or the reason why there is none.

    Attributes:
        opened: modules that are no units for a reason that came up.
        unmixed: the cut before more was opened to see whether samples mix.
    """

    surveyed: Survey
    plan: Any
    stages: Stages
    program: Program | None
    reason: SamplesMixError | UnitError | None
    opened: tuple[str, ...] = ()
    unmixed: Cut | None = None


class Way(NamedTuple):
    """What may be done about a unit: the calls, what is opened of them, and what they hand out."""

    surveyed: Survey
    opened: tuple[str, ...]
    hands_out: HandsOut


def ways_of(module: nn.Module, cut: Cut, reason: SamplesMixError | UnitError) -> list[Way]:
    """What may be done about the unit of a ``reason``."""
    assert reason.unit is not None
    surveyed, root, opened = cut.surveyed, cut.surveyed.root, cut.opened
    # What the module does with the whole batch's masks may be harmless where it is seen, and what it keeps from one
    # call to the next is at hand where its code is the step's own, whatever ranks hold its weights.
    mixes, inner = isinstance(reason, SamplesMixError), module.get_submodule(reason.unit).children()
    closed = {call.path for call in walk(root) if call.closed is not None}
    units = reason.units if isinstance(reason, UnitError) and reason.units else (reason.unit,)
    seen = reason.unit not in closed and not (mixes and next(inner, None) is None)  # there is something in it to see
    known = cut.stages.hands_out
    ways = [Way(surveyed, (*opened, *(unit for unit in units if unit not in closed)), known)] if seen else []
    alike = [path for path in _alike(module, reason.unit) if path in cut.stages.homes and path not in closed]
    if mixes and ways and len(alike) > 1:  # it is most likely the same in all layers
        ways.insert(0, Way(surveyed, (*opened, *alike), known))
    if isinstance(reason, UnitError) and reason.hands_out:
        ways.append(Way(surveyed, opened, _both(known, reason.hands_out)))
    # What other code takes from within it is at hand in the module around, where that is called as a whole.
    called = {call.path for call in walk(root)}
    around = next((path for path in ancestors(reason.unit) if path in called), None)
    if mixes or around is None or around in opened:
        return ways
    others = {path for path in _alike(module, around) if path not in opened}
    closer = close(root, others, f"its code needs what is within {reason.unit!r}")
    return [*ways, Way(replace(surveyed, root=closer), opened, known)]


def _both(some: HandsOut, others: HandsOut) -> HandsOut:
    return {path: (*dict.fromkeys((*some.get(path, ()), *others.get(path, ()))),) for path in {**some, **others}}


def _alike(module: nn.Module, path: str) -> list[str]:
    """The modules of one class with that at ``path``."""
    kind = type_before_parametrizations(module.get_submodule(path))
    return [other for other, m in module.named_modules() if other and type_before_parametrizations(m) is kind]
