"""What a step does with weights alone: the momentum update of a teacher, a copy of one network to another.

Weights are on several ranks, and no stage has them all. But what is made of weights alone, without gradients, and
written into weights, may as well be done before the layers run that have these, or behind them: on all ranks at once,
as what user code does with weights between two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain, takewhile
from math import inf
from typing import TYPE_CHECKING

from lightning_par.pipeline.program.batch_values import has_graph
from lightning_par.pipeline.program.program import StepEvent, is_located, makers_of
from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.python_state.nested_tensors import returned_tensors
from lightning_par.sharded.functions import HOOKS, name_of, writes_into

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


def set_updates_apart(run: Analysis) -> None:
    """Let the events of ``run`` that update weights run apart from its stages, where that changes nothing.

    They are of the kind ``"update"`` then, and of no stage. What is written is written before the stages, as long as
    nothing else has used those weights; and from the first write on of which that is not so, behind the stages, where
    nothing else uses them any more.
    """
    made = _made_of_weights(run)
    found = {*chain.from_iterable(made.values())}
    unused = _unused_views(run, found) if found else set()
    others = _Others(run, found | unused)
    given, written = _by_event(run.direct), _by_event(run.overwritten)
    touched = _touched(run, sorted(found), given)
    writes = [*takewhile(lambda one: all(others.let_ahead(i, touched[i], written[i]) for i in made[one]), made)]
    ahead = {*chain.from_iterable(made[one] for one in writes)}
    behind = {*chain.from_iterable(made[one] for one in made if one not in writes)}
    if ahead & behind or not all(others.let_behind(i, touched[i], written[i]) for i in behind):
        return
    if any(i < later and touched[i].intersection(written[later]) for i in behind for later in writes):
        return  # what is to be read before
    found |= unused
    for index in found:
        event = run.events[index]
        event.kind, event.told, event.behind = "update", tuple(given[index]), index in behind
    run.direct = [use for use in run.direct if use[1] not in found]
    run.overwritten = [use for use in run.overwritten if use[1] not in found]


def _made_of_weights(run: Analysis) -> dict[int, set[int]]:
    """The events that write into weights outside of units, in order, each with those that make what it writes, of
    weights alone; none where anything else takes a value of theirs, or a view of what they write."""
    writes = sorted({index for _, index in run.overwritten if not isinstance(run.events[index].func, str)})
    made = {index: makers_of(run.events, index) for index in writes}
    found = {*chain.from_iterable(made.values())}
    if not all(_may_be_apart(run.events[index], index in writes) for index in found) or found & run.lending:
        return {}
    read = [index for index, event in enumerate(run.events) if event.kind == "read"]
    if run.guesses.decided and any(index > read[0] for index in found if read):
        return {}  # a value of the model may decide whether they come at all
    memory = run.values.memory.written
    if any(key[0] in found or not found.isdisjoint(memory.get(key, ())) for key, i in run.uses() if i not in found):
        return {}
    return made


def _unused_views(run: Analysis, found: set[int]) -> set[int]:
    """Events beside those ``found`` which make views of weights that nothing takes, as `AveragedModel` does."""
    used, unused = {key for key, i in run.uses() if i == inf}, set[int]()
    for index, event in reversed([*enumerate(run.events)]):
        memory = [memory_reference(x) for x in returned_tensors(event.result) if is_located(x)]
        views = bool(memory) and all(one in run.values.memory.names for one in memory)
        if index in found or not views or not _may_be_apart(event, False) or any(key[0] == index for key in used):
            used.update(event.inputs)
        else:
            unused.add(index)
    return unused


def _may_be_apart(event: StepEvent, writes: bool) -> bool:
    name = name_of(event.func)
    if event.kind != "located" or isinstance(event.func, str | tuple) or name in HOOKS or name == "grad":
        return False
    if event.draws or event.drawn or event.unsized or event.writes:
        return False
    if event.itself is not None and not writes and not writes_into(getattr(event.func, "__name__", "")):
        return False
    return not event.around[0] or not any(map(has_graph, returned_tensors(event.result)))


def _by_event(uses: list[tuple[str, int]]) -> Mapping[int, list[str]]:
    """The weights that each event uses, one after another."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, index in uses:
        names[index].append(name)
    return names


def _touched(run: Analysis, found: list[int], given: Mapping[int, list[str]]) -> Mapping[int, set[str]]:
    """The weights that each event may read, by views of them, too."""
    touched: dict[int, set[str]] = {}
    for index in found:
        makers = [touched[key[0]] for key in run.events[index].inputs]
        touched[index] = {*given[index]}.union(*makers)
    return touched


class _Others:
    """The uses of weights that stay in the stages.

    Args:
        run: of the step.
        apart: the events that may be set apart.
    """

    def __init__(self, run: Analysis, apart: set[int]) -> None:
        self._run = run
        self._uses, self._writes = _places(run.direct, apart), _places(run.overwritten, apart)
        self._told, buffers = _places(run.told, set()), run.unit_buffers.by_unit()
        for path, index in run.units:
            for x in run.handed.weights.get(path, ()):
                self._uses[run.values.names.get(x, "")].append(index)
            for name in buffers.get(path, ()):
                self._uses[name].append(index)
        for name, places in self._writes.items():
            self._uses[name] += places

    def let_ahead(self, index: int, touched: set[str], written: list[str]) -> bool:
        """Whether the event ``index``, done before all others, would read and leave the same."""
        read = all(place > index for name in touched for place in self._writes.get(name, ()))
        told = [place for name in written for place in self._told.get(name, ())]
        return read and all(place > index for place in (*told, *self._used(written)))

    def let_behind(self, index: int, touched: set[str], written: list[str]) -> bool:
        """Whether it would, done behind all others, whose backward would read what is written."""
        read = all(place < index for name in touched for place in self._writes.get(name, ()))
        told = all(place <= index for name in written for place in self._told.get(name, ()))
        used = self._used(written)
        return read and told and all(place < index and not self._run.events[place].around[0] for place in used)

    def _used(self, names: list[str]) -> list[int]:
        return [place for name in names for place in self._uses.get(name, ())]


def _places(uses: Iterable[tuple[str, int]], without: set[int]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = defaultdict(list)
    for name, index in uses:
        if index not in without:
            places[name].append(index)
    return places
