"""What a Trainer does about signals, and how far its loops are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_par.private.trainer import begin_evaluation


def register_by(trainer: Any, register: Callable[[], dict[int, Any]]) -> None:
    """Let ``register`` install the handlers of signals in place of the Trainer's own, as its loops are about to begin.

    Lightning's talk to other ranks from within, wherever these are, and there is no public way to be without.

    Args:
        trainer: puts back at its end all handlers as they were now.
        register: returns those of them that others than it have replaced before.
    """
    connector = trainer._signal_connector

    def replaced() -> None:
        connector.received_sigterm = False
        connector._original_handlers = {}
        before = connector._get_current_signal_handlers()
        connector._original_handlers = {**before, **register()}

    connector.register_signal_handlers = replaced


def register_as_lightning(trainer: Any) -> None:
    """Undo `register_by`."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)


def tell_sigterm(trainer: Any) -> None:
    """Let ``trainer.received_sigterm`` be true."""
    trainer._signal_connector.received_sigterm = True


def hpc_save_path(trainer: Any) -> str:
    """Where a run under SLURM finds what it resumes from, by itself: in its folder, one number behind the last."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def is_accumulating(trainer: Any) -> bool:
    """Between two batches: whether gradients wait for more, which no checkpoint holds."""
    return bool(trainer.fit_loop._should_accumulate())


def validates_once_more(trainer: Any) -> bool:
    """Between two batches: whether a run that resumes here takes itself to be before the end of a validation run that
    has ended, does not run it, but does what comes after it."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def steps_plateau_again(trainer: Any) -> bool:
    """Whether what comes after a validation run steps a scheduler by a metric, which a second time would be once too
    often."""
    return any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs)


def count_one_step_less(trainer: Any) -> None:
    """Where `validates_once_more`: a run that resumes counts the step, by which it logs, once more."""
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1


def begin_validation_anew(trainer: Any) -> None:
    """Within a validation run while fitting: count as Lightning does in its first batch, from where it runs it again.

    Of a checkpoint from any later batch it would leave out the batches before, and their part of the metrics.
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    begin_evaluation(progress, progress.total.completed - progress.current.completed)
