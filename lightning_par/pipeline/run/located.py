"""Located execution: the user's own step, of which only a part is computed here.

Every torch function at container level, and every call of a unit, is an event. Events that see nothing but the batch
are computed whole, once a step; events that see parameters are *located*: they run on the stage whose stretch of the
step they lie in. Stages follow one another in the order of execution, so what a stage needs comes from those before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.trial.placeholders import AbsentNumber
from lightning_par.private.compiler import uncompiled
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.modes import innermost_mode
from lightning_par.private.module_calls import get_call, plain_call, reset_call, set_call
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.functions import MEMORY, MEMORY_KINDS, METADATA, SHOWS, VALUE_PROPERTIES, writes
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.guesses import Guesses, Patterns

if TYPE_CHECKING:
    from lightning_par.pipeline.program.routes import Routes

Key = tuple[int, int]  # (event, which of its tensors); events of the batch's own tensors are -1
Kind = Literal["batch", "located", "read"]


class StageDoneError(BaseException):
    """The stage has all that it owes to the next one; no ``except Exception`` of the user's stops it."""


class OtherStageError(RuntimeError):
    """The step asks for a value that lives on another stage."""


class ChangedError(Exception):
    """The step did something else than what was recorded of it."""


@dataclass(eq=False)
class StepEvent:
    """One torch function, or one call of a unit.

    Attributes:
        func: the function, or the unit's FQN, or ``("metric", method)``.
        kind: ``"batch"`` if it sees the batch alone, ``"located"`` if it sees parameters, ``"read"`` if it turns a
            located value into a Python number.
        inputs: the located values that it takes, in order.
        result: what it returned in the analysis; its tensors stand for absent values.
        place: ``file:line`` of the user's code.
        shares: for sums of shares with something that is not a share: its arguments that are scaled to one.
        cuts: whether it is given the microbatch's samples of tensors that depend on the batch alone, not the whole.
        unsized: whether the shape of its result depends on values of the model.
        sizing: the content of the batch's tensors that tell that shape, where some do.
        sets: whether it writes into a located tensor without returning it, as `x[0] = y` does; that is its result.
        writes: whether it writes into a tensor that depended on the batch alone, and is its first argument.
        itself: which of its tensors is what it returns, where that is a parameter.
        given: the shapes of its inputs that depend on the batch alone.
        flops: that it costs.
        viewed: whether a unit is to see the whole batch's shapes, as the step does.
        told: what it is given beside tensors, where that may decide whether samples mix; None until the first dry
            run finds it.
        by_numbers: whether a unit decides by floats that it is given.
        by_content: whether a unit decides by values of tensors.
        handed: how many of its last inputs it takes by another way than its arguments.
        live: whether it sees numbers that were read of the model's values, beside the batch alone.
    """

    func: Any
    kind: Kind
    inputs: tuple[Key, ...]
    result: Any
    place: str
    shares: tuple[int, ...] = ()
    cuts: bool = False
    unsized: bool = False
    sizing: tuple[Any, ...] | None = None
    sets: bool = False
    writes: bool = False
    itself: int | None = None
    given: tuple[tuple[int, ...], ...] = ()
    flops: float = 0.0
    viewed: bool = False
    live: bool = False
    told: tuple[Any, ...] | None = None
    by_numbers: bool = True
    by_content: bool = False
    handed: int = 0


def is_metric_call(event: StepEvent) -> bool:
    return isinstance(event.func, tuple)


@dataclass(eq=False)
class Program:
    """What one step does on batches of one signature, cut into stages. Made by `lightning_par.pipeline.trial.analysis`.

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
        changes_batch: whether it writes into tensors that depend on the batch alone.
        uses: the stages that use a unit, or a parameter that no unit holds.
        deciding: the numbers on modules, by name, and attributes of the trainer that code within units goes by.
        regions: the first event of a region that backward is to run again, and the first one behind it.
        patterns: of the guesses by which the step decides.
        overwritten: the parameters, and buffers within units, that the step writes into.
        keeping: the units that change Python state, by their own code or by hooks on them.
        outer: units whose state the step's own code changes, as far as known: those that it does not call.
        leaves: whether units change objects, which others were seen not to go by.
        in_hooks: the names of objects that hooks on gradients reach, which meet them as they were before the step.
        hooked: whether code runs in its backward that may keep something: hooks on gradients, what is computed again.
        hooked_later: hooks on values of earlier stages: whose, in whose backward they run, and where they are put.
        made: what they stored when the step was recorded, by the id of the object that holds it and where in it, with
            that object.
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
    changes_batch: bool = False
    uses: dict[str, set[int]] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    deciding: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    keeping: frozenset[str] = frozenset()
    outer: frozenset[str] = frozenset()
    leaves: bool = False
    in_hooks: frozenset[str] = frozenset()
    hooked: bool = False
    hooked_later: tuple[tuple[int, int, str], ...] = ()
    made: Mapping[tuple[int, Any], tuple[Any, Any]] = field(default_factory=dict)
    patterns: Patterns = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.starts)

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which knows what the step did."""
        return self.at[-1]

    def end(self, stage: int) -> int:
        """The first event that is not the stage's any more."""
        return self.starts[stage + 1] if stage + 1 < self.stages else len(self.events) + 1


# Functions that read only what an absent value tells, too.
_TOLD = METADATA | MEMORY | MEMORY_KINDS | SHOWS


