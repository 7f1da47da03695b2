"""Find out what a step does: run it once on fake parameters and the real batch, and keep the program.

The batch's samples are followed by the rules for sharded tensors, along an axis of microbatches: a function that needs
several samples together shows itself, and what becomes a sum over samples is known to be a sum of shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.constants import words_of
from lightning_par.pipeline.program.event_functions import most_casts, sets_data
from lightning_par.pipeline.program.microbatch_values import cut_to
from lightning_par.pipeline.program.program import is_located
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.analysis_notes import AnalysisNotes
from lightning_par.pipeline.trial.batch_event import record_on_batch
from lightning_par.pipeline.trial.function_event import record_data, record_function
from lightning_par.pipeline.trial.metric_event import record_metric
from lightning_par.pipeline.trial.read_event import record_read
from lightning_par.pipeline.trial.samples.scripted import scripts_unseen
from lightning_par.pipeline.trial.transformed import ClosesOverModelError, Transformed
from lightning_par.pipeline.trial.unit_event import record_unit
from lightning_par.private.fake_tensors import unset_fake_temporarily
from lightning_par.private.modes import is_any_autocast
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.transforms import in_functorch
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.functions import READS
from lightning_par.sharded.patches.transforms import TRANSFORMS
from lightning_par.sharded.rules.lookup import user_line, writes


class ReadFirstError(BaseException):
    """A step without a backward calls modules after it has read a value of the model, by which it may go on.

    No ``except Exception`` of the user's goes on after it.

    Attributes:
        run: the step as far as it came.
        place: where it read the value.
        always: whether it does so in each batch.
    """

    def __init__(self, run: Analysis, place: str, always: bool = False) -> None:
        super().__init__(place)
        self.run, self.place, self.always = run, place, always


class Analysis(AnalysisNotes):
    """Runs the step on a copy of the module whose parameters are fake, and says what becomes of each of its calls.

    Args:
        mode: of the fakes.
        stages: how the step is to be cut; without units to look for some.
        axis: a microbatch axis, or None where the batch is not cut.
        batch: its tensors are the first that depend on the batch alone.
        layouts: where tensors that depend on the batch alone hold samples.
    """

    def enter_module(self, path: str, numel: int) -> None:
        if numel:
            self.about_to_call()
        super().enter_module(path, numel)

    def about_to_call(self) -> None:
        """A module with parameters is called, which no other one calls.

        Raises:
            ReadFirstError: a step without a backward has read a value before.
        """
        if self.read_first is not None and not self.is_within():
            raise ReadFirstError(self, self.read_first)

    def is_within(self) -> bool:
        """Whether code of a module with parameters is running."""
        return any(frame.numel for frame in self.frames[1:])

    @contextmanager
    def region(self, by_itself: Any) -> Iterator[bool]:
        first = len(self.events)
        yield True
        self.regions[first] = len(self.events)

    def is_of_step(self, x: Tensor) -> bool:
        return not self.values.is_state(x)

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.unit_buffers.check_outside((args, kwargs))
        args, kwargs = self.unit_buffers.stood_in(args, kwargs)
        self.values.picked.about_to_run(name, args)
        result = self._transformed_event(func, name, args, kwargs)
        return self.unit_buffers.handed_back(result) if writes(name) else result

    def _transformed_event(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func not in TRANSFORMS:
            return self._event(func, name, args, kwargs)
        self.transformed = Transformed((args, kwargs))
        try:
            return self._event(func, name, args, kwargs)
        except ClosesOverModelError:
            self.transformed.takes = True  # as an event of the model, then
            return self._event(func, name, args, kwargs)
        finally:
            self.transformed = None

    def _event(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        self.values.check_current(inputs)
        self.values.check_whole(inputs)
        located = [x for x in inputs if is_located(x)]
        if not (located or self.transformed is not None and self.transformed.takes):
            return record_on_batch(self, func, name, args, kwargs)
        if name in READS:
            self.unit_buffers.refuse_read([self.values.keys.get(id(x)) for x in located], self.direct, self.events)
            return record_read(self, func, name, args, kwargs, located)
        asks = name == "grad" and (getattr(func, "__module__", "") or "").startswith("torch.autograd")
        if not self.training and not self.is_within() and (asks or name == "backward"):
            raise ReadFirstError(self, user_line(), always=True)  # by what the model gives, it has gradients
        if asks:
            if not self.homes and any(frame.numel for frame in self.frames[1:]):
                self.close_modules("it calls torch.autograd.grad", reads=True)
                return self.run_function(func, args, kwargs)
            raise NoScheduleError(
                f"{user_line()}: torch.autograd.grad within a step needs the graph of all stages of the pipeline at "
                "once. Use TensorParallelStrategy."
            )
        if name == "__deepcopy__" and self.homes and isinstance(args[0], nn.Parameter):
            # a parameter that is none of a trial's fakes is copied by no torch function, which stages could follow
            raise NoScheduleError(
                f"{user_line()}: the step makes a deep copy of {self.values.names[id(args[0])]!r}, which one stage of "
                "the pipeline has. Copy it between steps, as in on_train_batch_start, where all ranks see all weights; "
                "write `p.detach().clone()` for its values alone; or use TensorParallelStrategy."
            )
        if name == "__set__" and is_located(args[0]):
            return record_data(self, func, args, inputs)
        return record_function(self, func, name, args, kwargs, located)

    def run_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.transformed is not None and in_functorch():
            for x in tensors_in((args, kwargs)):
                if self.transformed.closes_over(x, self.values):
                    self.use_parameter(x)
        sums = 0 if self.axis is None else self.axis.sums
        renamed = self.values.memory.replaced(args[0]) if sets_data(func) else nullcontext()
        try:
            with renamed, scripts_unseen(f"{getattr(func, 'name', '')!r} is code"):
                result = super().run_function(func, args, kwargs)
        except SamplesMixError as error:
            if self.path is not None and self.unfit is not error:
                error.args = (f"{error}, at {user_line()} in {self.path!r}",)
                self.unfit = error
            raise
        if self.axis is not None:
            self.outputs.ran(func, args, kwargs, result, self.axis.sums > sums)
        return result

    def charge(self, func: Any, args: Any, kwargs: Any, result: Any, keeps: bool = True) -> None:
        super().charge(func, args, kwargs, result, keeps)
        if is_any_autocast() and (casts := most_casts(func)):
            for x in tree_leaves((args, kwargs)):
                if id(x) in self.values.names:
                    self.casts[self.values.names[id(x)]] += casts

    def with_samples(self, value: Any) -> Any:
        """Tensors of the batch alone, cut where they are known to hold samples."""
        axis = self.axis
        assert axis is not None

        def cut(x: Tensor) -> Tensor:
            layout = self.layouts.get(self.values.batch_keys.get(id(x), (-2, 0)))
            if layout is None:
                return x
            with unset_fake_temporarily():
                return cut_to(x, layout, axis)

        return map_tensors(cut, value)

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.check_fit()
        with self.saying():
            return record_unit(self, path, module, original, args, kwargs)

    def inside(self, func: Any, given: Any, result: Any) -> None:
        self.handed.note(given, result)
        self.draws.ran(func, given, result, lambda x: is_located(x) or self.values.is_of_batch(x))
        if self.changes.looked:
            with unset_fake_temporarily():
                self.called.append((len(self.events), func, words_of(given, is_located)))

    def metric_within(self, metric: nn.Module) -> None:
        path = self.path
        assert path is not None
        if self.axis is not None:
            self.outputs.mixes(f"calls a {type(metric).__name__} at {user_line()}")
        elif self.changes.looked:  # whose state the others are told, as what else it keeps
            self.changes.keeping.setdefault(path, f"a {type(metric).__name__}")

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.saying():
            return record_metric(self, metric, method, args, kwargs)
