"""What depends on the batch alone, in all the runs of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.pipeline.program.event_draws import Drawn, OfBatch, States, draw_again, standing
from lightning_par.pipeline.program.program import Key
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.tensor_classes import class_of
from lightning_par.python_state.tensor_writes import note_write
from lightning_par.sharded.functions import writes_into


class BatchValues:
    """What depends on the batch alone: computed once a step, the same objects in every run of it.

    But a function that writes into a tensor of the module's, or returns a view of one, runs in every run of the step:
    each has copies of the module's tensors. Lists and arrays, which a run may change, are handed out as they were.
    """

    def __init__(self, batch: Any) -> None:
        self.results: dict[int, Any] = {}
        self.keys: dict[int, Key] = {id(x): (-1, n) for n, x in enumerate(tensors_in(batch))}
        self.classes = any(map(class_of, tensors_in(batch)))
        """Whether tensors of the batch are of classes that are none of torch's."""
        self.anew: dict[int, list[tuple[torch.Generator, Tensor]]] = {}
        """Events that run every time, and the generators that they draw from, as they stood before."""
        self.standing: tuple[Any, Any] | None = None
        """Where numpy's and Python's global generators stand all through the step, None where it draws from them."""
        self.stood: dict[int, tuple[States, States]] = {}
        """Where torch's generators stand before and after an event that draws, as on one device, where ranks know."""
        self.regions: dict[int, States] = {}
        """Where they stand as a region begins that backward is to run again."""
        self.own_generators: dict[tuple[int, int], Tensor] = {}
        """Where generators of the user's stood that events of the model draw from, by event and draw."""
        self.of_functions: dict[tuple[int, int], OfBatch] = {}
        """What functions within units drew for the batch, by event and draw."""
        self._drawn: dict[int, list[tuple[torch.Generator, Tensor]]] = {}  # by other events: generators, after them
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}  # what was in an array when it was made
        self._views: dict[int, Any] = {}  # of the module's tensors, by id
        self._bases: dict[int, list[Tensor]] = {}  # what they are views of
        self._copies: dict[int, Tensor] = {}
        self._plain: dict[Key, Tensor] = {}  # results without their graphs
        self._pristine: dict[int, Any] = {}  # results as they were made, of which each run has a copy
        self._lent: list[Any] = []  # these copies: ids stay valid as long as the objects live

    def draw(self, event: int, drawn: Sequence[Drawn]) -> None:
        """The generators move on as by an event of the model, which is not run."""
        before = standing()
        draw_again(drawn)
        self.stood[event] = before, standing()

    def compute(self, event: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The first run's result."""
        may_write = writes_into(getattr(func, "__name__", "")) or "out" in kwargs
        before = generators.states_of(_drawn_from(args, kwargs, may_write))
        result = func(*args, **kwargs)
        if not touches_state(func, args, kwargs, result, self.is_state):
            own = [generator for generator, _ in before if _is_given(generator, kwargs)]
            if own:
                self._drawn[event] = generators.states_of(own)
            return self.keep(event, result)
        self.anew[event] = before
        return self._state(event, func, (args, kwargs), result)

    def again(self, event: int, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an event in a later run."""
        if event not in self.anew:
            if event not in self.results:
                return self.keep(event, func(*args, **kwargs))
            generators.set_states(self._drawn.get(event, ()))
            if any(map(has_graph, tensors_in(self.results[event]))):  # which the backward of one run lets go
                self._lent.append(self.results[event])  # ids stay valid as long as the objects live
                return self.keep(event, func(*args, **kwargs))
            return self._as_made(event)
        before = self.anew[event]
        now = generators.states_of(generator for generator, _ in before)
        generators.set_states(before)
        try:
            return self._state(event, func, (args, kwargs), func(*args, **kwargs))
        finally:  # a generator that the step was given has drawn; a global one goes on as it would have
            generators.set_states((generator, state) for generator, state in now if not _is_given(generator, kwargs))

    def anew_for(self, event: int, func: Any, args: Any, kwargs: Any) -> Any:
        """As `compute` and `again`, where something is written into the result that only one run knows."""
        if event not in self._pristine:
            made = self.again(event, func, args, kwargs)
            self._pristine[event] = map_tensors(lambda x: x.detach().clone(), made)
            return made
        if event in self._drawn:
            generators.set_states(self._drawn[event])
        copy = map_tensors(torch.clone, self._pristine[event])
        self._lent.append(copy)
        self.keys.update((id(x), (event, n)) for n, x in enumerate(tensors_in(copy)))
        return copy

    def _state(self, event: int, func: Any, given: Any, result: Any) -> Any:
        """A function wrote into a tensor of the module's, or made a view of one."""
        own = [x for x in tensors_in(given) if self.is_state(x)]
        written = [x for x in written_by(getattr(func, "__name__", ""), *given) if self.is_state(x)]
        for x in written:
            self.note_write(x)
        for n, x in enumerate(tensors_in(result)):
            self._views[id(x)] = x
            self.keys[id(x)] = (event, n)
            if not written:
                self._bases[id(x)] = [base for y in own for base in (y, *self._bases.get(id(y), ()))]
        return result

    def note_write(self, x: Tensor) -> None:
        """Something writes into a tensor of the module's, or a view of one; through `.data` no version counts it."""
        for base in (x, *self._bases.get(id(x), ())):
            note_write(base)

    def copied(self, x: Tensor) -> Tensor | None:
        """The one copy of a tensor of the batch alone, None of others."""
        return None if self.is_state(x) else self._copies.setdefault(id(x), x.detach().clone())

    def plain(self, x: Tensor) -> Tensor:
        """The one tensor of the values of ``x``, which each run may have made anew with a graph of its own."""
        return self._plain.setdefault(self.keys[id(x)], x.detach())

    def is_state(self, x: Tensor) -> bool:
        """Whether the module held it before the step, or it is a view of such a tensor."""
        return id(x) not in self.keys or id(x) in self._views

    def keep(self, event: int, result: Any) -> Any:
        self.results[event] = result
        self.keys.update((id(x), (event, n)) for n, x in enumerate(tensors_in(result)))
        if isinstance(result, np.ndarray):
            self._arrays[event] = result.copy()
        return _own(result)

    def _as_made(self, event: int) -> Any:
        result = self.results[event]
        if event in self._arrays and result.tobytes() != self._arrays[event].tobytes():
            result[...] = self._arrays[event]
        return _own(result)


def has_graph(x: Tensor) -> bool:
    """Whether a backward goes on behind ``x``."""
    return x.requires_grad and not x.is_leaf


def _own(value: Any) -> Any:
    """Lists of numbers, such as `tolist` makes, are the run's own."""
    return [_own(x) for x in value] if type(value) is list else value


def _drawn_from(args: Any, kwargs: Any, may_write: bool) -> list[torch.Generator]:
    """The generators from which a function may draw into a tensor that it is given, or that it is given."""
    given = [x for x in kwargs.values() if isinstance(x, torch.Generator)]
    if given or not may_write:
        return given
    devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    return [generator for device in devices if (generator := generators.default(device)) is not None]


def _is_given(generator: torch.Generator, kwargs: Any) -> bool:
    return any(x is generator for x in kwargs.values())


def touches_state(func: Any, args: Any, kwargs: Any, result: Any, is_state: Callable[[Tensor], bool]) -> bool:
    """Whether a function of the batch alone writes into a tensor of the module's, or returns it or a view of it."""
    own = [x for x in tensors_in((args, kwargs)) if is_state(x)]
    if not own:
        return False
    if any(map(is_state, written_by(getattr(func, "__name__", ""), args, kwargs))):
        return True
    storages = {x.untyped_storage().data_ptr() for x in own} - {0}
    return any(x.untyped_storage().data_ptr() in storages for x in tensors_in(result))


def written_by(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """What a call of the function ``name`` writes into: its first argument, what it is told by ``out``, or the running
    statistics of a norm."""
    into = [next(iter((*args, *kwargs.values())), None)] if writes_into(name) else []
    return tensors_in((into, kwargs.get("out"), _statistics(name, args, kwargs) if name in _TRAINS else ()))


_TRAINS = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
"""By which argument, the sixth, norms write into what follows the input, and what it is where none is given."""


def _statistics(name: str, args: Any, kwargs: Any) -> list[Any]:
    flag, default = _TRAINS[name]
    if not (args[5] if len(args) > 5 else kwargs.get(flag, default)):
        return []
    places = args[3:5] if len(args) == 9 else args[1:3]  # those of `torch`, and those of `torch.nn.functional`
    return [*places, kwargs.get("running_mean"), kwargs.get("running_var")]
