"""Which stretch of a step is which stage, and on which rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis

Homes = Mapping[str, tuple[int, ...]]
"""Unit -> the stages of its calls."""

Attribute = tuple[str, str]
"""The name of a module within a unit, and of what it holds there."""

HandsOut = Mapping[str, tuple[Attribute, ...]]
"""Unit -> the attributes by which it hands something out."""


@dataclass(frozen=True)
class Cut:
    """A step cut into stages.

    Attributes:
        starts: the event with which each stage begins.
        at: the rank of each stage, as an index along the pipeline axis.
    """

    starts: tuple[int, ...]
    at: tuple[int, ...]


class Cutter(Protocol):
    """Watches one recorded run of a step; made of the `Stages` it is to be cut into."""

    relays: ClassVar[bool]
    """Whether values go from stage to stage; else straight to each rank that takes them."""

    def __init__(self, stages: Stages) -> None: ...

    def meet(self, path: str, event: int) -> None:
        """The unit ``path`` is about to be called, as the event of number ``event``."""

    def cut(self, run: Analysis, microbatches: int) -> Cut:
        """The stages of the ``run``, which has ended."""


class InOrder:
    """Stages that follow one another: a step that calls a unit of an earlier one goes through all stages again."""

    relays: ClassVar[bool] = True

    def __init__(self, stages: Stages) -> None:
        self._homes, self._at = stages.homes, stages.at
        self._called: Counter[str] = Counter()
        self._starts = [0]

    def meet(self, path: str, event: int) -> None:
        homes, stage = self._homes[path], len(self._starts) - 1
        planned = homes[min(self._called[path], len(homes) - 1)]
        self._called[path] += 1
        began = stage // len(self._at) * len(self._at)
        ahead = [began + home for home in (planned, *homes) if began + home >= stage]
        if not ahead:
            ahead = [began + len(self._at) + min(homes)]
        self._starts += [event] * (ahead[0] - stage)

    def cut(self, run: Analysis, microbatches: int) -> Cut:
        laps = -(-len(self._starts) // len(self._at))
        missing = laps * len(self._at) - len(self._starts)
        return Cut((*self._starts, *[run.tail or len(run.events)] * missing), self._at * laps)


@dataclass(frozen=True)
class Stages:
    """How the steps of a module are to be cut into stages.

    Args:
        homes: unit -> the stages of its calls, in order.
        at: the rank of each stage, as an index along the pipeline axis.
        cutter: says where in a step each stage begins.
        unused: the rank that holds what no stage uses; None for that of the last stage.
        hands_out: what units hand out beside what they return.

    Example::

        stages = Stages({"up": (0,), "down": (1,)}, at=(0, 1))
        assert stages.holders("down") == {1}
    """

    homes: Homes
    at: tuple[int, ...]
    cutter: type[Cutter] = InOrder
    unused: int | None = None
    hands_out: HandsOut = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks there are for them."""
        return max(self.at) + 1

    @property
    def last(self) -> int:
        """The rank that holds what no stage uses."""
        return self.at[-1] if self.unused is None else self.unused

    def holders(self, path: str) -> set[int]:
        """The ranks that hold the unit ``path``."""
        return {self.at[stage] for stage in self.homes[path]}

    def without(self, paths: Collection[str]) -> Stages:
        """The same with fewer units."""
        return replace(self, homes={path: homes for path, homes in self.homes.items() if path not in paths})
