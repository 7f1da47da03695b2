"""Run the user's step as a trial and keep what it did: a `Recording`.

The step runs on a copy of the module whose parameters are fake: nothing is computed with them, no generator is moved,
nothing is logged, and no fake tensor is left in the user's attributes. What depends on the batch alone is computed.
What fakes can't do ends the recording early; the events before it still count.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred, fake_of
from lightning_par.private.compiler import uncompiled
from lightning_par.private.fake_tensors import FakeTensorMode, log
from lightning_par.private.modes import no_modes
from lightning_par.private.tensors import mark_parameter
from lightning_par.python_state import generators
from lightning_par.python_state.drawing_caches import tried
from lightning_par.python_state.kept import kept
from lightning_par.python_state.nested_tensors import cloned
from lightning_par.python_state.user_code import line_of, told_with_line
from lightning_par.sharded.tensor import OutOfSightError
from lightning_par.sharded.user_classes import put_on, users_class
from lightning_par.strategies.entry_points import (
    STEPS,
    Repeated,
    call_start_hooks,
    fetches_itself,
    start_hooks,
    step_arguments,
)
from lightning_par.trial.applied_functions import functions_heard
from lightning_par.trial.batch_tensors import names_of, tensors_of
from lightning_par.trial.fake_functions import is_fake
from lightning_par.trial.function_recorder import Recorder
from lightning_par.trial.guesses import EndlessError, Guesses, Patterns, Trial, explore
from lightning_par.trial.listener import Listener, Listeners
from lightning_par.trial.module_copy import copied, stand_in
from lightning_par.trial.recording import Recording, returned
from lightning_par.trial.start_hooks import hang_hooks
from lightning_par.trial.twin_recorder import TwinRecorder

_LARGE = 2**24  # elements of a tensor that a trial has a fake of rather than a copy

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def record_step(
    module: nn.Module,
    step: str,
    batch: Any,
    *,
    shared: tuple[Any, ...] = (),
    context: Context = contextlib.nullcontext,
    prepare: Callable[[Any], Any] | None = None,
    loaders: int = 1,
    patterns: Patterns | None = None,
    listeners: Listeners | None = None,
    twin: bool = False,
    device: torch.device | None = None,
    hears_started: bool = False,
    planned: bool = False,
) -> Recording:
    """Record ``module.<step>(batch, 0)``, with autograd on in a training step and off in others, as runs have it.

    A step may go by it, as by ``if h.requires_grad:``; and a training step's tensors tell which gradients it needs.

    Args:
        module: any module; it is left as it was.
        step: the name of the method, e.g. ``"training_step"``.
        batch: one batch, of any structure; it is left as it was.
        shared: objects that the copy of the module shares with it, such as its trainer.
        context: entered around the step, for precision.
        prepare: makes of the copied batch what the step is given.
        loaders: dataloaders that the entry point runs one after another.
        patterns: of the guesses that did in an earlier recording.
        listeners: what listens to the step, made for each run of it.
        twin: whether to record what the step would do on ``batch`` itself, too, and let the listener hear that.
        device: where tensors that the module has on ``meta`` are taken to lie; by default there.
        hears_started: whether listeners hear a step, too, before which hooks of the start of a run had to be called.
        planned: whether it is for a plan, which takes little memory: large values of the batch are fake.

    Example::

        class Model(nn.Module):
            def training_step(self, batch, batch_idx):
                return batch.sum()

        assert record_step(Model(), "training_step", torch.ones(2)).events[0].name == "sum"
    """

    run = _Run(module, step, batch, shared, context, prepare, loaders, listeners, twin, device, hears_started, planned)

    def explored(starts: bool) -> Trial[Recording]:
        trial = partial(run.trial, starts)
        with torch.set_grad_enabled(step == STEPS["fit"]):
            return explore(trial, patterns)

    first = planned and hang_hooks(module)
    best = explored(first)
    if best.value.stopped is not None and not best.done and start_hooks(module):  # it may lack what these set
        best = max(best, explored(not first), key=lambda found: found.worth)
    return best.value


def _started(copy: Any, step: str, batch: Any) -> str | None:
    """Call what Lightning calls before the first ``step``; what of it did not end, on fakes, and why."""
    try:
        with generators.kept(), quiet():
            call_start_hooks(copy, step, batch)
    except Exception as error:  # of the user's hooks
        return told_with_line(error)
    return None


@dataclass(frozen=True)
class _Run:
    """What is recorded; see `record_step`."""

    module: nn.Module
    step: str
    batch: Any
    shared: tuple[Any, ...]
    context: Context
    prepare: Callable[[Any], Any] | None
    loaders: int
    listeners: Listeners | None
    twin: bool
    device: torch.device | None
    hears_started: bool
    planned: bool

    def trial(self, starts: bool, guesses: Guesses) -> Trial[Recording]:
        """The step by ``guesses``; ``starts`` says whether hooks of the start of a run are called before."""
        with kept(self.module) as state:  # class bodies, globals and closures, which the copy shares
            heard = self.listeners is not None and (not starts or self.hears_started)
            listener = self.listeners() if heard else None  # type: ignore[misc]
            recording = copy_context().run(self._recorded, guesses, starts, listener)
            if recording.drew_for_cache:  # which the step itself is to draw
                state.forget_cached()
        turns = guesses.endless is not None  # of a loop, which come to nothing
        worth = (recording.met, recording.stopped is None, 0 if turns else len(recording.events))
        # A loop in an evaluation that generates text is mostly all that there is of it.
        done = recording.is_whole or (turns and self.step != STEPS["fit"] and recording.met_all)
        return Trial(recording, guesses, worth, done)

    def _recorded(self, guesses: Guesses, starts: bool, listener: Listener | None) -> Recording:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}
        stand = fake_stands(self.module, mode, fakes, self.device)
        parameters = _by_names(self.module, fakes)
        recorder = (TwinRecorder if self.twin else Recorder)(mode, guesses, listener)
        recorder.hollow = self.planned
        copy = stand_in(self.module, stand, self.shared, recorder.took)
        if isinstance(recorder, TwinRecorder):
            recorder.roots = {id(fake) for fake in fakes.values() if is_fake(fake)}
        if self.planned and hasattr(copy, "manual_backward"):
            recorder.by_hand = () if copy.automatic_optimization else (*parameters.values(),)
            copy.manual_backward = recorder.begin_backward
            for name in ("toggle_optimizer", "untoggle_optimizer"):  # which gradients the copy's weights require
                setattr(copy, name, no_modes()(MethodType(getattr(type(self.module), name), copy)))
        batch = copied(self.batch)
        unstarted = _started(copy, self.step, batch) if starts else None
        if listener is not None:
            listener.begin(copy)
        given, names = tensors_of(batch), (*names_of(batch),)  # before the step puts others there: `batch["mask"] = m`
        result, stopped, refused = self._called(copy, batch, recorder)
        tensors = tuple(recorder.fake(x) for x in given)
        events = tuple(recorder.events)
        found = Recording(events, parameters, tensors, result, stopped, refused, guesses.patterns)
        applied, told = tuple(recorder.calls), recorder.drew_for_cache
        found = replace(found, names=names, ends=tuple(recorder.ends), applied=applied, drew_for_cache=told)
        found = replace(found, unstarted=unstarted)
        if stopped is not None or (recorder.drew_for_cache and not self.planned):
            return found  # a run refuses by a trial of its own what a plan counts nevertheless
        return _heard(found, recorder, given)

    def _called(self, copy: Any, batch: Any, recorder: Recorder) -> tuple[Any, str | None, str | None]:
        """What the step returns, why it ended early, and what no recording can follow, if that was the reason."""
        result, stopped, refused = None, None, None
        functions = functions_heard(recorder) if self.planned else contextlib.nullcontext()
        with generators.kept(), quiet(), functions, recorder, self.context():
            try:
                function = getattr(copy, self.step)
                given = batch if self.prepare is None else self.prepare(batch)
                if fetches_itself(function):
                    result = tried(function, Repeated(given))
                else:
                    result = tried(function, given, *step_arguments(function, self.loaders))
                recorder.took_by(returned, result)
            except (Exception, EndlessError) as error:  # whatever the user's step may raise on fakes: it ends there
                stopped = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
                stopped += f" at {line_of(error) or 'an unknown line'}"
                refused = str(error) if isinstance(error, OutOfSightError) else None
        return result, stopped, refused


def _by_names(module: nn.Module, fakes: dict[int, Tensor]) -> dict[tuple[str, ...], Tensor]:
    """The fakes of parameters, by all names of each."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(fakes[id(parameter)]), []).append(name)
    by_id = {id(fake): fake for fake in fakes.values()}
    return {tuple(found): by_id[key] for key, found in names.items()}


