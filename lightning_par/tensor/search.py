"""Which parameters can be split, read from what the step did with them.

The events of a recording are walked in order. A product of a replicated activation with a parameter opens an island:
the parameter's outer dim is split. From there every function that meets a sharded value runs by its own rule, on
labels (`lightning_par.tensor.symbolic_ranks`). A product that sums over the sharded dim closes the island, and splits
its parameter along that dim. Where a function has no rule the walk goes back to the last choice that led there: another
reading of a view, at last leaving the parameter whole. Names play no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.mesh.positions import Array
from lightning_par.python_state import generators
from lightning_par.sharded.functions import STATISTICS
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.tensor.backtracking import Backtracking, Choice
from lightning_par.tensor.bottleneck import giving_way
from lightning_par.tensor.propagate import Found
from lightning_par.tensor.symbolic_ranks import NeedsGather, count_units
from lightning_par.trial.recording import Event

MIN_ROWS_A_RANK = 8  # an embedding with fewer rows a rank costs an all-reduce and saves next to nothing


@dataclass
class Search(Backtracking):
    """The walk, forward; back it goes as `Backtracking` says.

    Attributes:
        ranks: over how many ranks.
        norms: whether an island may hold a statistic of its features, as a norm written by hand takes, which costs it
            an all-reduce forward and one backward.
        stopped_at_norm: whether one was met where none may be.
    """

    ranks: int = 2
    norms: bool = True
    stopped_at_norm: bool = False

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(x.numel() for x in self.parameters.values())

    def run(self) -> Array:
        """Walk until every island closes; returns the units of the labels.

        Each pass that finds a parameter with fewer than two units leaves it whole and walks again.
        """
        streams = RunState.current.streams
        with generators.kept(), streams.kept(), torch.no_grad():
            streams.in_step = True  # the rules run as in a step
            return self._search()

    def _search(self) -> Array:
        start = 0
        while True:
            self._walk(start)
            units = self.book.units()
            stuck = [key for key, f in self.found.items() if count_units(units, f.labels.owner) < 2]
            if not stuck:
                return units
            start = min(self.found[key].event for key in stuck)
            self._rewind(start)
            for key in stuck:
                self.whole[key] = "its features must stay together in one group"

    def _walk(self, start: int) -> None:
        position, option = start, None
        while position < len(self.recording.events):
            event = self.recording.events[position]
            try:
                self._visit(position, event, option)
                option = None
                position = self._next(position, event)
            except NeedsGather as stop:
                position, option = self._back(position, event, stop)

    def _next(self, position: int, event: Event) -> int:
        """The event after this one, or where an island opened that is better not there."""
        weights = giving_way(self, position, event)
        if not weights or weights & self.styles.keys():
            return position + 1
        start = min(self.found[key].event for key in weights)
        self._rewind(start)
        self.whole.update(dict.fromkeys(weights, f"a small layer beside what it is added to at {event.place}"))
        return start

    def _visit(self, position: int, event: Event, option: int | None) -> None:
        self._taint(position, event)
        self.axis.cuts.clear()
        sharded = any(self._is_split(x) for x in event.inputs)
        operand = self._parameter_operand(event)
        self.book.options, self.book.option = 1, 0
        self.marks[position] = len(self.book.constraints)
        if operand is not None:
            self.first_use.setdefault(operand, position)
        if operand is not None and not sharded and (site := self._site(position, operand)) in self.hopeless:
            self.whole.setdefault(operand, self.hopeless[site])
        if operand is not None and operand not in self.found and operand not in self.whole:
            options = self._openings(event, operand, sharded)
            chosen = 0 if option is None else option
            if option is None and len(options) > 1:
                self.choices.append(Choice(position, 0, len(options), len(options) - 1))
            self._open(position, event, operand, options, chosen, sharded)
        elif sharded:
            reading = self.known.get((event.name, event.place), 0)
            self.book.option = reading if option is None else option
            result = self._split_cut(position, event, self._replay(position, event, None), self.styles)
            if not self.norms and event.name in STATISTICS and not isinstance(result, ShardedTensor):
                if event.outputs and event.outputs[0].ndim:
                    self.stopped_at_norm = True
                    raise NeedsGather(event.func)
            if self.book.options > 1 and option is None:
                self.choices.append(Choice(position, self.book.option, self.book.options, self.book.options - 1))
            self._store(position, event, result)
        else:
            self._note_reshape(position, event)

    def _openings(self, event: Event, parameter: int, sharded: bool) -> list[int | None]:
        """The dims to split a parameter along, in the order to try them; None leaves it whole."""
        fake = self.parameters[parameter]
        style = self.styles.get(parameter)
        dims: list[int | None] = [d for d in range(fake.ndim) if fake.shape[d] > 1]
        if style == "replicate":
            return [None]
        if event.name == "embedding" and style is None:
            ids = event.args[0] if isinstance(event.args[0], Tensor) else event.inputs[0]
            worth = id(ids) in self.tainted and fake.shape[0] >= MIN_ROWS_A_RANK * self.ranks
            return [0] if worth else [None]
        return dims if style else [*dims, None]

    def _open(
        self, position: int, event: Event, parameter: int, options: list[int | None], chosen: int, sharded: bool
    ) -> None:
        """Split ``parameter`` along the first of ``options`` that will do, from ``chosen`` on; None leaves it whole.

        Raises:
            NeedsGather: none does, and the event is in an island.
        """
        for dim in options[chosen:]:
            if dim is not None:
                if self._split(position, event, parameter, dim, sharded):
                    return
            elif sharded:
                self._store(position, event, self._replay(position, event, None))
                return
            elif self._gather_at_first_stop(position):
                self._open(position, event, parameter, options, 0, sharded)
                return
            else:
                self._leave_whole(position, event, parameter)
                return
        if sharded:
            raise NeedsGather(event.func)
        self.whole.setdefault(parameter, f"no dim of it can be split in `{event.name}` at {event.place}")

    def _split(self, position: int, event: Event, parameter: int, dim: int, sharded: bool) -> bool:
        """Whether ``parameter`` is split along ``dim``: the event runs by its rule, and the split is one to take."""
        mark, depth = len(self.book.constraints), len(self.undo)
        found = Found(dim, self.book.fresh(self.parameters[parameter].shape[dim]), position, "")
        self.found[parameter] = found
        try:
            result = self._replay(position, event, parameter)
        except NeedsGather:
            result = NotImplemented
        found.style = "colwise" if isinstance(result, ShardedTensor) else "rowwise"
        if result is not NotImplemented and self._welcome(event, parameter, found.style, sharded):
            self.undo.append((position, ("found", parameter)))
            self._store(position, event, result)
            return True
        del self.found[parameter]
        del self.book.constraints[mark:]
        while len(self.undo) > depth:  # the bias went with it
            del self.found[self.undo.pop()[1][1]]
        return False

    def _leave_whole(self, position: int, event: Event, parameter: int) -> None:
        if self.styles.get(parameter) == "replicate":
            self.whole[parameter] = "as the plan says"
        elif event.name == "embedding":
            self.whole[parameter] = "a small or constant look-up"
        elif position in self.reasons:
            self.whole[parameter] = self.reasons[position]
        self._note_reshape(position, event)

    def _welcome(self, event: Event, parameter: int, style: str, sharded: bool) -> bool:
        """Whether a legal split is one to take: the user's style, an opening, or the end of an open island."""
        if event.name == "embedding":
            wanted = self.styles.get(parameter, "rowwise")
        else:
            wanted = self.styles.get(parameter, "rowwise" if sharded or parameter in self.turned else "colwise")
            if sharded and parameter not in self.styles and style == "colwise":
                return True  # split along a dim that the island keeps
        return style == wanted
