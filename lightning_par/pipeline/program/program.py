"""What one step does: its events, in order, and how they are cut into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.program.event_draws import Drawn, PartDrawn
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.pipeline.trial.deciding_numbers import Asked
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.nested_tensors import returned_tensors
from lightning_par.sharded.functions import HOOKS, writes_into
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.guesses import Patterns
from lightning_par.trial.large_values import is_large
from lightning_par.trial.memo import Memo

if TYPE_CHECKING:
    from lightning_par.pipeline.program.backward_reads import BackwardReads
    from lightning_par.pipeline.program.routes import Routes

Shares = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Of the tensors in what is logged, and in what loggers are given, which are shares of a sum over samples."""
Key = tuple[int, int]  # (event, which of its tensors); events of the batch's own tensors are -1
Kind = Literal["batch", "located", "read", "update"]


@dataclass(eq=False)
class StepEvent:
    """One torch function, or one call of a unit.

    Attributes:
        func: the function, or the unit's FQN, or ``("metric", method)``.
        kind: ``"batch"`` if it sees the batch alone, ``"located"`` if it sees parameters, ``"read"`` if it turns a
            located value into a Python number, ``"update"`` if it is part of what is done with weights alone.
        inputs: the located values that it takes, in order.
        result: what it returned in the analysis; its tensors stand for absent values.
        place: ``file:line`` of the user's code.
        around: the modes that the user's code has set around it, as `modes_around` tells them.
        shares: for sums of shares with something that is not a share: its arguments that are scaled to one.
        cuts: whether it is given the microbatch's samples of tensors that depend on the batch alone, not the whole.
        unsized: whether the shape of its result depends on values of the model.
        claimed: whether the user's code says that shape, as a count of kinds with a ``minlength`` does; a stage before
            the last holds it to that.
        sizing: the content of the batch's tensors that tell that shape, where some do.
        sets: whether it writes into a located tensor without returning it, as `x[0] = y` does; that is its result.
        copies: whether it gives a copy of what it takes, as of `x[i]` in ``x[i] += 1``.
        writes: whether it writes into a tensor that depended on the batch alone, and is its first argument.
        itself: which of its tensors is what it returns, where that is a parameter.
        given: the shapes of its inputs that depend on the batch alone.
        flops: that it costs.
        viewed: whether a unit is to see the whole batch's shapes, as the step does.
        told: what it is given beside tensors, where that may decide whether samples mix; None until the first dry
            run finds it.
        by_numbers: whether a unit decides by floats that it is given.
        by_content: whether a unit decides by values of tensors.
        asked: what a unit of a whole batch asks of the numbers that it is told.
        handed: how many of its last inputs it takes by another way than its arguments.
        draws: whether it draws from torch's global generators.
        drawn: the random numbers that it draws on one device, if ranks are to know.
        parts: of what functions within a unit draw for the samples of microbatches.
        said: what a unit logs and gives to loggers of a microbatch, if anything.
        live: whether it sees numbers that were read of the model's values, beside the batch alone.
        remade: whether each run of the step has a copy of its result, since such numbers are written into it.
        graphed: whether it is of the batch alone and has a graph behind it, of which each run of the step has its own.
        behind: whether an update follows the step's stages, not the stages the update.
    """

    func: Any
    kind: Kind
    inputs: tuple[Key, ...]
    result: Any
    place: str
    around: tuple[Any, ...] = ()
    shares: tuple[int, ...] = ()
    cuts: bool = False
    unsized: bool = False
    claimed: bool = False
    sizing: tuple[Any, ...] | None = None
    sets: bool = False
    copies: bool = False
    writes: bool = False
    itself: int | None = None
    given: tuple[tuple[int, ...], ...] = ()
    flops: float = 0.0
    viewed: bool = False
    live: bool = False
    remade: bool = False
    graphed: bool = False
    behind: bool = False
    told: tuple[Any, ...] | None = None
    by_numbers: bool = True
    by_content: bool = False
    asked: Asked = ()
    handed: int = 0
    draws: bool = False
    drawn: tuple[Drawn, ...] = ()
    parts: tuple[PartDrawn, ...] = ()
    said: Shares | None = None

    @cached_property
    def returned(self) -> list[tuple[int, bool]]:
        """The ids of the tensors in the result, and which of these depend on parameters; once the program is made."""
        return [(id(x), is_located(x)) for x in returned_tensors(self.result)]

    @cached_property
    def may_be_told(self) -> bool:
        """Whether a stage may run it by what it was given in a dry run, the user's step left out, so far as that is
        plain; once the program is made."""
        name = getattr(self.func, "__name__", "")
        odd = self.kind != "located" or self.writes or self.sets or self.handed or self.live or self.unsized
        if odd or is_metric_call(self) or name in HOOKS or writes_into(name):
            return False
        # nothing but values of the model, and no number, is in what it returns
        return all(x is None or isinstance(x, Tensor) and is_located(x) for x in tree_leaves(self.result))


def makers_of(events: Sequence[StepEvent], last: int) -> set[int]:
    """The events that what ``last`` is given is made by, and itself."""
    found, waiting = set[int](), [last]
    while waiting:
        index = waiting.pop()
        if index not in found:
            found.add(index)
            waiting += [key[0] for key in events[index].inputs]
    return found


def is_metric_call(event: StepEvent) -> bool:
    """Whether an event is the call of a metric."""
    return isinstance(event.func, tuple)