def _heard(found: Recording, recorder: Recorder, given: list[Tensor]) -> Recording:
    """What was ``found``, with what a listener heard of the whole step on the tensors ``given``, and a twin's own
    recording of that."""
    whole = recorder.plain if isinstance(recorder, TwinRecorder) else recorder
    if whole is None:
        return found
    heard = None if whole.listener is None else whole.listener.end()
    if whole is recorder:
        return replace(found, heard=heard)
    tensors = tuple(whole.fake(x) for x in given)
    plain = replace(found, events=tuple(whole.events), batch=tensors, result=None, heard=heard)
    return replace(found, plain=plain)


def fake_stands(
    module: nn.Module, mode: FakeTensorMode, fakes: dict[int, Tensor], device: torch.device | None = None
) -> Callable[[Tensor], Tensor]:
    """What stands in a trial for a tensor that ``module`` holds: for a parameter its fake, for any other a copy.

    Args:
        module: any module.
        mode: of the fakes.
        fakes: is filled with what stands for a tensor, by its id; with parameters' at once.
        device: where tensors on ``meta`` are taken to lie; by default there.
    """
    for parameter in module.parameters():
        fakes[id(parameter)] = _fake(parameter, mode, device)
        mark_parameter(fakes[id(parameter)])  # what `isinstance` asks
        put_on(fakes[id(parameter)], users_class(parameter))

    def stand(x: Tensor) -> Tensor:
        if id(x) not in fakes:
            away = x.is_meta or x.numel() > _LARGE
            fakes[id(x)] = _fake(x, mode, device) if away else x.value() if isinstance(x, Deferred) else cloned(x)
        return fakes[id(x)]

    return stand


def _fake(x: Tensor, mode: FakeTensorMode, device: torch.device | None) -> Tensor:
    """Not by the mode's own way, which keeps a weak reference: a parameter that has one can't be exchanged."""
    return fake_of(x, mode, device if x.is_meta else None) if x.layout is torch.strided else mode.from_tensor(x)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What fake tensors can't run is told in the recording; torch's own log of it would alarm.

    Compiled code runs as it is written: it would read the memory that fake tensors don't have, and hold on to weights.
    """
    level, log.level = log.level, logging.CRITICAL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will give them
            with uncompiled():
                yield
    finally:
        log.level = level
