"""A run of a step on fake tensors, which notes what the modules in it cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.event_draws import DRAWING
from lightning_par.pipeline.program.event_functions import is_metadata, is_of_data, sets_data, sets_requires_grad
from lightning_par.pipeline.program.microbatch_values import of_microbatch
from lightning_par.pipeline.run.located import Run
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.batch_classes import BatchClasses
from lightning_par.pipeline.trial.call_costs import CallTree
from lightning_par.pipeline.trial.drawn_numbers import DrawnNumbers
from lightning_par.pipeline.trial.result_sizes import sizing, stores_others
from lightning_par.pipeline.trial.samples.function_calls import Trace, tracing
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.fake_tensors import FakeTensor, FakeTensorMode
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.drawing_caches import drew_for_cache
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.tensor_classes import plain
from lightning_par.python_state.tensor_writes import note_write
from lightning_par.sharded.functions import ARRAYS, HOOKS, READS, RECURRENT, name_of
from lightning_par.sharded.patches.subclasses import OtherClassError
from lightning_par.sharded.rules.lookup import user_line, writes
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.who_reads import makes_fakes
from lightning_par.sharded.wrapped_tensors import run_by_wrapper
from lightning_par.trial.fake_functions import UNRUN, all_fake, is_fake, is_sized, run_on_ones
from lightning_par.trial.guesses import Guesses
from lightning_par.trial.large_values import LargeAsFakes, is_large, note_made


class FakeRun(CallTree, Run):
    """Runs torch functions on fakes, within units too.

    Args:
        mode: of the fakes.
        axis: a microbatch axis, or None where the batch is not cut.

    Attributes:
        guesses: what code is told that asks for values of the model.
        untried: of a plan, what was left out that a run would find out: large values of the batch are fake, and large
            units are not tried with values. None: it is a run's, in which neither is so.
    """

    untried: list[str] | None = None
    is_trial = True

    def __init__(self, mode: FakeTensorMode, axis: MicrobatchAxis | None) -> None:
        super().__init__()
        self.mode, self.axis = mode, axis
        self.training, self.samples = False, 1
        self.trace: Trace | None = None
        self.guesses = Guesses()
        self.read_at: str | None = None  # where a value was last asked for
        self.values_read = 0  # values that were asked for within units
        self.hooked = False  # whether a hook was put on a gradient
        self.reads_gradients = False  # whether something looked at the ``.grad`` of a tensor
        self.users: frozenset[str] = frozenset()  # the packages that count as the user's
        self.met_by_hooks: set[int] = set()  # ids of the objects that these reach
        self.unsized = 0  # functions so far whose result's shape depends on values
        self.sized = 0  # of which the batch alone tells it
        self.draws = DrawnNumbers()
        self.classes: BatchClasses | None = None  # of the batch's tensors, where some are none of torch's

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" and name_of(func) == "grad":  # it may be replaced
            self.reads_gradients |= not makes_fakes(sys._getframe(1))
        with self.saying():
            return self._asked(func, types, args, kwargs)

    def saying(self) -> AbstractContextManager[None]:
        """Around what may tell the user's code that its step can't be run so."""
        return nullcontext()

    def _asked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (getattr(func, "__module__", None) or "").startswith("torch.distributed.distributed_c10d"):
            raise NotImplementedError(
                f"{user_line()}: torch.distributed.{func.__name__} is called within a step, of which each rank of the "
                "pipeline runs another part: they would wait for one another. Name no group, to go over the copies of "
                "the model, as `self.all_gather` does, or use TensorParallelStrategy."
            )
        if self.training and getattr(func, "__name__", "") == "retain_grad" and not args[0].is_leaf:
            raise NoScheduleError(
                f"{user_line()}: a training step keeps the gradient of what it computes (retain_grad), which one rank "
                "of the pipeline has, and the others would have None. Take it by `x.register_hook`, which all ranks "
                "run, or use TensorParallelStrategy."
            )
        if getattr(func, "__name__", "") in DRAWING:
            result, cached = drew_for_cache(lambda: self._heard(func, types, args, kwargs))
            if cached is not None:
                raise _fills_cache(cached)
            return result
        return self._heard(func, types, args, kwargs)

    def _heard(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        if (result := run_by_wrapper(self, func, types, args, kwargs)) is not NotImplemented:
            return result
        if self.depth:
            if self.training and self.path is not None and sets_requires_grad(func, args, kwargs):
                raise UnitError(
                    f"{user_line()}: {self.path!r} changes whether a parameter requires a gradient, on the stage of "
                    "the pipeline that runs it: other ranks would not know of it. Do it between steps, as in "
                    "on_train_batch_start, or use TensorParallelStrategy.",
                    self.path,
                )
            self.draws.about_to_run(func, args)
            result = self.run_function(func, args, kwargs)
            if not is_metadata(func, getattr(func, "__name__", "")):
                self.inside(func, (args, kwargs), result)
                if self.trace is not None:
                    self.trace.note(func, args, kwargs, result, self.draws.places)
            return result
        if self.training and sets_requires_grad(func, args, kwargs):
            raise NoScheduleError(
                f"{user_line()}: a training step changes whether a parameter requires a gradient. Each rank of the "
                "pipeline runs the step up to the end of its stages, and would not come to the line that changes it "
                "back. Do it between steps, as in on_train_batch_start, or use x.detach() or TensorParallelStrategy."
            )
        return super().__torch_function__(func, types, args, kwargs)

    def inside(self, func: Any, given: Any, result: Any) -> None:
        """A function was called within a unit."""

    def run_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On fakes; where the shape of the result depends on data, on ones."""
        leaves = tree_leaves((args, kwargs))
        self.guesses.ran(leaves)
        self._note_state(func, args, kwargs)
        reads = getattr(func, "__name__", "") in READS
        self.values_read += reads
        if reads and (fakes := _plain_fakes(args, kwargs)):
            if all(map(is_large, fakes)):
                return self.read_large(func, fakes[0], args)
            self.read_at = user_line()
            self.close_modules(f"it reads a value at {self.read_at}", reads=True)
            return self.guesses.read(func.__name__, fakes[0], args)
        if self.training and getattr(func, "__name__", "") in HOOKS:
            self.hooked = True
            if isinstance(args[0], nn.Parameter):
                raise NoScheduleError(
                    f"{user_line()}: a hook on a parameter is registered within a step, which each rank of the "
                    "pipeline runs for each of its stages. Register it before, as in on_fit_start or __init__."
                )
            if self.axis is not None:
                self._try_hook(self.axis, args[0], kwargs["hook"] if "hook" in kwargs else args[1])
        try:
            with self.draws.noting(func):
                with self.without_large(leaves):
                    result = all_fake(self.mode, args, kwargs, self._by_class(_called, func, args, kwargs))
        except UNRUN:
            self.note_large(leaves)
            if sizing(func, args) is not None:
                self.sized += 1
            elif not is_sized(func, args):
                self.unsized += 1
                self.read_at = user_line()
                self.close_modules("the shape of a value in it depends on values")
            result = self._run_on_ones(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:  # some kernels' fake versions want what real ones don't
            inputs = tree_leaves((args, kwargs))
            if isinstance(error, (SamplesMixError, OtherClassError)) or not any(
                isinstance(x, FakeTensor) for x in inputs
            ):
                raise
            try:
                result = self._run_on_ones(func, args, kwargs)
            except Exception:
                raise error from None
            self.read_at = user_line()
        if stores_others(leaves, tree_leaves(result)):
            self.unsized += 1
            self.read_at = user_line()
            self.close_modules("how many values a sparse tensor in it stores depends on values")
        if self.untried is not None:
            note_made((result, args[:1] if writes(getattr(func, "__name__", "")) else ()), (args, kwargs))
        self.charge(func, args, kwargs, result, keeps=self.axis is None)
        return result

    def _by_class(self, call: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """What ``call`` makes of a function: the classes of a whole batch's tensors are asked, parts are plain."""
        if self.classes is None:
            return call(func, args, kwargs)
        if self.axis is not None:
            return call(func, *map_tensors(plain, (args, kwargs)))
        return self.classes.run(call, func, args, kwargs)

    def without_large(self, given: Iterable[Any] = ()) -> AbstractContextManager[Any]:
        """Around a function that is ``given`` so much: if that has values, what is large of its result is fake."""
        has_fakes = any(isinstance(x, (FakeTensor, ShardedTensor)) for x in given)
        return LargeAsFakes(self.mode) if self.untried is not None and not has_fakes else nullcontext()

    def read_large(self, func: Any, x: Tensor, args: Any) -> Any:
        """What ``func`` reads of a large value."""
        self.note_large([x])
        return self.guesses.read(func.__name__, x, args)

    def note_large(self, given: Iterable[Any]) -> None:
        """What follows goes by the values of what is large among ``given``, which a run would know."""
        if self.untried is not None and any(map(is_large, given)):
            self.untried.append(f"what the step goes by at {user_line()}")

    def _try_hook(self, axis: MicrobatchAxis, x: Tensor, hook: Any) -> None:
        """A hook meets the gradients of a microbatch's samples: all that it may do is to change each by itself.

        Raises:
            SamplesMixError: it does something else, such as to note what it sees, which counts microbatches.
        """
        what = f"a hook on a gradient, registered at {user_line()},"
        if not isinstance(x, ShardedTensor):
            raise SamplesMixError(f"{what} meets a microbatch's share of it")
        state = Snapshot([], self.users)
        state.add("hook", hook)
        self.met_by_hooks.update(id(cell.owner) for cell in state.cells.values())
        sums, own = axis.sums, x.positions.count(axis.rank)
        local = of_microbatch(x).detach().clone()
        view = x.with_local(local)
        with self.within(), torch.no_grad():
            with tracing(self, [view]) as viewed:
                result = hook(view)
            with tracing(self, [local]) as plain:
                hook(local)
        changed = next(iter(state.left()), None)
        state.restore()
        if changed is not None:
            raise SamplesMixError(f"{what} changes {changed}, which it would do for each microbatch")
        if result is None or axis.sums > sums or not viewed.agrees(plain, x.positions.size, own):
            raise SamplesMixError(f"{what} needs the gradient of the whole batch")

    def _run_on_ones(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result's gradient leads where that of ones leads, and it lies where the values would."""
        leaves = tree_leaves((args, kwargs))
        if self.axis is not None and any(isinstance(x, ShardedTensor) for x in leaves):
            name = getattr(func, "__name__", func)
            raise SamplesMixError(f"how many values `{name}` returns at {user_line()} depends on values of the samples")
        return self._by_class(partial(run_on_ones, self.mode), func, args, kwargs)

    def _note_state(self, func: Any, args: Any, kwargs: Any) -> None:
        """A buffer that is updated at each call must not be updated once a microbatch; what hands out its memory, as by
        `.data`, is taken for written, which no version tells."""
        name, into = getattr(func, "__name__", ""), kwargs.get("out")
        if args and type(args[0]) is Tensor and (name in ARRAYS or is_of_data(func, name)):
            note_write(args[0])
        if self.axis is None:
            return
        if into is None and args and (name in ARRAYS or writes(name) or sets_data(func)):
            into = args[0]
        if id(into) in self.buffers:
            raise SamplesMixError(f"the buffer {self.buffers[id(into)]!r} is updated at each call")


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on fakes. Recurrent ones run as on the CPU, since cuDNN lays out weights in memory, of which fakes have
    none; and in no inference mode, in which torch 2.11 gives states another shape."""
    if sets_data(func) and is_fake(args[1]) and not is_fake(args[0]):
        return _keep_values(*args)
    if getattr(func, "__name__", "") not in RECURRENT:
        return func(*args, **kwargs)
    device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else nullcontext(), torch.no_grad() if inference else nullcontext():
        given, named = map_tensors(lambda x: x.cpu(), (args, kwargs))
        return map_tensors(lambda x: x.to(device), func(*given, **named))


def _keep_values(x: Tensor, value: Tensor) -> None:
    """``x.data = value`` of a tensor with values and a fake, without which it would be of no device that computes: it
    has values as before, as where a fake is copied into it."""
    if (x.shape, x.dtype) != (value.shape, value.dtype):
        x.data = torch.zeros(value.shape, dtype=value.dtype, device=x.device)


def _plain_fakes(args: Any, kwargs: Any) -> list[Tensor]:
    """The fakes in a function's arguments; none where a view of a microbatch is among them, whose rules know better."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return [] if any(isinstance(x, ShardedTensor) for x in tensors) else [x for x in tensors if is_fake(x)]


def _fills_cache(name: str) -> Exception:
    return NotImplementedError(
        f"{user_line()}: {name!r}, whose results functools.lru_cache keeps, draws random numbers when a step first "
        "calls it. A pipeline runs a step several times, of which all but the first would not draw. Call it once "
        "before the run, as in __init__ or setup, keep what it draws in a buffer, or use TensorParallelStrategy."
    )
