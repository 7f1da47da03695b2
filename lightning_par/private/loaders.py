"""Where Lightning keeps loaders and the batches that it fetched."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils import signal_handling

from lightning_par.strategies.namespace import Namespace

WORKERS_SET_HANDLERS = signal_handling, "_set_worker_signal_handlers"
"""What a worker of a ``DataLoader`` calls for torch's handlers of signals; it offers no place behind that to change
them but ``worker_init_fn``, which is the user's."""


def data_source(trainer: Any) -> Any:
    """Where the running entry point gets its loaders from: an object with ``dataloader()`` and ``is_defined()``.

    Public names (`trainer.train_dataloader`) are filled only when the loop starts, after the model was set up.
    """
    loops = {
        "fit": trainer.fit_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    return loops[trainer.state.fn.value]._data_source


def request_loader(namespace: Namespace, source: Any) -> Any:
    """The user's loader, made under the context in which Lightning records a DataLoader's arguments, without which it
    could not put a distributed sampler into it later."""
    return namespace.from_pytorch("trainer.connectors.data_connector", "_request_dataloader")(source)


def mode_of(combined_loader: Any) -> str:
    """How a ``CombinedLoader`` makes batches of several loaders; it takes its mode and doesn't tell it."""
    return combined_loader._mode


def note_fetched(iterator: Any, batch: Any) -> None:
    """Let hooks be given ``batch``, which a step fetched of Lightning's ``dataloader_iter``, after that step; the loops
    look for it where the iterator left its own."""
    iterator.data_fetcher._batch = batch
