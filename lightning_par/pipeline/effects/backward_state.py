"""Python state that changes in backward: what hooks on gradients keep, and code that checkpointing runs again.

On one device backward begins once the step has returned, and goes through the layers from the last to the first. Each
rank runs the backward of its own stages, within the step. So what the step did is done on all ranks before the first
of these, each rank hears what later stages have changed before it goes on to its own, and all of it is taken back
until Lightning calls backward. There it is done again, before the hooks on parameters of the same stage run.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from lightning_par.mesh.broadcast import kinds_at, send_to_all, wanted_of
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.effects.backward_draws import drawing_in_backward
from lightning_par.pipeline.effects.backward_outputs import HooksHeard
from lightning_par.pipeline.effects.effects import log_and_say, packed_error
from lightning_par.pipeline.effects.held_loggers import held_refused, loggers_of
from lightning_par.pipeline.effects.kept_gradients import refused as refused_gradients
from lightning_par.pipeline.effects.logged_outputs import OutputRecorder, call_of
from lightning_par.pipeline.effects.told_changes import Changed, Told, leave_what_cannot_travel, sent
from lightning_par.pipeline.effects.unit_python_state import InnerState
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.delivery import Turn, called_before, deliver_in_turn
from lightning_par.private.graph import at_end_of_backward
from lightning_par.python_state.changes import MappingChange
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.sharded.run_state import RunState


class InBackward:
    """Lets all ranks have what backward changes.

    Args:
        inner: tells what units change in forward.

    Example::

        state.begin(program)  # once all forwards have run
        for stage in reversed(range(stages)):
            with state.stage():  # on its rank
                ...  # its backward
            state.tell()
        state.end()
        loss = state.delivered(loss)
    """

    def __init__(self, inner: InnerState) -> None:
        self.inner, self.watch, self.axis = inner, inner.watch, inner.axis
        self._active = False
        self._changed: dict[int, Changed] = {}
        self._heard = contextlib.ExitStack()
        self._draws = contextlib.ExitStack()
        self._own = False  # whether hooks on parameters of this rank's run, which count

    # ------------------------------------------------------------------------------------ the backwards of the stages

    def clear(self) -> None:
        """Forget the step before."""
        self._active, self._changed = False, {}

    def begin(self, program: Program) -> None:
        """The backwards of a step begin, in which code may run that keeps something. All ranks must call it."""
        self._program, self._active = program, True
        self._next = program.stages - 1
        self._first = self.watch.everything()[0].copy_tensors().lend_iterators()

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """The backward of a stage runs inside, on its rank."""
        before, own = self.watch.everything()
        said = Changed("")
        try:
            with self._hearing(said, before):
                yield
        except Exception as error:
            self._tell_raised(error)
            raise
        self._mine = replace(Changed.since(before, own), logs=said.logs, said=said.said), before

    def _tell_raised(self, error: Exception) -> None:
        """The others wait for what this rank's backward has changed: they raise the same."""
        known = Known({}, {}, self.inner.module)
        sent(Told(raised=packed_error(error)), self.axis, self.inner.device, self.axis.rank, "state of hooks", known)

    def _hearing(self, said: Changed, before: Snapshot) -> contextlib.AbstractContextManager[None]:
        module = self.watch.lightning_module
        return HooksHeard(module, OutputRecorder(module, said.logs, said.said, lambda: before.names))

    def tell(self) -> None:
        """The backward of the next stage has run. Its rank tells what it changed, and the others hear of it."""
        source = self._program.at[self._next]
        here = source == self.axis.rank
        mine, before = self._mine if here else (Changed(""), self.watch.everything()[0])
        told = self._told(mine, source, before)
        if not here:  # there it is done
            self._do(told)
        self._changed[self._next] = told
        self._refuse_other_order()
        self._next -= 1

    def end(self) -> None:
        """All stages' backwards have run. All ranks must call it."""
        if self._active:
            self._first.restore()  # it is done again when Lightning calls backward
            del self._first

    def _refuse_other_order(self) -> None:
        """A hook on a value of an earlier stage runs before those of that stage and the ones between, on one device it
        may run after them."""
        changed = {stage for stage, told in self._changed.items() if told.any}
        for made, here, place in self._program.hooked_later:
            if here in changed and any(made <= stage < here for stage in changed):
                raise NotImplementedError(
                    f"{place}: a hook is put here on a value that was made on an earlier stage, and other hooks, from "
                    "that stage on, keep or log something, too: they may run in another order than on one device. "
                    "Register it right behind the line that makes the value, or use TensorParallelStrategy."
                )

    def _told(self, mine: Changed, source: int, before: Snapshot) -> Changed:
        known, told = Known(before.names, before.objects, self.inner.module), Told({0: mine})
        if source == self.axis.rank:
            told.refused += refused_gradients([mine], self.inner.module)
            leave_what_cannot_travel(told, known, self.inner.device, self.inner.made)
        told = sent(told, self.axis, self.inner.device, source, "state of hooks", known)
        if told.raised is not None:
            raise pickle.loads(told.raised)
        if told.refused:
            raise TypeError(" ".join(told.refused))
        return mine if source == self.axis.rank else told.calls[0]

    def _do(self, changed: Changed) -> None:
        changes = {**changed.shared, **changed.own}
        if changes:
            self.inner.change(self.watch.everything(parameters=True)[0], "a hook on a gradient", changes)

    # ----------------------------------------------------------------------------------------- when backward is called

    def delivered(self, loss: Tensor) -> Tensor:
        """``loss`` again, whose backward does at first what those of the stages did."""
        self._due = self._program.stages - 1 if self._changed else -1
        return called_before(loss, partial(self._do_due, 0)) if self._changed else loss

    def _do_due(self, stage: int) -> None:
        """What backward changed until it had gone through ``stage``."""
        while self._changed and self._due >= stage:
            self._do(self._changed[self._due])
            self._say(self._changed[self._due])
            self._due -= 1

    def _say(self, changed: Changed) -> None:
        """Log and say for real what a backward did; all ranks log, as on one device."""
        if changed.logs or changed.said:
            cells = self.watch.everything()[0].cells
            shown = changed.said if self.axis.rank == 0 else ()
            log_and_say(changed.logs, shown, self.watch.lightning_module, cells)

    def in_turn(
        self,
        program: Program,
        loss: Tensor,
        grads: Mapping[str, tuple[Tensor, Tensor]],
        scale: float,
        aside: Mapping[str, int],
    ) -> Tensor:
        """``loss`` again, whose backward gives the ``grads``; hooks on parameters meet what those of later stages left.

        Args:
            program: of the step.
            loss: of the whole batch.
            grads: by name each parameter with its gradient times ``scale``, in the order of backward.
            scale: by which the loss was multiplied.
            aside: the parameters whose hooks count on another rank, by name, and which.
        """
        self._program, self._aside, self._given = program, aside, {name: p for name, (p, _) in grads.items()}
        of_stages: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for name, pair in grads.items():
            # its gradient is whole once backward is through the first stage that uses it
            used = [min(stages) for path, stages in program.uses.items() if f"{name}.".startswith(f"{path}.")]
            if name not in aside:
                of_stages.setdefault(min(used, default=0), []).append(pair)
        turns: list[Turn] = [(self._begin_turns, [pair for name, pair in grads.items() if name in aside])]
        turns += [(partial(self._take_turn, stage), of_stages[stage]) for stage in sorted(of_stages, reverse=True)]
        return deliver_in_turn(loss, turns, scale)

    def _begin_turns(self) -> None:
        streams = RunState.current.streams
        key = (streams.seed, streams.step, self.axis.rank, -1)
        self._draws.enter_context(drawing_in_backward(key, "A hook on a parameter"))
        self._look()
        self._turn = self._due = self._program.stages - 1
        self._own = self._told_any = False
        at_end_of_backward(self._end_turns)

    def _take_turn(self, stage: int) -> None:
        self._end_turn()
        while self._turn > stage:
            self._spread_turn(Changed(""))
        self._do_due(stage)
        self._look()
        self._own = True

    def _look(self) -> None:
        self._before, self._own_cells = self.watch.everything(parameters=True)
        self._before.lend_iterators()
        self._said = Changed("")
        self._heard = contextlib.ExitStack()
        self._heard.enter_context(held_refused(loggers_of(self.watch.lightning_module)))
        self._heard.enter_context(self._hearing(self._said, self._before))

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Whatever ends the backward that Lightning runs inside: what hooks log is heard no more."""
        try:
            yield
        except Exception as error:
            self._heard.close()
            if self._own:  # a hook on a parameter raised it, in its rank's turn
                self._own = False
                self._tell_raised(error)
            raise
        finally:
            self._heard.close()
            self._draws.pop_all()  # of a backward that has ended in an error

    def _end_turn(self) -> None:
        self._heard.close()
        if not self._own:
            self._before.restore()
            return
        self._before.settle_iterators()
        self._own = False
        mine = Changed.since(self._before, self._own_cells)
        self._spread_turn(replace(mine, logs=self._said.logs, said=self._said.said))

    def _end_turns(self) -> None:
        self._end_turn()
        while self._turn >= 0:
            self._spread_turn(Changed(""))
        if self._told_any:
            self._take_those_aside()
        self._draws.close()

    def _take_those_aside(self) -> None:
        """A hook that keeps something went by what it kept: only where it counts that was one device's."""
        asked = [((name, what), source) for name, source in self._aside.items() for what in ("grad", "data")]
        wanted = wanted_of(asked, self.axis, "tied weights that hooks change")
        mine = {(name, "grad"): p.grad for name, p in self._given.items() if p.grad is not None}
        mine.update({(name, "data"): p.data for name, p in self._given.items()})
        kinds = kinds_at(wanted, mine, self.axis, "tied weights that hooks change")
        for key, kind in kinds.items():
            sent = send_to_all(mine.get(key), kind, wanted[key], self.axis, "tied weights that hooks change")
            if key in mine and key[0] in self._aside:
                mine[key].detach().copy_(sent)
            elif key[0] in self._aside:
                self._given[key[0]].grad = sent.to(self._given[key[0]].device)
        for name in self._aside:
            if (name, "grad") not in kinds:
                self._given[name].grad = None

    def _spread_turn(self, mine: Changed) -> None:
        self._do_due(self._turn)
        source = self._program.at[self._turn]
        told = self._told(mine, source, self._before)
        both = _places(told) & _places(self._changed.get(self._turn, Changed("")))
        if both:
            raise NotImplementedError(
                f"Hooks on parameters and hooks on modules or activations both change {sorted(both)[0]}. On several "
                "devices the ones run after the others, and what they keep would be in another order. Let each kind "
                "keep and log its own, or use TensorParallelStrategy."
            )
        if source != self.axis.rank:
            self._do(told)
        self._say(told)
        self._told_any |= bool(told.shared or told.own)
        self._turn -= 1


def _places(changed: Changed) -> set[str]:
    found = set()
    for name, change in (*changed.shared.items(), *changed.own.items()):
        if isinstance(change, MappingChange):
            found |= {f"{name}.{key}" for key in (*change.entries, *change.inplace, *change.deleted)}
        else:
            found.add(name)
    found |= {f"what {call_of(record)} gets" for record in changed.logs}
    return found | {"what is printed or given to loggers" for _ in changed.said}
