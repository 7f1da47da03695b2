"""Located execution: the user's own step, of which only a part is computed here.

Every torch function at container level, and every call of a unit, is an event. Events that see nothing but the batch
are computed whole, once a step; events that see parameters are *located*: they run on the stage whose stretch of the
step they lie in. Stages follow one another in the order of execution, so what a stage needs comes from those before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_par.pipeline.plan.stage_ranges import Attribute
from lightning_par.pipeline.program.event_functions import WITHOUT_ANOTHER, is_metadata
from lightning_par.pipeline.program.norm_statistics import BESIDE, statistics_of
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.handed_out import HandingOut
from lightning_par.pipeline.trial.placeholders import AbsentNumber
from lightning_par.private.compiler import uncompiled
from lightning_par.private.modes import innermost_mode
from lightning_par.private.tensors import get_data, set_data
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.functions import name_of
from lightning_par.sharded.wrapped_tensors import run_by_wrapper
from lightning_par.trial.guesses import Guesses

_OF_DATA = {"__get__": get_data, "__set__": set_data}
"""As which all runs meet ``x.data``, whatever has replaced it in one of them."""


class Run(TorchFunctionMode):
    """One run of the step. Subclasses say what an event does.

    What the user compiled runs as it is written but in units: a graph would hide the events that it is made of.
    """

    current: Run | None = None
    is_trial = False

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.count = 0  # events so far
        self.path: str | None = None  # the unit that is running
        self.recomputes = False  # whether something in it runs again in backward
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of the batch alone that a located value was written into, by id: they stand for the new value."""
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}  # by id: what is another object for all of a tensor

    def __enter__(self) -> Any:
        self._before, Run.current = Run.current, self
        self._as_written = uncompiled()
        self._as_written.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        Run.current = self._before
        self._as_written.__exit__(None, None, None)
        super().__exit__(*exception)

    def module_end(self, module: nn.Module, begins: bool) -> None:
        """A function has marked where a ``module`` with full backward hooks ``begins``, or ends."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = NotImplemented if self.depth else run_by_wrapper(self, func, types, args, kwargs)
        if result is not NotImplemented:
            return result
        name = getattr(func, "__name__", "")
        # within an event or a unit: its inner functions are not events
        if self.depth or is_metadata(func, name):
            if name == "__set__" and not self.depth:
                self.sets(func, args, kwargs)
            return func(*args, **kwargs)
        if name in _OF_DATA and name_of(func) in ("data", "__set__"):
            func = _OF_DATA[name]
        # so that no value crosses stages for its dtype or shape alone
        elif name in WITHOUT_ANOTHER and len(args) == 2 and isinstance(args[1], Tensor):
            func, args, more = WITHOUT_ANOTHER[name](*args)
            kwargs = {**more, **kwargs}
        statistics = [] if func not in BESIDE else statistics_of(func, args, kwargs)
        self.depth += 1
        try:
            if statistics and all(map(self.is_of_step, statistics)):
                return self._norm(func, statistics, args, kwargs)
            return self.event(func, self.followed(args), self.followed(kwargs))
        finally:
            self.depth -= 1

    def _norm(self, func: Any, statistics: list[Tensor], args: Any, kwargs: Any) -> Any:
        """A norm that writes into ``statistics``: one event beside which each is written by another."""
        result, *new = self.event(BESIDE[func], self.followed(args), self.followed(kwargs))
        for x, value in zip(statistics, new, strict=True):
            self.event(Tensor.copy_, self.followed((x, value)), {})
        return result

    def is_of_step(self, x: Tensor) -> bool:
        """Whether the step has made ``x``, of the batch alone."""
        return False

    def call(
        self,
        path: str,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        attributes: tuple[Attribute, ...] = (),
    ) -> Any:
        """A unit is called at container level, which hands something out by its ``attributes``."""
        if attributes:
            handing = HandingOut(module, original, attributes)
            return handing.taken(self.call(path, module, handing, args, kwargs))
        self.depth += 1
        self.path = path
        try:
            return self.unit(path, module, original, self.followed(args), self.followed(kwargs))
        finally:
            self.depth -= 1
            self.path = None

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

    def note_alias(self, func: Any, args: Any, result: Any) -> None:
        """What a function of the batch alone returns may be another object for all of what it is given."""
        name = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name in ("data", "detach") and isinstance(result, Tensor) and result is not args[0]:
            self._aliases[id(result)] = (result, self.behind(args[0]))

    def behind(self, x: Tensor) -> Tensor:
        """The tensor that ``x`` is another object for, or itself."""
        return self._aliases[id(x)][1] if id(x) in self._aliases else x

    def write(self, target: Tensor, value: Tensor) -> None:
        """``target``, which depended on the batch alone, stands for ``value`` from now on, as all that is the same."""
        base = self.behind(target)
        for x in (base, target, *(alias for alias, other in self._aliases.values() if other is base)):
            self.written[id(x)] = (x, value)

    def written_tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What values of the model were written into, each once, with these."""
        return ((x, value) for x, value in self.written.values() if self.behind(x) is x)

    def copied(self, x: Tensor) -> Tensor:
        """``x`` as it is now."""
        return x.detach().clone()

    def sets(self, func: Any, args: Any, kwargs: Any) -> None:
        """The step's own code sets a property of a tensor that is none of its values, as ``x.requires_grad``."""

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

    def metric_within(self, metric: nn.Module) -> None:
        """A metric is called within a unit."""

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
