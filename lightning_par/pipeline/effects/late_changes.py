"""Units that begin to change what all ranks reach in a step in which they are not known to, as a hook that goes by a
value: no other rank would hear of that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning_par.pipeline.effects.unit_reach import users_within
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.private.dict_versions import version_of_dict
from lightning_par.private.module_hooks import handles_made, hooks_on_all
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.mappings import NOTHING
from lightning_par.python_state.found import ATOMS

_Held = list[tuple[Cell, int | None, dict[Any, Any]]]


class LateChanges:
    """Refuses what a unit changes of the LightningModule, and of all that it holds outside units.

    Args:
        watch: of that.

    Example::

        late = LateChanges(watch)
        with late.refused("blocks.0"):
            module.blocks[0](x)  # RuntimeError if a hook on it has set an attribute of `module`
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._reaching: dict[str, bool] = {}
        self._handles = -1  # how many hooks there were when that was found

    @contextlib.contextmanager
    def refused(self, path: str) -> Iterator[None]:
        """The unit ``path`` runs inside, of whose changes no rank is told.

        Raises:
            RuntimeError: it has changed something that other ranks have, too.
        """
        if not self._reaches(path):
            yield
            return
        before = self._now()
        yield
        for cell, version, held in before:
            if version is None or version != _version(cell):
                self._compare(path, cell, held)

    def _reaches(self, path: str) -> bool:
        """Whether the unit's own code or hooks on it reach anything that is watched."""
        if self._handles != handles_made():
            self._handles, self._reaching = handles_made(), {}
        if path not in self._reaching:
            unit = self._watch.lightning_module.get_submodule(path)
            found = bool(users_within(unit, path, self._watch.packages) or hooks_on_all())
            if found:
                names = self._watch.reach_of_unit(path, unit).names
                found = any(id(cell.owner) in names for cell in self._watch.held())
            self._reaching[path] = found
        return self._reaching[path]

    def _now(self) -> _Held:
        return [(cell, _version(cell), cell.now()) for cell in self._watch.held()]

    def _compare(self, path: str, cell: Cell, held: dict[Any, Any]) -> None:
        now = cell.now()
        for key in {**held, **now}:
            a, b = held.get(key, NOTHING), now.get(key, NOTHING)
            if a is not b and not (type(a) in ATOMS and type(a) is type(b) and a == b):
                raise RuntimeError(
                    f"A hook of {path!r} or its own code changes {cell.place(key)} in this step, which it did not when "
                    "the step was first run: the other ranks of the pipeline don't hear of it. Let it change something "
                    "of the same object at each call, as `self.calls += 1`, or use TensorParallelStrategy."
                )


def _version(cell: Cell) -> int | None:
    """The same as long as the dict that the cell looks at is; None where it looks at none."""
    counted = cell.counted()
    return None if counted is None else version_of_dict(counted)
