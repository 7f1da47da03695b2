"""A run of the user's step whose changes besides computing are undone, or told.

A step runs several times on every rank of a pipeline, and counts once. See `lightning_par.pipeline.effects.effects` for
what becomes of the run that counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.listening import Listening
from lightning_par.pipeline.effects.logged_outputs import OutputRecorder, Recorder, recorded, silent
from lightning_par.pipeline.effects.metrics import Around, MetricStandIns, calling
from lightning_par.pipeline.effects.watched_state import WatchedState
from lightning_par.python_state.changes import stored_by
from lightning_par.python_state.locked_arrays import not_copied, reading
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.spare_tensors import Spares


class Watch(WatchedState):
    """Runs of a step that are undone, or told, with the Python state that it reaches outside units.

    Args:
        lightning_module: whose step is run.
        modules: the container-level modules by FQN, ``lightning_module`` itself (``""``) and metrics included.
        around: called for each outermost call of a metric's ``forward``, ``update`` or ``compute`` as ``around(name,
            metric, call, args, kwargs)``; what it returns is the call's result. ``call`` is the metric's own method in
            a run that counts, and gives a value of the same structure, without touching the metric, in one that
            does not.

    Example::

        watch = Watch(module, [("", module)])
        with watch.undone(batch):
            module.training_step(batch, 0)
        with watch.told(batch) as effects:
            effects.result = module.training_step(batch, 0)
        effects = effects.travel(axis, source=axis.size - 1, objects=watch.objects(batch))
        apply(effects, module, watch, batch, show=axis.rank == 0)
    """

    def __init__(
        self, lightning_module: Any, modules: Sequence[tuple[str, nn.Module]], around: Around | None = None
    ) -> None:
        super().__init__(lightning_module, modules)
        self.around = around
        self.made: dict[tuple[str, Any], Any] = {}  # what this rank's last run that was asked to `keep` stored anew
        self.absent: Effects | None = None  # in a dry run what that run did, of which no other rank can tell
        self._stand_ins = MetricStandIns()
        self._spares_of_batch = Spares()

    def begin(self) -> None:
        super().begin()
        self._spares_of_batch.forget()

    @contextlib.contextmanager
    def undone(
        self, batch: Any = None, keep: bool = False, hear: Recorder | None = None, absent: Effects | None = None
    ) -> Iterator[None]:
        """Whatever the run inside does to the state is undone; its logs, prints and metric updates do nothing.

        Args:
            batch: what the step is given.
            keep: whether `made` gets what the run stored.
            hear: what the run logs and says goes there, if it is given.
            absent: gets what the run changed, too, if it is given.

        Raises:
            RuntimeError: the run changed something in place that is too large to be copied.
        """
        state = self.snapshot()
        module = self.lightning_module
        with self._lent(state, batch, absent, keep=keep) as refused:
            with (
                silent(module) if hear is None else recorded(module, hear),
                calling(state.metrics, self.around, self._stand_ins.call),
            ):
                yield
        if refused:
            raise RuntimeError(" ".join(refused))

    @contextlib.contextmanager
    def told(
        self, batch: Any = None, whole: bool = True, hear: Callable[[Effects], Recorder] | None = None
    ) -> Iterator[Effects]:
        """The run inside counts: afterwards the `Effects` hold what it did, and the state is put back here, too.

        Args:
            batch: what the step is given.
            whole: whether what becomes of the batch counts; a part's does not.
            hear: gives who takes what the run says, for these effects.
        """
        state, effects = self.snapshot(), Effects()
        recorder: Recorder = OutputRecorder(self.lightning_module, effects.logs, effects.said, lambda: state.names)
        recorder = recorder if hear is None else hear(effects)
        with self._lent(state, batch, effects, whole) as refused:
            with recorded(self.lightning_module, recorder), calling(state.metrics, self.around, None):
                yield effects
        effects.refused += refused

    @contextlib.contextmanager
    def _lent(
        self, state: Snapshot, batch: Any, effects: Effects | None = None, whole: bool = True, keep: bool = False
    ) -> Iterator[list[str]]:
        """Inside a run may change all that ``state`` knows, and the batch; gives what it must not have done."""
        # in such a batch nothing but tensors could change
        plain = type(batch) is Tensor or type(batch) is tuple and all(type(x) is Tensor for x in batch)
        given = None if plain and effects is None else self._of_batch(state, batch)
        as_is = {id(x) for x in tensors_in(batch)}
        refused: list[str] = []
        state.lend(self._spares, as_is)
        if given is not None:
            given.lend(self._spares_of_batch, as_is)
        held = [x for x in (state, given) if x is not None]
        try:
            with reading(held, copies=True):
                yield refused
            if keep:
                self.made = _made(held)
            if effects is not None:
                effects.note(state)
                if given is not None and whole:
                    effects.note(given)
        finally:
            overwritten = [place for x in held for place in x.restore()]
        if overwritten:
            refused.append(not_copied(overwritten))

    def listening(self, hear: Recorder) -> contextlib.AbstractContextManager[None]:
        """What units log, ask of loggers or give to metrics inside does nothing but be heard.

        It may be entered many times, as long as nothing moves.
        """
        metrics = {} if self._snapshot is None else self._snapshot.metrics
        return Listening(self.lightning_module, hear, metrics, self.around, self._stand_ins)

    def settle(self, changed: Iterable[str]) -> None:
        """The objects of these names have changed for good: what they held is let go, and `made`, too."""
        self.made = {}
        super().settle(changed)


def _made(held: Iterable[Snapshot]) -> dict[tuple[str, Any], Any]:
    """What was stored anew, by the name of the object that holds it and where in it; not what may not be."""
    found: dict[tuple[str, Any], Any] = {}
    for state, name, change in ((x, name, change) for x in held for name, change in x.changes().items()):
        if state.cells[name].fixed is None:
            found.update(((name, key), value) for key, value in stored_by(change).items())
    return found
