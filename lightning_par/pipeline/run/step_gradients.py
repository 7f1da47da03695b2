"""The gradients of one training step: of the backwards of its stages, finished over all ranks, and delivered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from operator import itemgetter
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.optim.gradients_ahead import Ahead
from lightning_par.pipeline.plan.uncalled import within
from lightning_par.pipeline.program.prepared_step import Prepared
from lightning_par.pipeline.run.accumulated_gradients import AccumulatedGradients
from lightning_par.pipeline.run.delivery import called_before, deliver, note_last
from lightning_par.pipeline.run.final_gradients import FinalGradients, stages_by_leaf
from lightning_par.pipeline.run.gradients_apart import GradientsApart
from lightning_par.pipeline.run.unfinished_gradients import UnfinishedGradients
from lightning_par.pipeline.trial.expected_gradients import refuse_others
from lightning_par.private.leaf_hooks import hooked, number_of_leaf_hooks
from lightning_par.sharded import gradient_shares
from lightning_par.sharded.tensor import leaf

if TYPE_CHECKING:
    from lightning_par.pipeline.run.engine import Engine


class StepGradients:
    """Collects, finishes and delivers the gradients of one step.

    Args:
        engine: that runs the step.
        ready: the step.
        named: the leaves that get gradients here, by name.
        scale: of the loss in the backwards.
        ahead: averages gradients over replicas while the backwards run, unless hooks must see them first.
        seen: whether hooks run in the backwards.

    Example::

        gradients = StepGradients(engine, ready, named, scale, ahead)
        with gradients.collected() as apart:
            ...  # the forwards and backwards
        gradients.finish(compared=False)
        gradients.land()
        loss = gradients.delivered(loss)
    """

    def __init__(
        self,
        engine: Engine,
        ready: Prepared,
        named: Mapping[str, Tensor],
        scale: float,
        ahead: Ahead | None,
        seen: bool = False,
    ) -> None:
        self._engine, self._ready, self._named, self._scale = engine, ready, named, scale
        turns = engine.programs.hooks.on_parameters
        self._order: list[int] | None = [] if turns else None  # in which backward came to the leaves, by id
        self._ahead = None if turns or seen else ahead
        self._earlier = AccumulatedGradients(named) if seen else None
        self._unfinished = self._found_later() if seen else None
        self.finals = None if self._ahead is None else self._follow(self._ahead)
        self._found: dict[Tensor, Tensor | None] = {}
        self._got: set[str] = set()  # those that have a gradient, where that is compared

    def _found_later(self) -> UnfinishedGradients:
        programs, named = self._engine.programs, self._named
        tied = {name for name in named if len(programs.holds(name)) > 1}
        own = {name for name, p in hooked(named.items()) if number_of_leaf_hooks(p)}
        weights = {name: p for name, p in self._engine.module.named_parameters() if name in tied | own}
        return UnfinishedGradients({name: p for name, p in weights.items() if p.requires_grad}, tied)

    def _follow(self, ahead: Ahead) -> FinalGradients:
        programs, rank = [part.program for part in self._ready.parts], self._engine.axis.rank
        stages = stages_by_leaf(programs, rank, self._named, self._engine.programs.holds)
        return FinalGradients(stages, ahead.final, ahead.refuse_late)

    @contextlib.contextmanager
    def collected(self) -> Iterator[GradientsApart]:
        """The backwards run inside; what earlier batches of the window left in ``.grad`` is put back behind it."""
        note: Callable[[Tensor], None] | None = None if self.finals is None else self.finals.note
        if self._order is not None:
            note = partial(note_last, self._order)
        parameters, began = [*self._named.values()], None if self._earlier is None else self._begun
        cut = len(self._ready.parts) > 1
        weights = self._engine.programs.tree.parameters() if cut else []
        kinds = map(isinstance, map(itemgetter(1), weights), repeat(Stored))
        stored = [leaf(p) for _, p in compress(weights, kinds)]
        with (
            GradientsApart(parameters, note, began, cut, stored) as apart,
            gradient_shares.unshared(),
            contextlib.ExitStack() as self._watched,
        ):
            yield apart
            found = apart.found()  # before what was there is put back
            earlier = self._earlier
            self._found = dict(zip(parameters, found, strict=True)) if earlier is None else earlier.of_step()

    def _begun(self, earlier: Sequence[Tensor | None]) -> None:
        """The first backward is about to run, in which hooks see what the ``earlier`` ones left."""
        assert self._earlier is not None and self._unfinished is not None
        self._earlier.show(earlier)
        gradient_shares.watch_looks()
        self._watched.enter_context(self._unfinished.watched())

    def finish(self, compared: bool) -> None:
        """Sum what several ranks have a part of, and send what is to be averaged. All ranks must call it.

        Args:
            compared: whether `check` will be called.
        """
        own, self._found = self._found, self._engine.finish_gradients(self._found)
        if self._engine.leaves is not None:
            self._found = self._engine.leaves.finish(self._found)
        if self._ahead is not None:
            self._ahead.send_rest(self._found)
        if compared:
            self._got = self._with_gradient(own)

    def check(self, expected: frozenset[str]) -> None:
        """Raises RuntimeError where other parameters have a gradient than those ``expected``, which have one on one
        device."""
        leaves = () if self._engine.leaves is None else self._engine.leaves.names
        weights = [name for name in self._named if name not in leaves]
        self._refuse_registered(expected.intersection(weights) - self._got)
        refuse_others(expected, self._got, weights, self._engine.axis.rank)

    def _refuse_registered(self, names: Iterable[str]) -> None:
        """Raises RuntimeError where this rank has one of the weights, and only another one runs its layer."""
        stages, rank = self._engine.programs.stages, self._engine.axis.rank
        for name in sorted(names):
            units = [path for path in stages.homes if within(name, (path,))]
            if units and rank not in stages.holders(max(units, key=len)):
                raise RuntimeError(
                    f"{name!r} was registered within the run, as by remove_parametrizations or remove_weight_norm, on "
                    "a layer that another stage of the pipeline runs: here it would not be trained. Do it before "
                    "trainer.fit or after it, or use TensorParallelStrategy."
                )

    def _with_gradient(self, own: Mapping[Tensor, Tensor | None]) -> set[str]:
        """The names of those that have a gradient, as this rank's ``own`` or once it is summed."""
        found, named, parts = self._found, self._named, self._parts()
        places = {n: (own[p], found.get(p), found.get(parts.get(n, p))) for n, p in named.items()}
        return {n for n, there in places.items() if any(x is not None for x in there)}

    def _parts(self) -> dict[str, Tensor]:
        """By name what has the gradient of a parameter once it is summed: of a stored one, the part of it."""
        return {name: leaf(p) for name, p in self._engine.module.named_parameters()}

    def land(self) -> None:
        """Wait for the averages, once the step's messages are done: gradients may share memory with these."""
        if self._ahead is not None:
            self._found = self._ahead.land(self._found)

    def delivered(self, loss: Tensor) -> Tensor:
        """``loss`` again, whose backward gives each leaf its gradient."""
        grads = [(p, g) for p, g in self._found.items() if g is not None]
        if self._order is None:
            value = self._engine.in_backward.delivered(deliver(loss, grads, self._scale))
        else:
            value = self._delivered_in_turn(loss, grads, self._order)
        return value if self._earlier is None else called_before(value, self._earlier.check)

    def _delivered_in_turn(self, loss: Tensor, grads: list[tuple[Tensor, Tensor]], order: list[int]) -> Tensor:
        """Each parameter in the order of backward, in which hooks on them run."""
        engine, named, parts = self._engine, self._named, self._parts()
        place, given = {key: n for n, key in enumerate(order)}, {id(p): (p, g) for p, g in grads}
        there = {n: id(x) for n, p in named.items() for x in (p, parts.get(n, p)) if id(x) in given}
        # those that no backward of this rank has reached come last
        names = sorted(there, key=lambda n: place.get(id(named[n]), len(place)))
        counts = {name: engine.programs.holds(name)[0] for name in names}
        aside = {name: rank for name, rank in counts.items() if rank != engine.axis.rank}
        ordered = {name: given[there[name]] for name in names}
        return engine.in_backward.in_turn(self._ready.program, loss, ordered, self._scale, aside)
