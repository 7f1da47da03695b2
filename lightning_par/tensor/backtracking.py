"""Where the search for splits goes on after a function that can't run in an island.

To the last choice that led there, which is decided otherwise; where none is left, to the island's opening, which stays
whole; or on, where the user wants the split or a gather is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_par.sharded.functions import MATRIX_PRODUCTS
from lightning_par.tensor.propagate import Propagation
from lightning_par.tensor.symbolic_ranks import NeedsGather
from lightning_par.trial.recording import Event

WORTH_A_GATHER = 2**16  # elements of weights; for less, an island that needs a gather is left whole
GATHERS_PAY = 8  # an island may gather what is this many times smaller than its weights
TRIES = 32  # readings tried for one island before it is left whole


@dataclass(frozen=True)
class Choice:
    """A place where the walk could have gone on otherwise."""

    event: int
    option: int
    options: int
    left: int  # how many of them have not been tried


@dataclass
class Backtracking(Propagation):
    """The choices of a walk over a recording's events, and the way back to them.

    Attributes:
        styles: the user's, by identity of the parameters' fakes.
        gathered: functions that gather in an island that is kept, by event.
    """

    styles: dict[int, str] = field(default_factory=dict)
    gathered: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choices: list[Choice] = []
        self.torn: dict[int, dict[int, str]] = {}  # attention that the user's plan would tear, by event
        self.first_use: dict[int, int] = {}  # the first product that a parameter is in
        self.turned: set[int] = set()  # parameters whose first product does not tell how they are split
        self.tries: dict[int, int] = {}
        self.first_stop: dict[int, int] = {}  # where an island stopped first, if a gather there would be cheap
        self.cheap: set[int] = set()  # events that gather
        self.reasons: dict[int, str] = {}  # why the island opened at an event could not be kept
        self.known: dict[tuple[str, str], int] = {}  # the reading that did, by call site
        self.hopeless: dict[tuple[str, str, tuple[int, ...]], str] = {}  # openings that cost many tries in vain
        self.settled = set(self.whole)  # parameters that are not thought of again

    def _back(self, position: int, event: Event, stop: NeedsGather) -> tuple[int, int | None]:
        """Where to go on after a function that can't run in the island: the last choice, or its opening."""
        if (turned := self._turned_at(position, event)) is not None:
            return turned, None
        culprits = frozenset().union(*(self.sources_of(x) for x in event.inputs))
        kept = {self.found[key].event for key in culprits if key in self.styles}  # with their biases
        free = [key for key in culprits if self.found[key].event not in kept]
        if not free or position in self.cheap:
            if culprits:
                self._gather(position, event, stop)
            return position + 1, None
        start = min(self.found[key].event for key in free)
        if start not in self.tries and self._is_cheap(event, culprits):
            self.first_stop[start] = position
        self.tries[start] = self.tries.get(start, 0) + 1
        reason = self.reasons[start] = f"`{stop.name}` at {event.place} needs the whole tensor"
        while self.choices and self.choices[-1].event >= start:
            last = self.choices.pop()
            if last.left and self.tries[start] <= TRIES and (last.event > start or last.left > 1):
                option = (last.option + 1) % last.options
                self._rewind(last.event)
                if self._parameter_operand(self.recording.events[last.event]) is not None:
                    self._reconsider(last.event, position)
                self.choices.append(Choice(last.event, option, last.options, last.left - 1))
                where = self.recording.events[last.event]
                self.known[where.name, where.place] = option  # the next layer that comes by this line begins with it
                return last.event, option
        first = [key for key in free if self.found[key].event == start]
        self._rewind(start)
        if self._gather_at_first_stop(start):
            return start, None
        self._reconsider(start, position)
        for key in first:
            self.whole[key] = reason
            if self.tries[start] > 4:
                self.hopeless[self._site(start, key)] = reason  # other layers at this line need not try
        return start, None

    def _reconsider(self, start: int, end: int) -> None:
        """What was left whole while an island was open that is given up now may be split without it. Only once each,
        so that islands within islands that never close don't multiply."""
        for key in [key for key in self.whole if start < self.first_use.get(key, -1) <= end]:
            if key not in self.settled:
                del self.whole[key]
                self.settled.add(key)
                self.hopeless.pop(self._site(self.first_use[key], key), None)

    def _turned_at(self, position: int, event: Event) -> int | None:
        """Where a weight was met with a whole tensor that is now applied to a split one: that tells its dim."""
        operand = self._parameter_operand(event)
        first = position if operand is None else self.first_use.get(operand, position)
        if operand is None or first >= position or operand in self.turned or operand in self.styles:
            return None
        split = [x for x in event.inputs if id(x) in self.values]
        if not split or any(operand in self.sources_of(x) for x in split):
            return None
        if not {event.name, self.recording.events[first].name} <= MATRIX_PRODUCTS:
            return None
        self.turned.add(operand)
        self.whole.pop(operand, None)
        self._rewind(first)
        return first

    def _gather_at_first_stop(self, start: int) -> bool:
        """Where no reading of an island does, one that gathers little may."""
        if start not in self.first_stop:
            return False
        self.cheap.add(self.first_stop.pop(start))
        del self.tries[start]
        return True

    def _is_cheap(self, event: Event, culprits: frozenset[int]) -> bool:
        """Whether a gather moves next to nothing beside the weights that are split for it."""
        moved = sum(x.numel() for x in event.inputs if id(x) in self.values)
        saved = sum(self.parameters[key].numel() for key in culprits)
        return saved >= WORTH_A_GATHER and moved * GATHERS_PAY <= saved

    def _site(self, position: int, parameter: int) -> tuple[str, str, tuple[int, ...]]:
        event = self.recording.events[position]
        return event.name, event.place, tuple(self.parameters[parameter].shape)

    def _gather(self, position: int, event: Event, stop: NeedsGather) -> None:
        """The island is kept: the function gathers, and its results are plain."""
        self.gathered[position] = f"`{stop.name}` at {event.place}"
        if event.name == "scaled_dot_product_attention":
            heads = tuple(event.inputs[0].shape)[-3:]
            reason = (
                f"its {heads[0]} head{'s' * (heads[0] != 1)} of {heads[-1]} features can't be split in {event.place}"
            )
            culprits = frozenset().union(*(self.sources_of(x) for x in event.inputs))
            self.torn[position] = dict.fromkeys(culprits, reason)
        for out in event.outputs:
            self.undo.append((position, ("value", id(out), self.values.get(id(out)), self.sources.get(id(out)))))
            self.values.pop(id(out), None)

    def _rewind(self, position: int) -> None:
        super()._rewind(position)
        self.choices = [choice for choice in self.choices if choice.event < position]
        self.gathered = {event: where for event, where in self.gathered.items() if event < position}
        self.torn = {event: reasons for event, reasons in self.torn.items() if event < position}
