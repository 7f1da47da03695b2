"""What a Trainer and its callbacks keep to themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_par.strategies.namespace import Namespace


def dummy_experiment(namespace: Namespace) -> type:
    """What a logger's ``experiment`` is on ranks that log nothing; each of its methods is ``nop``. Lightning has no
    public name for it."""
    kind: type = namespace.from_fabric("loggers.logger", "_DummyExperiment")
    return kind


def is_dummy_experiment(x: Any) -> bool:
    """Whether ``x`` is what `dummy_experiment` makes, of either of Lightning's packages."""
    kind = type(x)
    return kind.__name__ == "_DummyExperiment" and kind.__module__.endswith("fabric.loggers.logger")


def resumes(trainer: Any) -> bool:
    """Whether a checkpoint was given to the running entry point; it is loaded by the time the model is set up."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)


def around_restore(
    trainer: Any, choose: Callable[[Any, bool | None], Any], then: Callable[[dict[str, Any] | None], None]
) -> None:
    """Let the next entry point restore from what ``choose`` makes of the path and of ``weights_only``, and call
    ``then`` with what was read, if anything, before loops and optimizers are restored from it. No hook has a say."""
    connector = trainer._checkpoint_connector

    def restore(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        del connector._restore_modules_and_callbacks
        connector._restore_modules_and_callbacks(choose(checkpoint_path, weights_only), weights_only)
        then(connector._loaded_checkpoint or None)

    connector._restore_modules_and_callbacks = restore


def asked_checkpoint(trainer: Any) -> Any:
    """The ``ckpt_path`` of the running ``fit`` as the user wrote it, as "last": it is handed on as what was found."""
    connector = trainer._checkpoint_connector
    if connector._user_managed:
        return connector._ckpt_path
    methods = [vars(kind).get("fit") for kind in type(trainer).__mro__]
    codes = [getattr(method, "__code__", None) for method in methods if method is not None]
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code in codes and "ckpt_path" in frame.f_locals):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["ckpt_path"]


def checkpoint_of_run(trainer: Any) -> tuple[Any, bool | None]:
    """The path of the checkpoint that the running entry point will load, if any, and its ``weights_only``; Lightning
    hands both on from function to function."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer):
        frame = frame.f_back
    return (None, None) if frame is None else (frame.f_locals["ckpt_path"], frame.f_locals.get("weights_only"))


def begin_epoch(trainer: Any) -> None:
    """Let the fit loop, which is about to run, begin an epoch, whatever of another one it was restored from. It takes
    itself for within one wherever there are ``max_steps``."""
    trainer.fit_loop.epoch_loop.restarting = False


def go_on_after_batch(trainer: Any) -> None:
    """Let the fit loop, which is about to run, do what follows a batch whose last hooks have run: validate, if that is
    due, and end the epoch, if it was the last one.

    Restored from a checkpoint of these hooks by itself, it leaves the validation out; and where the batch was the last
    one, the end of the epoch, too, of which it loses count, so that a second checkpoint is resumed at a wrong place.
    """
    loop = trainer.fit_loop.epoch_loop
    if loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        counts = loop.val_loop.batch_progress
        total = counts.total.state_dict()
        begin_evaluation(counts, counts.total.completed)
        loop.update_restart_stage()
        counts.total.load_state_dict(total)  # a first batch that was only begun is one too many
        return
    if not loop._should_accumulate():
        loop._batches_that_stepped += 1
    if loop.batch_progress.is_last_batch:
        trainer.fit_loop.epoch_progress.increment_processed()
        trainer.fit_loop.epoch_progress.increment_completed()
        trainer.fit_loop.reset_restart_stage()
        loop.restarting = False


def before_validations(trainer: Any, note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` before each validation while fitting makes its loaders' iterators, which draw; until the function
    that is returned is called. Hooks run behind that."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    set_up = loop.setup_data

    def setup_data() -> None:
        note()
        set_up()

    return _put(loop, setup_data)


def _put(loop: Any, function: Callable[..., Any]) -> Callable[[], None]:
    """Let ``loop`` have ``function`` as its method of that name, until what is returned is called: then it has again
    what it had, which may be the user's, as in a test."""
    name = function.__name__
    before = vars(loop).get(name)
    setattr(loop, name, function)

    def end() -> None:
        if vars(loop).get(name) is function:
            delattr(loop, name)
            if before is not None:
                setattr(loop, name, before)

    return end


def around_turns(
    trainer: Any, after_batch: Callable[[], None], before_validation: Callable[[], None], at_end: Callable[[], None]
) -> Callable[[], None]:
    """Let the fit loop call ``after_batch`` where a batch's hooks have run, and again where the validation has that may
    follow, ``before_validation`` where one begins, and ``at_end`` where training is over, before hooks hear of any of
    these; until the function that is returned is called."""
    fit = trainer.fit_loop
    batches, validation = fit.epoch_loop, fit.epoch_loop.val_loop
    advanced, evaluate, ended = batches.on_advance_end, validation.run, fit.on_run_end

    def on_advance_end(*args: Any) -> None:
        after_batch()
        advanced(*args)
        after_batch()

    def run() -> Any:
        before_validation()
        return evaluate()

    def on_run_end() -> None:
        at_end()
        ended()

    ends = [_put(batches, on_advance_end), _put(validation, run), _put(fit, on_run_end)]

    def end() -> None:
        for each in ends:
            each()

    return end


def begin_evaluation(progress: Any, before: int) -> None:
    """Let an evaluation count as Lightning does in its first batch, from where it is run again.

    Args:
        progress: of its batches.
        before: batches of those that ran before it.
    """
    for counts, done in ((progress.total, before), (progress.current, 0)):
        counts.ready = counts.started = done + 1
        counts.processed = counts.completed = done
    progress.is_last_batch = False


def throughputs(monitor: Any) -> list[Any]:
    """What a ``ThroughputMonitor`` counts with, by stage; it makes them itself and hands none out."""
    return list(monitor._throughputs.values())


def about_to_begin_batch(frame: FrameType | None) -> bool:
    """Whether the training loop, in which ``frame`` or its caller runs, comes to a batch: before it asks for that, all
    ranks take part in a broadcast of Lightning's own, of which no strategy is told."""
    caller = None if frame is None else frame.f_back
    return any(
        f is not None and f.f_code.co_name == "advance" and f.f_globals["__name__"].endswith(".training_epoch_loop")
        for f in (frame, caller)
    )


def met_a_skipped_step(frame: FrameType | None) -> bool:
    """Whether the training loop, in which ``frame`` or its caller runs, has got None from a training step, and asks how
    many ranks there are since it refuses that where one of several alone might skip a step."""
    caller = None if frame is None else frame.f_back
    return any(
        f is not None and f.f_code.co_name == "_training_step" and f.f_globals["__name__"].endswith(".automatic")
        for f in (frame, caller)
    )


def restores_a_run(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs since an entry point of the Trainer loads the checkpoint that it was given, which it does
    on all ranks; Lightning tells no strategy why a checkpoint is loaded."""
    while frame is not None and not (
        frame.f_code.co_name == "resume_start" and frame.f_globals["__name__"].endswith(".checkpoint_connector")
    ):
        frame = frame.f_back
    return frame is not None


def is_entry_point(frame: FrameType) -> bool:
    """Whether ``frame`` is that of the function of Lightning within which all code of a run is called."""
    return frame.f_code.co_name == "_call_and_handle_interrupt"
