"""Compute deferred tensors: by their recipe where they are but parts of files, else by what they depend on, in the
order in which it was written down."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.deferred.cuts import recipe_of
from lightning_par.absent.deferred.history import Allocation, Constant, History, Op, Ref
from lightning_par.absent.deferred.recipe import made
from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.region import Region
from lightning_par.private.modes import no_modes
from lightning_par.private.pytree import tree_leaves, tree_map


def values(refs: Sequence[Ref]) -> list[Tensor]:
    """The tensors that ``refs`` stand for, in memory of their own; those that shared memory share it.

    No mode sees what runs, no generator moves, and what is computed on the way is given up once nothing needs it.

    Args:
        refs: as their histories stand now.
    """
    if len(refs) == 1 and refs[0].geometry.dense:
        with torch.no_grad(), no_modes():
            recipe = recipe_of(refs[0])
            if recipe is not None:
                return [made(recipe, refs[0].geometry).to(refs[0].history.allocation.device)]
    return _replayed(refs)


def regions_of(refs: Iterable[Ref]) -> list[Region]:
    """The regions of mapped files on which the values of ``refs`` depend."""
    refs = [*refs]
    memories = [ref.history.allocation for ref in (*refs, *(ref for op in _needed(refs) for ref in op.refs))]
    return [*dict.fromkeys(memory.region for memory in memories if memory.region is not None)]


def _replayed(refs: Sequence[Ref]) -> list[Tensor]:
    ops = _needed(refs)
    last = _last_uses(ops)
    kept = {ref.history.allocation for ref in refs}
    memory = _Memory(kept | {ref.history.allocation for op in ops for ref in op.written})
    before = torch.get_default_dtype()
    with torch.no_grad(), no_modes():
        try:
            for place, op in enumerate(ops):
                if op.dtype != torch.get_default_dtype():
                    torch.set_default_dtype(op.dtype)  # factories went by the default of then
                memory.run(op)
                memory.forget(x for x in last.get(place, ()) if x not in kept)
        finally:
            torch.set_default_dtype(before)
        return [memory.tensor(ref) for ref in refs]


def _needed(refs: Iterable[Ref]) -> list[Op]:
    """All that has to run for ``refs``, in order."""
    found: dict[int, Op] = {}
    reached: set[History] = set()
    waiting = list(refs)
    while waiting:
        history: History | None = waiting.pop().history
        while history is not None and history not in reached:
            reached.add(history)
            op = history.op if history.origin is None or history.op is not None else history.origin[0]
            if op is not None and op.serial not in found:
                found[op.serial] = op
                waiting.extend(op.refs)
            history = history.before
    return [found[serial] for serial in sorted(found)]  # in the order in which they ran


def _last_uses(ops: list[Op]) -> dict[int, list[Allocation]]:
    """By place in ``ops``: the memory that nothing later reads."""
    last: dict[Allocation, int] = {}
    for place, op in enumerate(ops):
        for memory in (*(ref.history.allocation for ref in op.refs), *(memory for _, memory, _ in op.made)):
            last[memory] = place
    found: dict[int, list[Allocation]] = {}
    for memory, place in last.items():
        found.setdefault(place, []).append(memory)
    return found


class _Memory:
    """The real memory that each `Allocation` gets.

    Args:
        own: those that must be no mapped file's: somebody writes to them, or keeps them.
    """

    def __init__(self, own: Collection[Allocation]) -> None:
        self._own = own
        self._held: dict[Allocation, torch.UntypedStorage] = {}

    def run(self, op: Op) -> None:
        args, kwargs = tree_map(self._real, (op.args, op.kwargs))
        if op.draw is None:
            out = op.func(*args, **kwargs)
        else:
            with op.draw.again():
                out = op.func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)] if op.made else []
        for index, memory, geometry in op.made:
            self._held[memory] = _laid_out(outputs[index], geometry).untyped_storage()

    def forget(self, memories: Iterable[Allocation]) -> None:
        for memory in memories:
            self._held.pop(memory, None)

    def tensor(self, ref: Ref) -> Tensor:
        memory = ref.history.allocation
        if memory not in self._held:
            self._held[memory] = self._first(memory).untyped_storage()
        return _view(self._held[memory], ref.geometry)

    def _first(self, memory: Allocation) -> Tensor:
        """The memory before anything was written to it."""
        if memory.region is None:
            return torch.empty(memory.nbytes, dtype=torch.uint8, device=memory.device)
        if memory not in self._own:
            return memory.region.memory
        return memory.region.read(Geometry((memory.nbytes,), (1,), 0, torch.uint8))

    def _real(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.tensor(value)
        return value.value if isinstance(value, Constant) else value


def _laid_out(x: Tensor, geometry: Geometry) -> Tensor:
    """``x`` in memory as its ``meta`` twin lay, from which views were taken."""
    if Geometry.of(x) == geometry:
        return x
    room = torch.empty(geometry.nbytes, dtype=torch.uint8, device=x.device)
    return _view(room.untyped_storage(), geometry).copy_(x)


def _view(memory: torch.UntypedStorage, geometry: Geometry) -> Tensor:
    x = torch.empty(0, dtype=geometry.dtype, device=memory.device)
    storage: Any = memory
    return x.set_(storage, geometry.offset, geometry.shape, geometry.stride)