# Functions that take of another tensor only what an absent value tells, too, written without it.
WITHOUT_ANOTHER: dict[str, Callable[[Tensor, Tensor], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "to": lambda x, like: (Tensor.to, (x,), {"dtype": like.dtype, "device": like.device}),
    "type_as": lambda x, like: (Tensor.to, (x,), {"dtype": like.dtype, "device": like.device}),
    "expand_as": lambda x, like: (Tensor.expand, (x, tuple(like.shape)), {}),
    "view_as": lambda x, like: (Tensor.view, (x, tuple(like.shape)), {}),
    "reshape_as": lambda x, like: (Tensor.reshape, (x, tuple(like.shape)), {}),
}


def is_metadata(func: Any, name: str) -> bool:
    """Whether ``func``, whose ``__name__`` is ``name``, reads only what an absent value tells, too."""
    if name == "__set__":
        return getattr(func.__self__, "__name__", "") != "data"
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in VALUE_PROPERTIES
    return name in _TOLD


def writes_into(name: str) -> bool:
    """Whether a function of this name writes into its first argument; the only property that is set is ``data``."""
    return writes(name) or name == "__set__"


def is_setting(given: Any, result: Any) -> bool:
    """Whether a function neither took nor gave a tensor: it asks or switches a mode, and does so in every run."""
    return not tensors_in(given) and not tensors_in(result)


def is_located(x: Tensor) -> bool:
    """Whether a tensor of the analysis depends on parameters."""
    return isinstance(x, (FakeTensor, ShardedTensor))


class Run(TorchFunctionMode):
    """One run of the step. Subclasses say what an event does.

    What the user compiled runs as it is written but in units: a graph would hide the events that it is made of.
    """

    current: Run | None = None

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.count = 0  # events so far
        self.recomputes = False  # whether something in it runs again in backward
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of the batch alone that a located value was written into, by id: they stand for the new value."""

    def __enter__(self) -> Any:
        self._before, Run.current = Run.current, self
        self._as_written = uncompiled()
        self._as_written.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        Run.current = self._before
        self._as_written.__exit__(None, None, None)
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # within an event or a unit: its inner functions are not events
        if self.depth or is_metadata(func, getattr(func, "__name__", "")):
            return func(*args, **kwargs)
        # so that no value crosses stages for its dtype or shape alone
        if getattr(func, "__name__", "") in WITHOUT_ANOTHER and len(args) == 2 and isinstance(args[1], Tensor):
            func, args, more = WITHOUT_ANOTHER[func.__name__](*args)
            kwargs = {**more, **kwargs}
        self.depth += 1
        try:
            return self.event(func, self.followed(args), self.followed(kwargs))
        finally:
            self.depth -= 1

    def call(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called at container level."""
        self.depth += 1
        try:
            return self.unit(path, module, original, self.followed(args), self.followed(kwargs))
        finally:
            self.depth -= 1

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Functions inside, which are no events, do not even meet the run; under a mode of the user's they still do."""
        alone = innermost_mode() is self
        if alone:  # only the innermost mode can be left
            super().__exit__(None, None, None)
        try:
            yield
        finally:
            if alone:
                super().__enter__()

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """User code inside, which a torch function called, meets the run again."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def followed(self, value: Any) -> Any:
        """``value`` with what was written in place of what it was written into."""
        if not self.written:
            return value
        return map_tensors(lambda x: self.written[id(x)][1] if id(x) in self.written else x, value)

    def copied(self, x: Tensor) -> Tensor:
        """``x`` as it is now."""
        return x.detach().clone()

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    @contextlib.contextmanager
    def region(self, by_itself: Callable[[Callable[[], Any]], Any]) -> Iterator[bool]:
        """Around what activation checkpointing runs again in backward; gives whether that can be done to all at once.

        Args:
            by_itself: makes a call of which nothing is kept but its arguments, and which backward runs again.
        """
        yield True

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A metric's ``method`` is called at container level."""
        raise NotImplementedError


class RecordedRun(Run):
    """A run of a step whose program is known."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __enter__(self) -> Any:
        self._guesses, AbsentNumber.guesses = AbsentNumber.guesses, Guesses(self.program.patterns, bounded=False)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        AbsentNumber.guesses = self._guesses
        super().__exit__(*exception)

    def may_be_setting(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call that is not the next event of the program may ask or switch a mode; see `is_setting`."""
        events = self.program.events
        is_next = self.count < len(events) and events[self.count].func == func
        return not is_next and not tensors_in((args, kwargs))


@contextlib.contextmanager
def no_events() -> Iterator[Run | None]:
    """What is done inside is no event of the run that is on, which is given, if there is one."""
    run = Run.current
    if run is None:
        yield None
        return
    run.depth += 1
    try:
        yield run
    finally:
        run.depth -= 1


class LocatedCall:
    """Takes the place of a unit's call."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.original = plain_call(module)
        self.outside: Callable[..., Any] | None = None
        """Takes calls while no run is on; see `lightning_par.pipeline.between_steps.module_calls`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is called as it is

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()  # None, as for a deep copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = Run.current
        if run is None and self.outside is not None:
            return self.outside(self.path, self.module, self.original, args, kwargs)
        if run is None or run.depth:  # within another unit it is part of that one's event
            return self.original(*args, **kwargs)
        return run.call(self.path, self.module, self.original, args, kwargs)


def intercept_units(module: nn.Module, units: tuple[str, ...]) -> None:
    """Let calls of the ``units`` of ``module`` ask the run that is on."""
    for path in units:
        unit = module.get_submodule(path)
        set_call(unit, LocatedCall(path, unit))


def release_units(module: nn.Module) -> None:
    """Undo `intercept_units`."""
    for unit in module.modules():
        call = get_call(unit)
        if isinstance(call, LocatedCall):
            reset_call(unit, call.original)
