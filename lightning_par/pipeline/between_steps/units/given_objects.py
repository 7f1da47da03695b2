"""What a unit is given, alike on all ranks, and what it does to that: a cache that it fills is full on all of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.pipeline.program.shared_storage import SharedStorage
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.changes import Change
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.tensor_writes import overwrite, version_of
from lightning_par.sharded.tensor import ShardedTensor

_ATOMS = (Tensor, str, bytes, int, float, complex, type(None), type, enum.Enum, np.generic, slice, range)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass
class Done:
    """What a unit did to what it was given, as it travels.

    Attributes:
        objects: the changes of objects, by their names.
        written: the new values of tensors that it wrote into, by their names.
    """

    objects: dict[str, Change] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)


class Given:
    """The arguments of one call of a unit, and all that they hold: objects and tensors, by names that ranks share.

    Args:
        path: the unit.
        given: its arguments.

    Raises:
        TypeError: there is an object among them into which can't be seen.

    Example::

        given = Given("layers.0", (args, kwargs))
        with given.watched() as memory:  # where its weights are
            result = layer(*args, **kwargs)
        done = given.done(memory)
        ...
        given.do(done)  # elsewhere
    """

    def __init__(self, path: str, given: Any) -> None:
        self._state = Snapshot([], code=False, hooks=False)
        self._state.add("given", given)
        self.tensors = {self._state.names[id(x)]: x for x in self._state.met}
        for cell in self._state.cells.values():
            cell.versions.clear()  # `written` has them, of tensors without a version, too
        held = {name: _innermost(x) for name, x in self.tensors.items() if type(x) in (Tensor, ShardedTensor)}
        self._held = {name: x for name, x in held.items() if type(x) is Tensor}  # the parts of those that are sharded
        self._versions = {name: version_of(x) for name, x in self._held.items()}
        self._refuse_unseen(path, given)

    def _refuse_unseen(self, path: str, given: Any) -> None:
        seen = {id(cell.owner) for cell in self._state.cells.values()}
        for x in tree_leaves(map_tensors(lambda _: None, given)):
            if not (isinstance(x, (*_ATOMS, *_TORCH)) or callable(x) or id(x) in seen):
                raise TypeError(
                    f"{path!r} is called outside a step with an object of type {type(x).__name__}, into which can't be "
                    "seen. Its weights are on some ranks of the pipeline alone, and so would be what it does to the "
                    "object. Give it tensors, or what Python's containers and objects of your own hold."
                )

    def known(self, axes: Iterable[Axis], late: Callable[[], Mapping[str, Any]]) -> Known:
        """What all ranks have: it travels by its name, and of a tensor that begins with one of theirs only the rest.

        Args:
            axes: along which tensors may be sharded.
            late: gives more of this rank's own by name, if they are asked for.
        """
        found = Known(self._state.names, self._state.objects, late=late)
        for axis in axes:
            found.add(f"axis {axis.name}", axis)
        found.made_of = lambda x: _made_of(x, found)
        plain = {name: _innermost(x).detach() for name, x in self.tensors.items() if not is_elsewhere(x)}
        found.begins = {name: x for name, x in plain.items() if not x.is_meta}
        return found

    def watched(self) -> SharedStorage:
        """To be entered around the call: it sees what is written into, where tensors don't count that."""
        return SharedStorage()

    @property
    def counts(self) -> bool:
        """Whether all tensors count themselves how often they are written into."""
        return not any(x.is_inference() for x in self.tensors.values())

    def done(self, written: set[Any]) -> Done:
        """What the call has done to what was given.

        Args:
            written: the memory that it wrote into, where tensors don't count.
        """
        changed = {
            name: self._held[name].detach()
            for name, version in self._versions.items()
            if version_of(self._held[name]) != version or written and memory_reference(self._held[name]) in written
        }
        return Done(self._state.left(), changed)

    def do(self, done: Done) -> None:
        """Do here what the call has done where it ran."""
        with torch.no_grad():
            for name, value in done.written.items():
                overwrite(self._held[name], value)
        for name, change in done.objects.items():
            self._state.cells[name].apply(change)


def _made_of(x: Any, known: Known) -> tuple[Any, tuple[Any, ...]] | None:
    """A tensor that is sharded over another axis: ranks that share layers have parts alike."""
    if type(x) is ShardedTensor and known.name_of(x.axis) is not None:
        return ShardedTensor, (x.local.detach(), x.sharded_dim, x.positions, x.axis)
    return None


def _innermost(x: Tensor) -> Tensor:
    while isinstance(x, ShardedTensor):
        x = x.local
    return x
