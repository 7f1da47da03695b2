"""What is noted of a step as it runs on fakes: its events, and all that decides how they are cut and run in stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Any

from torch import Tensor, nn

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.constants import constants_of
from lightning_par.pipeline.program.event_draws import PartDrawn
from lightning_par.pipeline.program.program import Key, StepEvent, is_located, is_metric_call
from lightning_par.pipeline.program.read_only_inputs import Lent, memory_reference
from lightning_par.pipeline.program.routes import Use
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.call_context import modes_around
from lightning_par.pipeline.trial.fake_step import FakeRun
from lightning_par.pipeline.trial.samples.truths import Known
from lightning_par.pipeline.trial.side_inputs import Handed
from lightning_par.pipeline.trial.step_values import StepValues
from lightning_par.pipeline.trial.survey import Seen
from lightning_par.pipeline.trial.transformed import Transformed
from lightning_par.pipeline.trial.unit_buffers import UnitBuffers
from lightning_par.pipeline.trial.unit_changes import UnitChanges
from lightning_par.pipeline.trial.unit_logs import UnitLogs
from lightning_par.private.fake_tensors import FakeTensorMode, unset_fake_temporarily
from lightning_par.python_state.nested_tensors import tensors_in, twin
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.trial.guesses import Key as Question

Layouts = dict[Key, tuple[int, Positions]]


class AnalysisNotes(FakeRun):
    """A run of a step that keeps notes; `lightning_par.pipeline.trial.analysis.Analysis` decides what goes in.

    Args:
        mode: of the fakes.
        stages: how the step is to be cut; without units to look for some.
        axis: a microbatch axis, or None where the batch is not cut.
        batch: its tensors are the first that depend on the batch alone.
        layouts: where tensors that depend on the batch alone hold samples.

    Attributes:
        events: of the step, so far.
        values: the tensors that it meets.
        changes: of units, in Python objects.
        direct: parameters used at container level, and by which event.
        told: those that are logged, read or given to metrics themselves, and before which event.
        lending: events by which a parameter has the memory of another one.
        units: called, and which event that is.
        tail: the first event behind the last call of a unit.
        overwritten: parameters, buffers within units, and which event writes.
        casts: of parameters, by name: what takes them that autocast may run in low precision.
        effects: values that are used at the step's end.
        returned: those that it returns.
        reads: events that turn a value of the model into a number, and where.
        asks: those of them that decide something by it, and the question.
        settled: by ids of values over a microbatch's samples, what is known of them, as the answer that is the whole
            batch's if each microbatch gives it; see `lightning_par.pipeline.trial.samples.truths`.
        sure: those of ``asks`` that were given that answer.
        guards: those of these at which the user's code raises by the other answer, as far as is asked for.
        deciding: what code within units goes by.
        shapes: of what came of the batch alone, by event.
        changes_state: whether the step writes into tensors of the module.
        regions: the first event that backward is to run again, and the first one behind it.
        given: what events are given beside values of the model.
        called: within units: by which event, the function, what it is told.
        constants: of those ``given``, what lies behind the first read.
        outer: units whose state the step's own code changes, or may.
        resets: those that keep something, whose state that changes, too.
        in_hooks: the names of objects that hooks on gradients reach.
        outputs: what units say.
        prints: whether the step's own code prints values of the model by the module.
        mixing: the last error of a function that needed samples together, which the user's code may have caught.
        with_hooks: calls of units within which hooks of the user's hang on modules, by event.
        passed: what calls of units return that are passed by, as on other ranks, by event.
        hooks_on_gradients: on modules of the copy, as the step begins.
        module_ends: of modules with full backward hooks that are no unit: the event that marks it, and whether the
            module begins there.
        tried: of units whose like is tried once, by what they are: whether they do the same on plain tensors, and what
            they draw there.
    """

    def __init__(
        self, mode: FakeTensorMode, stages: Stages, axis: MicrobatchAxis | None, batch: Any, layouts: Layouts
    ) -> None:
        super().__init__(mode, axis)
        self.stages, self.cutter, self.homes = stages, stages.cutter(stages), stages.homes
        self.relays, self.layouts = stages.cutter.relays, layouts
        self.values = StepValues(batch, self.homes)
        self.handed = Handed(self.homes, self.values.keys, self.values.names)
        self.unit_buffers = UnitBuffers(nn.Module(), (), mode, self.note_stand_in)
        self.lent, self.changes = Lent(), UnitChanges(nn.Module(), frozenset())
        self.tries_units = True
        self.tried: dict[Any, tuple[bool, tuple[PartDrawn, ...]]] = {}
        self.resetting: Callable[[str], AbstractContextManager[None]] = lambda path: nullcontext()
        self.tags: dict[int, str] = {}
        self.transformed: Transformed | None = None  # while it runs
        self.has_read = False
        self.read_first: str | None = None  # where a step without a backward first read a value
        self.events: list[StepEvent] = []
        self.direct: list[tuple[str, int]] = []
        self.told: list[tuple[str, int]] = []
        self.lending: set[int] = set()
        self.units: list[tuple[str, int]] = []
        self.tail = 0
        self.overwritten: list[tuple[str, int]] = []
        self.casts = Counter[str]()
        self.effects: list[Tensor] = []
        self.returned: list[Tensor] = []
        self.reads: list[tuple[int, str]] = []
        self.asks: dict[int, Question] = {}
        self.settled: dict[int, Known] = {}
        self.sure: set[int] = set()
        self.guards: frozenset[int] = frozenset()
        self.deciding: set[str] = set()
        self.shapes: dict[int, list[tuple[int, ...]]] = {}
        self.changes_state = False
        self.regions: dict[int, int] = {}
        self.given: list[tuple[int, Any]] = []
        self.called: list[tuple[int, Any, Any]] = []
        self.constants: list[tuple[int, Any]] = []
        self.outer: frozenset[str] = frozenset()
        self.resets: frozenset[str] = frozenset()
        self.in_hooks: frozenset[str] = frozenset()
        self.outputs = UnitLogs()
        self.prints = False
        self.unfit: SamplesMixError | NoScheduleError | None = None  # what was last said to the user's code
        self.with_hooks: dict[int, str] = {}
        self.passed: Mapping[int, Any] = {}
        self.hooks_on_gradients: dict[nn.Module, int] = {}
        self.module_ends: list[tuple[int, nn.Module, bool]] = []

    def module_end(self, module: nn.Module, begins: bool) -> None:
        if not self.depth:  # a unit is on one rank
            self.module_ends.append((len(self.events) - 1, module, begins))

    @contextmanager
    def saying(self) -> Iterator[None]:
        """What is raised inside tells the user's code that the cut doesn't fit. It may catch that, or make an error of
        its own of it."""
        try:
            yield
        except (SamplesMixError, NoScheduleError) as error:
            self.unfit = error
            raise

    def check_fit(self, error: Exception | None = None) -> None:
        """Raises what was said, where the user's code has caught it, and gone another way than on one device, or made
        ``error`` of it."""
        if self.unfit is not None and self.unfit is not error:
            raise self.unfit from error

    def number(self) -> int:
        return len(self.events)

    def seen(self) -> list[Seen]:
        """What the step did, as another run of it has it, too."""
        shapes = self.shapes
        return [Seen(event.func, event.place, tuple(shapes.get(n, ()))) for n, event in enumerate(self.events)]

    def note_constants(self, index: int, value: Any) -> None:
        """The event of this number is given ``value``, values of the model included."""
        if self.has_read or self.changes.looked:
            with unset_fake_temporarily():
                found = index, constants_of(value, is_located)
            self.given.append(found)
            if self.has_read:
                self.constants.append(found)

    def uses(self) -> Iterable[Use]:
        """Every located value with each event that takes it; metrics, logs and what is returned take it at the end."""
        for index, event in enumerate(self.events):
            if event.kind != "update":
                yield from ((key, inf if is_metric_call(event) else index) for key in event.inputs)
        yield from ((self.values.keys[id(x)], inf) for x in self.effects if id(x) in self.values.keys)

    def finish(self) -> None:
        """After the step: what it wrote into tensors of the module counts as used at its end."""
        self.values.picked.about_to_run("", ())
        for index in self.values.picked.copied:
            self.events[index].copies = True
        written = [value for target, value in self.written_tensors() if self.values.is_state(target)]
        self.effects += written
        self.values.check_current(self.effects)
        self.changes_state |= bool(written)

    def keep(self, func: Any, kind: Any, inputs: Iterable[Tensor], result: Any) -> StepEvent:
        """Note an event that took ``inputs`` and returned ``result``."""
        values, index = self.values, len(self.events)
        self.lent.about_to_take(filter(values.is_of_batch, inputs))
        event = StepEvent(
            func, kind, values.keys_of(inputs), twin(result), user_line(), modes_around()
        )  # it may be written into
        self.draws.end(event)
        event.given = tuple(tuple(x.shape) for x in inputs if values.is_of_batch(x))
        self.events.append(event)
        written = values.memory.settle(index)
        self._note_overwritten(index, written)
        self.lent.give((x for x in inputs if not is_located(x) and not values.is_state(x)), written)
        values.made(index, inputs, result)
        return event

    def _note_overwritten(self, index: int, written: set[Any]) -> None:
        memory = self.values.memory
        self.overwritten += [(memory.names[one], index) for one in written & memory.names.keys()]

    def refuse_repeated_writes(self) -> None:
        """Raises `SamplesMixError` where each of several microbatches would write into a weight."""
        for name, _ in self.overwritten if self.axis is not None else ():
            raise SamplesMixError(f"{self.values.memory.places[name]}: {name!r} is written into at each run")

    def use_parameter(self, x: Tensor) -> None:
        """The next event takes ``x``, which may be a parameter."""
        if self.values.is_parameter(x):
            self.direct.append((self.values.names[id(x)], len(self.events)))

    def note_stand_in(self, fake: Tensor, name: str) -> None:
        """``fake`` stands for the buffer ``name`` of a unit, as other fakes do for parameters."""
        self.values.names[id(fake)] = name
        if (memory := memory_reference(fake)) is not None:
            self.values.memory.names[memory] = name

    def tell(self, value: Any) -> list[Tensor]:
        """``value`` is logged, printed or given to a logger; its tensors."""
        self.note_told(value)
        tensors = tensors_in(self.followed(value))
        self.lent.give(x for x in tensors if not is_located(x) and not self.values.is_state(x))
        self.effects += tensors
        return tensors

    def note_told(self, value: Any) -> None:
        """Parameters in ``value`` are told as they are now, by no function."""
        names = self.values.names
        self.told += [(names[id(x)], len(self.events)) for x in tensors_in(value) if id(x) in names]