def is_located(x: Tensor) -> bool:
    """Whether a tensor of the analysis depends on parameters."""
    return isinstance(x, ShardedTensor) or isinstance(x, FakeTensor) and not is_large(x)


@dataclass(eq=False)
class Program:
    """What one step does on batches of one signature, cut into stages. Made by `make_program`.

    Attributes:
        events: all of them, in order.
        starts: the event with which each stage's stretch begins.
        at: the rank of each stage, as an index along the pipeline axis.
        tail: the first event behind the last call of a unit.
        routes: the ways of the values that cross from stage to stage.
        after: for each stage, those whose forwards run before its own.
        costs: the flops of each stage's forward.
        layouts: tensors that depend on the batch alone and hold samples: along which dim, and by which positions.
        values: the recorded tensor of every crossing value.
        wanted: crossing values that get a gradient.
        summed: values that the tail takes and of which each microbatch has a share.
        samples: of the batch.
        microbatches: how many it is cut into.
        result: what the step returned.
        loss_is_share: whether the loss is a sum over samples, so that microbatches yield shares of it.
        plain_effects: whether all that the step logs and returns are shares or samples, so that they can be joined.
        joins: the values that are shares or samples, so that they may be logged and returned, too, as this is.
        changes_batch: whether it writes into tensors that depend on the batch alone.
        uses: the stages that use a unit, or a parameter that no unit holds.
        deciding: the numbers on modules, by name, and attributes of the trainer that code within units goes by.
        regions: the first event of a region that backward is to run again, and the first one behind it.
        patterns: of the guesses by which the step decides.
        decides: whether it decides anything by values of the model.
        guards: events that ask for a value of the model before the last stage, or of microbatches before the last unit,
            where another answer has to raise.
        overwritten: the parameters, and buffers within units, that the step writes into.
        elsewhere: parameters, and buffers within units, that another rank than the last stage's has, or has, too.
        last_buffers: buffers within units that the last stage's rank alone has.
        casts_once: whether no parameter is taken twice by what autocast may run in low precision.
        keeping: the units that change Python state, by their own code or by hooks on them.
        outer: units whose state the step's own code changes, as far as known: those that it does not call.
        resets: units that change Python state which the step's own code changes, too.
        leaves: whether units change objects, which others were seen not to go by.
        in_hooks: the names of objects that hooks on gradients reach, which meet them as they were before the step.
        hooked: whether code runs in its backward that may keep something: hooks on gradients, what is computed again.
        says: whether units log something, print it by the module or give it to loggers.
        reads_gradients: whether its code looks at gradients, which earlier steps may have left.
        hooked_later: hooks on values of earlier stages: whose, in whose backward they run, and where they are put.
        made: what they stored when the step was recorded, by the id of the object that holds it and where in it, with
            that object.
        local_events: what events came to on plain tensors; see `lightning_par.pipeline.run.local_events`.
        shapes: of a microbatch's part of what units returned, by event and microbatch.
        backward_reads: which weights its backward reads, where it has one.
        drawing: stages whose units draw from torch's global generators, which no trial has shown.
    """

    events: list[StepEvent]
    starts: tuple[int, ...]
    at: tuple[int, ...]
    tail: int
    routes: Routes
    after: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    layouts: dict[Key, tuple[int, Positions]]
    values: dict[Key, Tensor]
    wanted: frozenset[Key]
    summed: frozenset[Key]
    samples: int
    microbatches: int
    result: Any = None
    loss_is_share: bool | None = True
    plain_effects: bool = False
    joins: frozenset[Key] = frozenset()
    changes_batch: bool = False
    uses: dict[str, set[int]] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    deciding: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    last_buffers: frozenset[str] = frozenset()
    casts_once: bool = True
    keeping: frozenset[str] = frozenset()
    outer: frozenset[str] = frozenset()
    resets: frozenset[str] = frozenset()
    leaves: bool = False
    in_hooks: frozenset[str] = frozenset()
    hooked: bool = False
    says: bool = False
    reads_gradients: bool = False
    hooked_later: tuple[tuple[int, int, str], ...] = ()
    made: Mapping[tuple[int, Any], tuple[Any, Any]] = field(default_factory=dict)
    patterns: Patterns = field(default_factory=dict)
    decides: bool = False
    guards: frozenset[int] = frozenset()
    local_events: Memo[Any, Any] = field(default_factory=Memo)
    shapes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    backward_reads: BackwardReads | None = None
    drawing: set[int] = field(default_factory=set)

    @cached_property
    def axes(self) -> tuple[MicrobatchAxis, ...]:
        """The microbatches, one after another."""
        return tuple(MicrobatchAxis(self.microbatches, i) for i in range(self.microbatches))

    @cached_property
    def decides_by_values(self) -> bool:
        """Whether the step may go on by values of the model behind the last unit, as Python gets them."""
        return any(event.kind == "read" or event.unsized for event in self.events[self.tail :])

    @cached_property
    def stages(self) -> int:
        return len(self.starts)

    def is_at_end(self, key: Key, joined: bool) -> bool:
        """Whether a value is there where the step runs for what it logs, returns and stores.

        Args:
            key: of the value.
            joined: whether that of microbatches is put together.
        """
        if self.microbatches > 1 and not joined:
            return key[0] >= self.tail or key in self.routes.tail
        return key[0] >= self.starts[-1] or key in self.routes.keys_coming[-1]

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which knows what the step did."""
        return self.at[-1]

    def end(self, stage: int) -> int:
        """The first event that is not the stage's any more."""
        return self.starts[stage + 1] if stage + 1 < self.stages else len(self.events) + 1
