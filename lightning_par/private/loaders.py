"""Where Lightning keeps loaders and the batches that it fetched."""

from __future__ import annotations

from collections.abc import Callable
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


def iterators_of(combined_loader: Any) -> list[Any]:
    """Those from which an iterated ``CombinedLoader`` takes batches: of a loader that has begun anew, another."""
    return [*combined_loader._iterator.iterators]


def note_fetched(iterator: Any, batch: Any) -> None:
    """Let hooks be given ``batch``, which a step fetched of Lightning's ``dataloader_iter``, after that step; the loops
    look for it where the iterator left its own."""
    iterator.data_fetcher._batch = batch


class HandedOut:
    """Lets the fit loop get ``change`` of the loaders that it asks the user for, each time that it does, until `end`.

    It asks an object of its own, by a method whose place an attribute can take; what took it before goes on.
    """

    def __init__(self, trainer: Any, change: Callable[[Any], Any]) -> None:
        self._source, self._change = trainer.fit_loop._data_source, change
        self._begin()

    def _begin(self) -> None:
        self._given = vars(self._source).get("dataloader")
        self._source.dataloader = self

    def __call__(self) -> Any:
        self.end()
        try:
            return self._change(self._source.dataloader())
        finally:
            self._begin()

    def end(self) -> None:
        if vars(self._source).get("dataloader") is self:
            del self._source.dataloader
            if self._given is not None:
                self._source.dataloader = self._given


def processed(namespace: Namespace, trainer: Any, loader: Any) -> Any:
    """What the fit loop makes of one of the user's training loaders: with its sampler, and what the strategy does."""
    function, stage = (namespace.from_pytorch("trainer.states", name) for name in ("TrainerFn", "RunningStage"))
    process = namespace.from_pytorch("trainer.connectors.data_connector", "_process_dataloader")
    return process(trainer, function.FITTING, stage.TRAINING, loader)


def is_stateful(namespace: Namespace, loader: Any) -> bool:
    """Whether Lightning keeps the state of ``loader`` in checkpoints; it asks a protocol that it keeps to itself."""
    return isinstance(loader, namespace.from_fabric("utilities.types", "_Stateful"))


def without_states(kind: Any) -> Any:
    """A ``CombinedLoader``'s class, in whose objects Lightning finds no states of loaders."""

    class WithoutStates(kind):  # type: ignore[misc]
        def _state_dicts(self) -> list[Any]:
            return []

        def _load_state_dicts(self, states: list[Any]) -> None:
            pass

    return WithoutStates


def attach_loader(trainer: Any, module: Any, loader: Any) -> None:
    """Let ``trainer`` have ``loader`` for the training of ``module``, as its entry point does; no public name gives one
    outside of that."""
    trainer._data_connector.attach_data(module, train_dataloaders=loader)
