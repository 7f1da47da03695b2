"""Which stretch of a step is which stage, and on which rank: as the modules of a pipeline are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis

Homes = Mapping[str, tuple[int, ...]]
"""Unit -> where its calls run."""


@dataclass(frozen=True)
class Cut:
    """A step cut into stages.

    Attributes:
        starts: the event with which each stage begins.
        at: the rank of each stage, as an index along the pipeline axis.
    """

    starts: tuple[int, ...]
    at: tuple[int, ...]


class Stretches(Protocol):
    """Watches one recorded run of a step."""

    def meet(self, path: str, event: int) -> None:
        """The unit ``path`` is about to be called, as the event of number ``event``."""

    def cut(self, run: Analysis, microbatches: int) -> Cut:
        """The stages of the ``run``, which has ended."""


class Stages(Protocol):
    """How the steps of a module are to be cut into stages."""

    @property
    def homes(self) -> Homes:
        """Every unit, with where its calls run."""

    @property
    def ranks(self) -> int:
        """How many ranks there are for them."""

    @property
    def relays(self) -> bool:
        """Whether values go from stage to stage; else straight to each rank that takes them."""

    @property
    def last(self) -> int:
        """The rank of the last stage, which holds what no stage uses."""

    def holders(self, path: str) -> set[int]:
        """The ranks that hold the unit ``path``."""

    def without(self, paths: Collection[str]) -> Stages:
        """The same with fewer units."""

    def stretches(self) -> Stretches:
        """Watches a run."""


@dataclass(frozen=True)
class Row:
    """A pipeline's stages, which follow one another in the order of execution.

    Args:
        homes: unit -> the stages of its calls, in order.
        at: the rank of each stage.

    Example::

        row = Row({"up": (0,), "down": (1,)}, at=(0, 1))
        assert row.holders("down") == {1}
    """

    homes: Homes
    at: tuple[int, ...]

    relays: bool = True

    @property
    def ranks(self) -> int:
        return max(self.at) + 1

    @property
    def last(self) -> int:
        return self.at[-1]

    def holders(self, path: str) -> set[int]:
        return {self.at[stage] for stage in self.homes[path]}

    def without(self, paths: Collection[str]) -> Row:
        return replace(self, homes={path: homes for path, homes in self.homes.items() if path not in paths})

    def stretches(self) -> Stretches:
        return _InRow(self)


class _InRow:
    """A step that calls a unit of an earlier stage goes through all stages again."""

    def __init__(self, row: Row) -> None:
        self._homes, self._at = row.homes, row.at
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
