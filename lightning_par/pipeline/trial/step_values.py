"""The tensors of a recorded step: parameters, values of the model, and what comes of the batch alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.program import Key, StepEvent, is_located
from lightning_par.pipeline.program.shared_storage import SharedStorage
from lightning_par.pipeline.trial.numbers_written import Memory
from lightning_par.pipeline.trial.picked_views import Picked
from lightning_par.pipeline.trial.side_inputs import UnitError, maker_of
from lightning_par.private.graph import made_by, node_of
from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import returned_tensors, tensors_in
from lightning_par.python_state.tensor_classes import class_of
from lightning_par.sharded.functions import writes_into
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.trial.large_values import is_large

_WRITES_INTO_VIEWS = (
    "writes a value that depends on the model into a tensor that did not, and of which there are other views that are "
    "used. A pipeline can't follow that: build the tensor from its parts, e.g. with torch.stack or torch.cat."
)


_WRITES_INTO_CLASS = (
    "writes a value that depends on the model into a {}, which stages of a pipeline hand on as a plain tensor. Write "
    "into `x.as_subclass(torch.Tensor)`, or use TensorParallelStrategy."
)

_WRITES_UNSEEN = (
    "writes a value that depends on the model into a tensor of the module that was used before, through `.data` or "
    "`.detach()`: backward then reads the new value. The stage of a pipeline that used it does not have that. Write "
    "behind the backward, as in on_train_batch_end, use `x.clone()` before, or use TensorParallelStrategy."
)


class StepValues:
    """What is known of each tensor that the step's own code meets, by its id.

    Args:
        batch: its tensors are the first that depend on the batch alone.
        homes: the units that are called as a whole; none where some are looked for.

    Attributes:
        names: of fake parameters.
        keys: of values of the model.
        batch_keys: of what depends on the batch alone.
        nodes: of the graph, before anything is written into the value.
        views: ids of tensors of the module, or of views of them.
        memory: which values share some, and who writes into it.
        picked: views, at places that values of the model tell, of what depends on the batch alone.
        kept: ids stay valid as long as the objects live.
        fresh: ids of tensors that functions of the batch alone made.
        stale: ids of tensors that share memory with one that a value of the model was written into since, and where:
            what they hold is there where that value is.
        torn: views of tensors of the module that a value of the model was written into, and where: of the whole there
            is no such value.
        took: tensors of the module that values of the model were made of, with their nodes of the graph.
        unseen: of those that were written into since such that autograd can't see it, with the place.
        memory_of_batch: of events of the batch alone.
        started: whether hooks of the start ran on the copy.
    """

    def __init__(self, batch: Any, homes: Collection[str]) -> None:
        self.names: dict[int, str] = {}
        self.keys: dict[int, Key] = {}
        self.batch_keys: dict[int, Key] = {id(x): (-1, n) for n, x in enumerate(tensors_in(batch))}
        self.nodes: dict[Key, Any] = {}
        self.views: set[int] = set()
        self.memory = SharedStorage()
        self.picked = Picked()
        self.kept: list[Any] = [batch]
        self.fresh: set[int] = set()
        self.stale: dict[int, str] = {}
        self.torn: list[tuple[Tensor, str]] = []
        self.took: list[tuple[Tensor, Any]] = []
        self.unseen: list[tuple[Any, str]] = []
        self.memory_of_batch: dict[int, Memory] = {}
        self.started = False
        self._homes = homes

    def is_parameter(self, x: Tensor) -> bool:
        return id(x) in self.names

    def is_of_batch(self, x: Tensor) -> bool:
        return id(x) in self.batch_keys

    def is_state(self, x: Tensor) -> bool:
        """Whether the module held it before the step, or it is a view of such a tensor; of what no model is in."""
        return id(x) not in self.batch_keys or id(x) in self.views

    def made(self, event: int, inputs: Any, result: Any) -> None:
        """``event`` took ``inputs`` and returned ``result``."""
        for n, x in enumerate(returned_tensors(result)):
            if not is_located(x):
                self.batch_keys[id(x)] = (event, n)
            elif id(x) not in self.names:
                self.keys[id(x)] = (event, n)
                self.nodes[event, n] = made_by(x)
                self.memory.made((event, n), x)
                self.took += [(y, made_by(x)) for y in inputs if not is_located(y) and self.is_state(y)]
        self.kept.append((inputs, result))

    def made_of_batch(self, event: int, given: Any, result: Any) -> None:
        """``event`` saw the batch alone, was ``given`` that, and returned ``result``."""
        self.fresh.update({id(x) for x in tensors_in(result)} - {id(x) for x in tensors_in(given)})
        self.batch_keys.update((id(x), (event, n)) for n, x in enumerate(tensors_in(result)))
        self.kept.append(result)

    def keys_of(self, tensors: Iterable[Tensor]) -> tuple[Key, ...]:
        """Of the values of the model among ``tensors``.

        Raises:
            UnitError: there is one of which nobody knows where it comes from.
        """
        found = []
        for x in tensors:
            if id(x) in self.keys:
                found.append(self.keys[id(x)])
            elif self._homes and is_located(x) and id(x) not in self.names:
                why = f"{user_line()}: {self._why_unknown(x)} Or use TensorParallelStrategy."
                error = UnitError(why, maker_of(x), value=x)
                error.by_units = not self.started or error.unit is not None
                raise error
        return tuple(found)

    def _why_unknown(self, x: Tensor) -> str:
        if self.started and maker_of(x) is None:
            return (
                "the step uses a tensor that a hook, such as on_fit_start, made of the model's weights. Other stages "
                "of the pipeline don't have it. Make it in `setup`, when each rank has all weights."
            )
        return (
            "the step uses a value from within a module that the module did not return: a forward hook or an attribute "
            "handed it out. Other stages of the pipeline can't see that. Return it from the module's forward."
        )

    def is_of_weights(self, x: Tensor, events: Sequence[StepEvent]) -> bool:
        """Whether ``x`` is made of the module's tensors alone."""
        if id(x) in self.names:
            return True
        if id(x) not in self.keys:
            return False
        todo, seen = [self.keys[id(x)]], {self.keys[id(x)]}
        while todo:
            event = events[todo.pop()[0]]
            if event.kind == "batch" or event.given:
                return False
            todo += seen.symmetric_difference(seen | {*event.inputs})
            seen.update(event.inputs)
        return True

    def write_target(self, name: str, args: Any, behind: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The tensor of the batch alone that the function ``name`` writes a located value into, where it does so.

        Args:
            name: of the function.
            args: what it is given.
            behind: the tensor that one is another object for.

        Raises:
            NoScheduleError: a tensor that the step was given, or that the module holds, shares memory with it.
        """
        target = args[0] if args else None
        if not writes_into(name) or not isinstance(target, Tensor):
            return None
        kind = class_of(target)
        if kind is not None:
            raise NoScheduleError(f"{user_line()}: `{name}` {_WRITES_INTO_CLASS.format(kind.__name__)}")
        if is_located(target):
            self.picked.about_to_write(name, target, self.keys.get(id(target)))
            return None
        place, base = f"{user_line()}: `{name}`", behind(target)
        self.picked.written(lambda x: _share(x, target), args[1:], place)
        for x in [x for kept in self.kept for x in tensors_in(kept)]:
            if behind(x) is not base and not is_located(x) and _share(x, target):
                if id(x) not in self.fresh:
                    raise NoScheduleError(f"{place} {_WRITES_INTO_VIEWS}")
                self.stale[id(x)] = place
        if base is not target:
            self.unseen += [(node, place) for x, node in self.took if node is not None and behind(x) is base]
        if id(base) in self.batch_keys and self.is_state(base):
            self.torn.append((target, place))
        return target

    def check_current(self, tensors: Iterable[Tensor]) -> None:
        """Raises NoScheduleError where one of the ``tensors`` is a view of what was written into since."""
        tensors = [*tensors]
        place = next((self.stale[id(x)] for x in tensors if id(x) in self.stale), None)
        place = place or self.picked.stale_among(tensors)
        if place is not None:
            raise NoScheduleError(f"{place} {_WRITES_INTO_VIEWS}")

    def check_whole(self, tensors: Iterable[Tensor]) -> None:
        """Raises NoScheduleError where one of the ``tensors`` is in part what a value of the model was written
        into."""
        for view, place in self.torn:
            if any(x is not view and not is_located(x) and _share(x, view) for x in tensors):
                raise NoScheduleError(f"{place} {_WRITES_INTO_VIEWS}")

    def check_unseen(self, loss: Any) -> None:
        """Raises NoScheduleError where the backward of ``loss`` would read what was written into since."""
        unseen = dict(self.unseen)
        waiting, met = [node_of(loss)] if unseen and isinstance(loss, Tensor) else [], set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in met:
                continue
            if node in unseen:
                raise NoScheduleError(f"{unseen[node]} {_WRITES_UNSEEN}")
            met.add(node)
            waiting += [other for other, _ in node.next_functions]


_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def _share(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the batch alone share memory; what is fake has no address. What is sparse is taken to,
    with what may be its values or indices: such a step runs layer by layer, which is right either way."""
    sparse = [y.dtype for y in (x, other) if y.layout in _SPARSE]
    if sparse:
        dense = [y.dtype for y in (x, other) if y.layout not in _SPARSE]
        return not dense or dense[0] in (sparse[0], torch.int64, torch.int32)
    if is_large(x) or is_large(other):
        return memory_of(x) == memory_of(other)
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
