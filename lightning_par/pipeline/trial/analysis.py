"""Find out what a step does: run it once on fake parameters and the real batch, and keep the program.

The batch's samples are followed by the rules for sharded tensors, along an axis of microbatches: a function that needs
several samples together shows itself, and what becomes a sum over samples is known to be a sum of shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor, nn

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.effects.metrics import value_like
from lightning_par.pipeline.effects.random_draws import GlobalDrawError, is_standing, standing
from lightning_par.pipeline.effects.unit_effects import Left, Sight, show
from lightning_par.pipeline.effects.watched_run import LENT, state_of
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.batch_values import touches_state
from lightning_par.pipeline.program.constants import constants_of, words_of
from lightning_par.pipeline.program.event_functions import is_setting, most_casts, writes_into
from lightning_par.pipeline.program.microbatch_values import cut_to, written_into
from lightning_par.pipeline.program.program import Key, StepEvent, is_located, is_metric_call
from lightning_par.pipeline.program.read_only_inputs import Lent
from lightning_par.pipeline.program.routes import Use
from lightning_par.pipeline.program.shared_storage import SharedStorage
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.call_context import told_to, watched
from lightning_par.pipeline.trial.code_attributes import TENSORS
from lightning_par.pipeline.trial.fake_step import FakeRun, sizing
from lightning_par.pipeline.trial.placeholders import read_placeholder
from lightning_par.pipeline.trial.samples.sample_sums import Share, tag_of
from lightning_par.pipeline.trial.samples.unit_trial import acts_plainly
from lightning_par.pipeline.trial.side_inputs import Handed, UnitError, maker_of
from lightning_par.pipeline.trial.survey import Seen
from lightning_par.private.fake_tensors import FakeTensorMode, unset_fake_temporarily
from lightning_par.private.modes import is_any_autocast
from lightning_par.private.module_hooks import number_of_backward_hooks
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.transforms import in_functorch
from lightning_par.python_state.changes import as_it_is, stored_by
from lightning_par.python_state.nested_tensors import map_returned, map_tensors, returned_tensors, tensors_in, twin
from lightning_par.python_state.snapshot import Snapshot, plainly
from lightning_par.sharded.functions import READS
from lightning_par.sharded.patches.transforms import TRANSFORMS
from lightning_par.sharded.rules.lookup import user_line, writes
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.fake_functions import linked

Layouts = dict[Key, tuple[int, Positions]]


class ClosesOverModelError(Exception):
    """A transformed function that is given tensors of the batch alone uses parameters, too."""


@dataclass
class Closure:
    """What a function may use that is transformed, as by ``torch.vmap``: one event, whatever it does.

    Attributes:
        given: ids of the tensors that it is given.
        takes: whether it depends on the model.
    """

    given: set[int]
    takes: bool


class ReadFirstError(BaseException):
    """A step without a backward calls modules after it has read a value of the model, by which it may go on.

    No ``except Exception`` of the user's goes on after it.

    Attributes:
        run: the step as far as it came.
        place: where it read the value.
    """

    def __init__(self, run: Analysis, place: str) -> None:
        super().__init__(place)
        self.run, self.place = run, place


class Analysis(FakeRun):
    """Runs the step on a copy of the module whose parameters are fake.

    Args:
        mode: of the fakes.
        stages: how the step is to be cut; without units to look for some.
        grad: whether a backward follows.
        axis: a microbatch axis, or None where the batch is not cut.
        batch: its tensors are the first that depend on the batch alone.
        layouts: where tensors that depend on the batch alone hold samples.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        stages: Stages,
        grad: bool,
        axis: MicrobatchAxis | None,
        batch: Any,
        layouts: Layouts,
    ) -> None:
        super().__init__(mode, axis)
        self.stages, self.cutter, self.homes = stages, stages.cutter(stages), stages.homes
        self.names: dict[int, str] = {}  # of fake parameters, by id
        self.keys: dict[int, Key] = {}
        self.handed = Handed(self.homes, self.keys, self.names)
        self.layouts = layouts
        self.events: list[StepEvent] = []
        self.nodes: dict[Key, Any] = {}  # of the graph, before anything is written into the value
        self.batch_keys: dict[int, Key] = {id(x): (-1, n) for n, x in enumerate(tensors_in(batch))}
        self.kept: list[Any] = [batch]  # ids stay valid as long as the objects live
        self.tags: dict[int, str] = {}
        self.tail = 0
        self.memory, self.relays = SharedStorage(), stages.cutter.relays
        self.lent = Lent()
        self.direct: list[tuple[str, int]] = []  # parameters used at container level, and by which event
        self.units: list[tuple[str, int]] = []  # called, and which event that is
        self.overwritten: list[tuple[str, int]] = []  # parameters, buffers within units, and which event writes
        self.casts = Counter[str]()  # of parameters, by name: what takes them that autocast may run in low precision
        self.effects: list[Tensor] = []
        self.returned: list[Tensor] = []
        self.reads: list[tuple[int, str]] = []
        self.has_read = False
        self.read_first: str | None = None  # where a step without a backward first read a value
        self.deciding: set[str] = set()
        self.tries_units = True
        self.started = False  # whether hooks of the start ran on the copy
        self.packages: frozenset[str] | None = None  # the user's, where units that keep something are looked for
        self.keeping: dict[str, str] = {}  # the units that change Python state, and what they change
        self.changes_lent: dict[str, str] = {}  # those that change modules which they are given
        self.aftereffects: dict[str, str] = {}  # the units that change any object, their arguments too, and which
        self.module: nn.Module = nn.Module()  # the copy
        self._lasting: set[int] | None = None  # ids of the objects that it holds
        self.sight: Sight | None = None  # in a run in which units have what they will have of it
        self.left: list[Left] = []  # in such a run, what they left
        self.called: list[tuple[int, Any, Any]] = []  # within units: by which event, the function, what it is told
        self.in_hooks: frozenset[str] = frozenset()  # the names of objects that hooks on gradients reach
        self.outer: frozenset[str] = frozenset()  # units whose state the step's own code changes, or may
        self.resets: frozenset[str] = frozenset()  # those that keep something, whose state that changes, too
        self.hooks_on_gradients: dict[nn.Module, int] = {}  # on modules of the copy, as the step begins
        self.resetting: Callable[[str], AbstractContextManager[None]] = lambda path: nullcontext()
        self.made: dict[tuple[int, Any], tuple[Any, Any]] = {}  # what they store, by the id of what holds it, and where
        self.shapes: dict[int, list[tuple[int, ...]]] = {}  # of what came of the batch alone, by event
        self.views: set[int] = set()  # ids of tensors of the module, or of views of them
        self.changes_state = False  # whether the step writes into tensors of the module
        self.regions: dict[int, int] = {}
        self.given: list[tuple[int, Any]] = []  # what events are given beside values of the model
        self.constants: list[tuple[int, Any]] = []  # those behind the first read
        self.closure: Closure | None = None

    def number(self) -> int:
        return len(self.events)

    def seen(self) -> list[Seen]:
        """What the step did, as another run of it has it, too."""
        shapes = self.shapes
        return [Seen(event.func, event.place, tuple(shapes.get(n, ()))) for n, event in enumerate(self.events)]

    def _note_constants(self, index: int, value: Any) -> None:
        if self.has_read or self.packages is not None:
            with unset_fake_temporarily():
                found = index, constants_of(value, is_located)
            self.given.append(found)
            if self.has_read:
                self.constants.append(found)

    def enter_module(self, path: str, numel: int) -> None:
        if numel:
            self._about_to_call()
        super().enter_module(path, numel)

    def _about_to_call(self) -> None:
        """A module with parameters is called, which no other one calls."""
        if self.read_first is not None and not self._is_within():
            raise ReadFirstError(self, self.read_first)

    def _is_within(self) -> bool:
        """Whether code of a module with parameters is running."""
        return any(frame.numel for frame in self.frames[1:])

    @contextmanager
    def region(self, by_itself: Any) -> Iterator[bool]:
        first = len(self.events)
        yield True
        self.regions[first] = len(self.events)

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        self.handed.check_outside((args, kwargs))
        if func in TRANSFORMS:
            inputs = tensors_in((args, kwargs))
            self.closure = Closure({id(x) for x in inputs}, takes=any(map(is_located, inputs)))
            try:
                return self._event(func, name, args, kwargs)
            except ClosesOverModelError:
                self.closure.takes = True  # as an event of the model, then
                return self._event(func, name, args, kwargs)
            finally:
                self.closure = None
        return self._event(func, name, args, kwargs)

    def _event(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        located = [x for x in inputs if is_located(x)]
        if not (located or self.closure is not None and self.closure.takes):
            return self._on_batch(func, name, args, kwargs)
        if name in READS:
            return self._read(func, name, args, kwargs, located)
        if name == "grad" and (getattr(func, "__module__", "") or "").startswith("torch.autograd"):
            if not self.homes and any(frame.numel for frame in self.frames[1:]):
                self.close_modules("it calls torch.autograd.grad", reads=True)
                return self._run(func, args, kwargs)
            raise NotImplementedError(
                f"{user_line()}: torch.autograd.grad within a step needs the graph of all stages of the pipeline at "
                "once. Use TensorParallelStrategy."
            )
        if name == "__set__" and is_located(args[0]):
            return self._set_data(func, args, inputs)
        target = self._write_target(name, args)
        self.draws.begin()
        for x in located:
            self._use_parameter(x)
        sums = self.axis.sums if self.axis is not None else 0
        unsized, sized, flops = self.unsized, self.sized, self.frames[-1].flops
        result, cuts = self._with_or_without_samples(func, args, kwargs, target, located)
        sets = name == "__setitem__" and target is None
        result = args[0] if sets else result
        reduced = self.axis is not None and self.axis.sums > sums
        told = told_to(func, args, kwargs, self.keys)
        event = self._keep(func, "located", inputs, result)
        self._note_constants(len(self.events) - 1, (args, kwargs))
        event.told = told
        if isinstance(result, Tensor) and id(result) in self.names:
            event.itself = next((n for n, x in enumerate(inputs) if x is result), None)
            if event.itself is not None and not writes(name):  # as `flatten` does of a vector
                self.direct = [use for use in self.direct if use[1] != len(self.events) - 1]
        event.cuts, event.unsized, event.sets = cuts, self.unsized > unsized, sets
        if self.sized > sized or name == "_pad_packed_sequence":
            with unset_fake_temporarily():
                event.sizing = sizing(func, args)
        event.flops = self.frames[-1].flops - flops
        if self.axis is not None:
            event.shares = self._tag(func, args, kwargs, result, reduced)
        if target is not None:
            event.writes = True
            return written_into(self, target, result, func)
        return None if sets else result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.closure is not None and in_functorch():
            for x in tensors_in((args, kwargs)):
                self._close_over(x, self.closure)
        return super()._run(func, args, kwargs)

    def charge(self, func: Any, args: Any, kwargs: Any, result: Any, keeps: bool = True) -> None:
        super().charge(func, args, kwargs, result, keeps)
        if is_any_autocast() and (casts := most_casts(func)):
            for x in tree_leaves((args, kwargs)):
                if id(x) in self.names:
                    self.casts[self.names[id(x)]] += casts

    def _close_over(self, x: Tensor, closure: Closure) -> None:
        """A function that is transformed uses ``x``."""
        if not is_located(x) or id(x) in closure.given or id(x) not in self.names and id(x) not in self.keys:
            return
        if not closure.takes:
            raise ClosesOverModelError
        if id(x) not in self.names:
            raise NotImplementedError(
                f"{user_line()}: a function that is given to torch.vmap or torch.func uses a value of the model that "
                "may be on another stage of the pipeline. Hand it over as an argument: "
                "torch.vmap(f, in_dims=(0, None))(x, value)."
            )
        self._use_parameter(x)

    def _set_data(self, func: Any, args: Any, inputs: list[Tensor]) -> None:
        """`parameter.data = value`, which is what it will be where it is."""
        x, value = args
        if id(x) not in self.names or x.shape != value.shape:
            raise NotImplementedError(
                f"{user_line()}: the step sets the `.data` of a value that may be on another stage of the pipeline, or "
                "gives a parameter another shape. Use the new value under a name of its own."
            )
        self._use_parameter(x)
        self.memory.note_write(x)
        self._keep(func, "located", inputs, x).sets = True

    def _with_or_without_samples(
        self, func: Any, args: Any, kwargs: Any, target: Tensor | None, located: list[Tensor]
    ) -> tuple[Any, bool]:
        """The result, and whether tensors of the batch alone were cut for it.

        Beside a value cut into microbatches they come whole: a loss counts its denominator on whole targets.
        """

        sized = self.sized

        def run(args: Any, kwargs: Any) -> Any:
            if target is None:
                result = self._run(func, args, kwargs)
                if writes(getattr(func, "__name__", "")):
                    return result
                packs = getattr(func, "__name__", "").endswith("_packed_sequence") or self.sized > sized
                own = {id(x) for x in tensors_in(result) if packs and sizing(func, args) is not None and _counts(x)}
                return map_tensors(lambda x: x if id(x) in own else self._located(x), result)
            into = args[0].clone()
            if not is_located(into):  # what a fake is written into must be one
                into = self.mode.from_tensor(into)
            self._run(func, (into, *args[1:]), kwargs)
            return into

        if self.axis is None:
            return run(args, kwargs), False
        if any(isinstance(x, ShardedTensor) for x in located):
            sums = self.axis.sums
            try:
                return run(args, kwargs), False
            except SamplesMixError:
                if self.axis.sums > sums:  # with whole tensors it came to a sum already
                    raise
                self.draws.drawn = []
        return run(self._with_samples(args), self._with_samples(kwargs)), True

    def _located(self, x: Tensor) -> Tensor:
        """A function may hand a tensor of the batch alone back as it is: where the others are, there it is now, too."""
        return x if is_located(x) else linked(self.mode.from_tensor(x.detach()), [x])

    def _write_target(self, name: str, args: Any) -> Tensor | None:
        """The tensor of the batch alone that a located value is written into, where the function does so."""
        target = args[0] if args else None
        if not writes_into(name) or not isinstance(target, Tensor) or is_located(target):
            return None
        storage = target.untyped_storage().data_ptr()
        shared = any(
            x is not target and not is_located(x) and x.untyped_storage().data_ptr() == storage
            for kept in self.kept
            for x in tensors_in(kept)
        )
        if shared:
            raise NotImplementedError(
                f"{user_line()}: `{name}` writes a value that depends on the model into a tensor that did not, and of "
                "which there are other views. A pipeline can't follow that: build the tensor from its parts, e.g. with "
                "torch.stack or torch.cat."
            )
        return target

    def _on_batch(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        self.lent.about_to_run(name, args, kwargs)
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
        self.memory.forget()
        index = len(self.events)
        tensors = tensors_in(result)
        if is_setting((args, kwargs), result):
            return result
        if touches_state(func, args, kwargs, result, self.is_state):
            self.views.update(id(x) for x in tensors)
            self.changes_state |= writes_into(name)
        self.events.append(StepEvent(func, "batch", (), None, user_line()))
        self._note_constants(index, (args, kwargs, result))
        self.shapes[index] = [tuple(x.shape) for x in tensors]
        self.batch_keys.update((id(x), (index, n)) for n, x in enumerate(tensors))
        self.kept.append(result)
        return result

    def is_state(self, x: Tensor) -> bool:
        """Whether the module held it before the step, or it is a view of such a tensor; of what no model is in."""
        return id(x) not in self.batch_keys or id(x) in self.views

    def uses(self) -> Iterable[Use]:
        """Every located value with each event that takes it; metrics, logs and what is returned take it at the end."""
        for index, event in enumerate(self.events):
            yield from ((key, inf if is_metric_call(event) else index) for key in event.inputs)
        yield from ((self.keys[id(x)], inf) for x in self.effects if id(x) in self.keys)

    def finish(self) -> None:
        """After the step: what it wrote into tensors of the module counts as used at its end."""
        written = [value for target, value in self.written.values() if self.is_state(target)]
        self.effects += written
        self.changes_state |= bool(written)

    def _read(self, func: Any, name: str, args: Any, kwargs: Any, located: list[Tensor]) -> Any:
        place = self.read_at = user_line()
        self.close_modules(f"it reads a value at {place}", reads=True)
        if any(tag_of(self.tags, x) for x in located) or any(isinstance(x, ShardedTensor) for x in located):
            self.reads.append((len(self.events), place))
        elif not all(id(x) in self.names for x in located):
            self.reads.append((len(self.events), place))
        self.has_read = True
        if not self.training and not self._is_within():
            self.read_first = self.read_first or place
        result = read_placeholder(name, located[0], args)
        self.events.append(StepEvent(func, "read", self._keys_of(located), result, place))
        self.kept.append((args, kwargs))
        return result

    def _keep(self, func: Any, kind: Any, inputs: Iterable[Tensor], result: Any) -> StepEvent:
        index = len(self.events)
        self.lent.about_to_take(x for x in inputs if id(x) in self.batch_keys)
        event = StepEvent(func, kind, self._keys_of(inputs), twin(result), user_line())  # user code may write into it
        self.draws.end(event)
        event.given = tuple(tuple(x.shape) for x in inputs if id(x) in self.batch_keys)
        self.events.append(event)
        written = self.memory.settle(index)
        self._note_overwritten(index, written)
        self.lent.give((x for x in inputs if not is_located(x) and not self.is_state(x)), written)
        for n, x in enumerate(returned_tensors(result)):
            if not is_located(x):
                self.batch_keys[id(x)] = (index, n)
            elif id(x) not in self.names:
                self.keys[id(x)] = (index, n)
                self.nodes[index, n] = x.grad_fn
                self.memory.made((index, n), x)
        self.kept.append((inputs, result))
        return event

    def _note_overwritten(self, index: int, written: set[Any]) -> None:
        for name in (self.memory.names[memory] for memory in written & self.memory.names.keys()):
            if self.axis is not None:
                raise SamplesMixError(f"{self.memory.places[name]}: {name!r} is written into at each run")
            self.overwritten.append((name, index))

    def _keys_of(self, tensors: Iterable[Tensor]) -> tuple[Key, ...]:
        found = []
        for x in tensors:
            if id(x) in self.keys:
                found.append(self.keys[id(x)])
            elif self.homes and is_located(x) and id(x) not in self.names:
                raise UnitError(f"{user_line()}: {self._why_unknown(x)} Or use TensorParallelStrategy.", maker_of(x))
        return tuple(found)

    def _why_unknown(self, x: Tensor) -> str:
        if self.started and maker_of(x) is None:
            return (
                "the step uses a tensor that a hook, such as on_fit_start, made of the model's weights. Other stages "
                "of the pipeline don't have it. Make it in `setup`, when each rank has all weights."
            )
        return (
            "the step uses a value from within a module that the module did not return: a forward hook or an attribute "
            "handed it out. Other stages of the pipeline can't see that. Return it from the module's forward."
        )

    def _use_parameter(self, x: Tensor) -> None:
        if id(x) in self.names:
            self.direct.append((self.names[id(x)], len(self.events)))

    def _with_samples(self, value: Any) -> Any:
        """Tensors of the batch alone, cut where they are known to hold samples."""
        axis = self.axis
        assert axis is not None

        def cut(x: Tensor) -> Tensor:
            layout = self.layouts.get(self.batch_keys.get(id(x), (-2, 0)))
            if layout is None:
                return x
            with unset_fake_temporarily():
                return cut_to(x, layout, axis)

        return map_tensors(cut, value)

    def _tag(self, func: Any, args: Any, kwargs: Any, result: Any, reduced: bool) -> tuple[int, ...]:
        shares = Share.after(func, args, kwargs, self.tags, reduced)
        for x in tensors_in(result):
            if not isinstance(x, ShardedTensor) and shares.tag is not None:
                self.tags[id(x)] = shares.tag
            elif isinstance(x, ShardedTensor) and shares.tag is not None and not reduced:
                self.tags[id(x)] = Share.MIXED
        return shares.scaled

    # ------------------------------------------------------------------------------------------------ modules, effects

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._about_to_call()
        self.draws.begin(path)
        self.cutter.meet(path, len(self.events))
        self.handed.check_outside((args, kwargs))
        inputs = tensors_in((args, kwargs))
        sums, cuts = (0, 0) if self.axis is None else (self.axis.sums, self.axis.cuts)
        by_numbers = set[str]()
        if self.axis is not None:
            args, kwargs = watched(args, kwargs, by_numbers)
            if any(tag_of(self.tags, x) for x in inputs):
                raise SamplesMixError(f"{path!r} takes a sum over the samples of a batch")
            args, kwargs = self._with_samples(args), self._with_samples(kwargs)
        flops, stood, reads = self.frames[-1].flops, standing(), self.values_read
        plainly = True
        try:
            self.refuse_backward_hooks(module.modules())
            lent = [x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Module)]
            taken = tensors_in((args, kwargs))
            with (
                self.resetting(path),
                self._keeps(path, module, lent, (args, kwargs)),
                self.handed.unit(path, module, taken),
            ):
                if self.axis is None or not self.tries_units:
                    result = original(*args, **kwargs)
                else:
                    result, plainly = acts_plainly(self, path, module, original, args, kwargs)
            if self.axis is not None and self.handed.found.keys() & self.keys.keys():
                raise SamplesMixError(f"{path!r} takes a value that is none of its arguments")
        except SamplesMixError as error:
            error.unit = path
            raise
        finally:
            self.draws.leave()
            if not is_standing(stood):
                raise GlobalDrawError(path)
        if self.axis is not None:
            if self.axis.sums > sums:
                raise SamplesMixError(f"{path!r} sums over the samples of a batch")
            if self.axis.cuts > cuts and any(self._may_hold_samples(x) for x in tensors_in((args, kwargs))):
                raise SamplesMixError(f"{path!r} takes samples in a tensor that could not be followed to the batch")
        result = map_returned(self._from_unit, result)
        given = len(self._keys_of(inputs))
        inputs += self.handed.found.values()
        for x in inputs:
            self._use_parameter(x)
        self.units.append((path, len(self.events)))
        self._note_constants(len(self.events), (args, kwargs))
        event = self._keep(path, "located", inputs, result)
        event.by_numbers, event.by_content = bool(by_numbers), self.values_read > reads
        if self.values_read > reads:
            self.deciding.add(TENSORS)
        event.handed = len(event.inputs) - given
        event.flops, event.viewed = self.frames[-1].flops - flops, not plainly
        self.tail = len(self.events)
        return result

    def refuse_backward_hooks(self, modules: Iterable[nn.Module]) -> None:
        """Raises NotImplementedError where the step has registered hooks on the gradients of ``modules``."""
        for m in modules:
            if number_of_backward_hooks(m) > self.hooks_on_gradients.get(m, 0):
                raise NotImplementedError(
                    f"The step registers a hook on the gradients of a {type(m).__name__}. The ranks of a pipeline "
                    "have to know of it before: register it in on_fit_start or __init__, or use TensorParallelStrategy."
                )

    @contextmanager
    def _keeps(self, path: str, module: nn.Module, lent: list[nn.Module], given: Any) -> Iterator[None]:
        """A unit runs inside: note it if that changes Python state, its own or that of modules ``lent`` to it."""
        looks = self.sight is not None or path not in self.keeping
        bare = state_of(module, path, self.users, lent) if self.packages is not None and looks else None
        if bare is None:
            yield
            return
        reached = set(bare.cells)
        bare.add(f"what {path!r} is given", given)
        before, index = bare, len(self.events)
        if self.sight is not None:
            bare.copy_tensors()
            show((x for x in self.left if self.sight.sees(index, x)), {id(cell.owner) for cell in bare.cells.values()})
            before = state_of(module, path, self.users, lent) or bare
            before.add(f"what {path!r} is given", given)
            before.copy_tensors()
        yield
        left = []
        with plainly():
            changes = [(name, x, None if x.fixed else x.change_unlent()) for name, x in before.cells.items()]
        for name, cell, change in changes:
            if change is not None:
                lasts = name in reached or self._lasts(cell.owner)
                left.append(Left(index, path, cell, as_it_is(change), lasts))
                self._note_aftereffect(left[-1], name not in reached)
        if self.sight is not None:
            with plainly():
                before.restore()
                bare.restore()
            if path in self.sight.units:
                self.left += left
            else:
                show(left, {id(one.cell.owner) for one in left})

    def _note_aftereffect(self, left: Left, given: bool) -> None:
        path, cell = left.path, left.cell
        self.aftereffects.setdefault(path, cell.name)
        if not left.lasts:
            return
        self.keeping.setdefault(path, cell.name)
        if given or cell.name.startswith(LENT):
            self.changes_lent.setdefault(path, cell.name)
        self.made.update(((id(cell.owner), key), (cell.owner, x)) for key, x in stored_by(left.change).items())

    def _lasts(self, owner: Any) -> bool:
        """Whether the module holds an object that a unit was given."""
        if self._lasting is None:
            modules = [(path or "self", m) for path, m in self.module.named_modules()]
            self._lasting = {id(x) for x in Snapshot(modules, self.users).objects.values()}
        return id(owner) in self._lasting

    def _from_unit(self, x: Tensor) -> Tensor:
        return x if id(x) in self.names else self.handed.returned(self._located(x))

    def inside(self, func: Any, given: Any, result: Any) -> None:
        self.handed.note(given, result)
        self.draws.ran(func, given, result, lambda x: is_located(x) or id(x) in self.batch_keys)
        if self.packages is not None:
            with unset_fake_temporarily():
                self.called.append((len(self.events), func, words_of(given, is_located)))

    def _may_hold_samples(self, x: Tensor) -> bool:
        """Whether a tensor that is not known to hold samples has a dim of their count, and may be made of the batch."""
        if isinstance(x, ShardedTensor) or not any(size and size % self.samples == 0 for size in x.shape):
            return False
        return id(x) not in self.names and (id(x) not in self.keys or not self._is_of_weights(self.keys[id(x)]))

    def _is_of_weights(self, key: Key) -> bool:
        """Whether a value is made of the module's tensors alone."""
        todo, seen = [key], {key}
        while todo:
            event = self.events[todo.pop()[0]]
            if event.kind == "batch" or event.given:
                return False
            todo += seen.symmetric_difference(seen | {*event.inputs})
            seen.update(event.inputs)
        return True

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        located = [x for x in tensors_in((args, kwargs)) if is_located(x)]
        # Of a part of the batch its value is of no use; whether it is the loss, its tag tells.
        sources = [x.local if isinstance(x, ShardedTensor) else x for x in located]
        value = value_like(metric, method, args, kwargs)
        result = map_tensors(lambda x: linked(self.mode.from_tensor(x.detach()), sources * x.requires_grad), value)
        self._keep(("metric", method), "located", tensors_in((args, kwargs)), result)
        self.effects += [x for x in tensors_in((args, kwargs)) if is_located(x)]
        self.tags.update((id(x), Share.MIXED) for x in tensors_in(result))
        return result


def _counts(x: Tensor) -> bool:
    """Whether ``x``, of a function whose result's sizes the batch tells, holds such sizes."""
    return not is_located(x) and not x.is_floating_point()
