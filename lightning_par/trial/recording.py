"""What one trial run of a step did: its torch functions, in order, on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_par.private.pytree import tree_leaves
from lightning_par.sharded.functions import READS, SIZED_BY_SECOND, name_of
from lightning_par.trial.applied_functions import Applied
from lightning_par.trial.fake_functions import OnOnes, is_fake
from lightning_par.trial.guesses import Patterns


@dataclass(frozen=True)
class Event:
    """One torch function that the step called; tensors are fake, and known by identity."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    place: str  # file:line of the user's code
    graph: bool = True  # whether autograd was on; a view of a weight says that it requires gradients either way

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def reads(self) -> bool:
        """Whether the step went on by a guess of values that are not there, or of how many there are."""
        unsized = isinstance(self.func, OnOnes) and self.func.unsized
        told = self.name in SIZED_BY_SECOND and len(self.args) > 1 and not is_fake(self.args[1])
        return unsized and not told or self.result is None and self.name in READS

    @cached_property
    def inputs(self) -> list[Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    @cached_property
    def outputs(self) -> list[Tensor]:
        return [x for x in tree_leaves(self.result) if isinstance(x, Tensor)]


@dataclass(frozen=True, eq=False)
class End:
    """Where a step of a plan runs backward itself.

    Attributes:
        value: from what.
        events: after how many.
        trained: ids of the parameters that require a gradient as it begins.
    """

    value: Tensor
    events: int
    trained: frozenset[int]


@dataclass(frozen=True)
class Recording:
    """What one run of a step did.

    Attributes:
        events: the torch functions, in order.
        parameters: every parameter's fake, under all its names: a tied one has several.
        batch: the tensors of the batch as the step found it.
        names: of each of them, see `lightning_par.trial.batch_tensors`.
        result: what the step returned.
        stopped: why the recording ended early, or None.
        refused: what the user is told where a sharded tensor went out of sight, or None.
        patterns: of the guesses by which the step ran.
        heard: what a `lightning_par.trial.listener.Listener` made of the run, if it came to its end.
        ends: where the step runs backward itself, of a plan.
        applied: calls of the user's autograd functions, of a plan.
        drew_for_cache: whether a function under `functools.lru_cache` drew.
        unstarted: how hooks that Lightning calls before the step failed on fakes, where they were called and did.
        plain: of a run on sharded tensors, what the step would do on whole ones, where that was asked for and is known.
    """

    events: tuple[Event, ...]
    parameters: dict[tuple[str, ...], Tensor]
    batch: tuple[Tensor, ...]
    result: Any
    stopped: str | None = None
    refused: str | None = None
    patterns: Patterns = field(default_factory=dict)
    heard: Any = None
    drew_for_cache: bool = False
    ends: tuple[End, ...] = ()
    applied: tuple[Applied, ...] = ()
    plain: Recording | None = None
    names: tuple[str, ...] = ()
    unstarted: str | None = None

    @cached_property
    def met(self) -> int:
        """Elements of the parameters that some function takes."""
        met = {id(x) for event in self.events for x in event.inputs}
        return sum(x.numel() for x in self.parameters.values() if id(x) in met)

    @cached_property
    def met_all(self) -> bool:
        """Whether the step came to every parameter."""
        return self.met == sum(x.numel() for x in self.parameters.values())

    @property
    def is_whole(self) -> bool:
        """Whether the step came to its end, and to every parameter."""
        return self.stopped is None and self.met_all


def returned(result: Any) -> Any:
    """Stands at the end of a recording for what the step returned: that leaves the step whole."""
    return result


def in_transform(taken: Any) -> None:
    """Stands in a recording for a function within a transform such as ``torch.vmap``, which takes whole tensors."""


def metric_update(*args: Any, **kwargs: Any) -> None:
    """Stands in a recording for the update of a metric, which has no rule."""
