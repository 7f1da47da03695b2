"""Where a run stands in its data: in which order the epoch's batches come, and what draws random numbers meanwhile.

Lightning's checkpoint says how many batches of an epoch were run. A loader that can't be put back there begins anew
when the run is resumed, in another order, and gives its first batches again. Kept besides is where the generators of
random numbers stood when the epoch began, so that it begins again in its order, and the batches that were run are
fetched and let go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_par.checkpoint import generator_states
from lightning_par.python_state import generators

State = dict[str, Any]
KEPT = ("now", "began", "first", "restarts", "loaders", "loaders_began")
"""What a checkpoint has of a position, by the names of `Resumed`."""


@dataclass(frozen=True)
class GeneratorStates:
    """Where generators stand.

    Args:
        raw: the global ones.
        own: those that loaders, and what they read from, have of their own.
    """

    raw: tuple[Any, ...]
    own: list[Any]

    @classmethod
    def of(cls, found: list[Any]) -> GeneratorStates:
        """Of the global generators, and those that `own_generators` found."""
        return cls(generators.raw_state(), generator_states.saved_states(found))

    def saved(self) -> State:
        """For a checkpoint."""
        return {"global": generator_states.saved_state(self.raw), "own": self.own}


def own_generators(loaders: Iterable[Any]) -> list[Any]:
    """The generators of ``loaders`` and of what they read from; not of workers, which come and go."""
    names = ("generator", "sampler", "batch_sampler", "dataset")
    return generators.find([[getattr(loader, name, None) for name in names] for loader in loaders])


def put_back(state: State, found: list[Any]) -> None:
    """Put the generators to where they stood; the inverse of `GeneratorStates.saved`."""
    generator_states.load_state(state["global"])
    generator_states.load_states(found, state["own"])


@dataclass
class Resumed:
    """Where the checkpoint stands that a run goes on from.

    Args:
        batches: of the epoch that need not be run again.
        now: the generators when it was written.
        began: the generators when the epoch's iterator was made.
        first: the generators when its first batch was asked for; None as long as it was not.
        restarts: by the number of a batch for which one of several loaders began anew, as a shorter one does, the
            generators before it was fetched: it draws another order then.
        loaders: states of those loaders that have one.
        loaders_began: the same when the epoch's iterator was made.
    """

    batches: int
    now: State
    began: State | None
    first: State | None
    restarts: dict[int, State] = field(default_factory=dict)
    loaders: list[Any] = field(default_factory=list)
    loaders_began: list[Any] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Whether the epoch's iterator was made, which may have drawn, and no batch was asked for."""
        return self.batches == 0 and self.began is not None and self.first is None


class DataPosition:
    """Where a run stands in its training data; of one fit, after whose end it can still be saved.

    Attributes:
        resumed: what is to be gone on from, until it was.
        found: the loaders' own generators.
        stateful: the loaders that have a state.
        began, first, restarts, loaders_began: as of `Resumed`, of the epoch that runs.
        fetched: how many batches of it.
        step: the generators before the first batch of the optimizer step that is under way; kept where a step has
            several batches, whose gradients no checkpoint holds.
        validation: the generators before the last validation that was begun.
    """

    def __init__(self) -> None:
        self.resumed: Resumed | None = None
        self.found: list[Any] = []
        self.stateful: list[Any] = []
        self.loaders_began: list[Any] = []
        self.began: State | None = None
        self.first: State | None = None
        self.restarts: dict[int, State] = {}
        self.fetched = 0
        self.step: GeneratorStates | None = None
        self.validation: GeneratorStates | None = None

    def standing(self) -> GeneratorStates:
        return GeneratorStates.of(self.found)

    def note_validation(self) -> None:
        """A validation is about to begin."""
        self.validation = self.standing()

    def states(self) -> list[Any]:
        """Of the loaders that have one."""
        return [loader.state_dict() for loader in self.stateful]

    def saved(self, in_step: bool, in_validation: bool = False) -> State:
        """What goes into a checkpoint, by the names of `Resumed`.

        Args:
            in_step: whether batches were run since the last optimizer step, which will be run again.
            in_validation: whether a validation runs, which will be run again.
        """
        if self.resumed is not None and (self.resumed.batches or self.resumed.has_begun):  # not gone on from yet
            return {name: getattr(self.resumed, name) for name in KEPT}
        again = self.step if in_step else self.validation if in_validation else None
        now = self.standing() if again is None else again
        return {
            "now": now.saved(),
            "began": self.began,
            "first": self.first,
            "restarts": self.restarts,
            "loaders": self.states(),
            "loaders_began": self.loaders_began,
        }
