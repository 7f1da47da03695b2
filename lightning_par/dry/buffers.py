"""What small buffers of a pipeline's other stages hold, which a dry run has no other rank to ask for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.mesh.broadcast import SMALL
from lightning_par.private.modules import buffers_of
from lightning_par.private.tensors import write_count
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.trial.first_step import FirstStep


def untouched_buffers(first: FirstStep) -> dict[str, Tensor]:
    """Copies of the small buffers with which no function of the step has to do, by name: as counts of updates that user
    code makes between steps.

    Args:
        first: of a module that is whole.
    """
    small = {name: b for name, b in first.module.named_buffers() if b.numel() <= SMALL}
    if not small:
        return {}
    untouched = first.recorded(listeners=_Untouched).heard or ()
    return {name: _values(b) for name, b in small.items() if name in untouched}


def _values(x: Tensor) -> Tensor:
    return (x.value() if isinstance(x, Deferred) else x.detach()).clone()


class _Untouched:
    """A `lightning_par.trial.listener.Listener` that makes the names of the buffers that the step leaves alone."""

    def begin(self, copy: nn.Module) -> None:
        self._copy, self._buffers = copy, dict(copy.named_buffers())
        self._versions = {name: write_count(b) for name, b in self._buffers.items()}
        self._touched: set[int] = set()

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, of_model: bool, unsized: bool = False) -> None:
        self.note_within(args, kwargs, result, of_model)

    def note_within(self, args: Any, kwargs: Any, result: Any, of_model: bool) -> None:
        self._touched.update(map(id, tensors_in((args, kwargs))))

    def end(self) -> frozenset[str]:
        return frozenset(name for name, b in self._buffers.items() if self._is_as_it_was(name, b))

    def _is_as_it_was(self, name: str, b: Tensor) -> bool:
        path, _, own = name.rpartition(".")
        is_there = buffers_of(self._copy.get_submodule(path)).get(own) is b
        return is_there and id(b) not in self._touched and write_count(b) == self._versions[name]
