"""What a step may change of its trainer: attributes, and the user's callbacks and data module, where its code names
them."""

from __future__ import annotations

from typing import Any

from lightning_par.python_state.cells.mappings import MappingCell
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.user_code import is_users_code

NAME = "self.trainer"


def look_at_trainer(snapshot: Snapshot, trainer: Any, packages: frozenset[str]) -> None:
    """Add them to the state that the step of the trainer's module reaches.

    Args:
        snapshot: of that.
        trainer: of either of Lightning's packages.
        packages: installed packages that count as the user's.
    """
    held = vars(trainer)
    inner = [name for name in held if name.startswith("_")]  # the library's, which runs change
    snapshot.cells[NAME] = MappingCell(NAME, trainer, held, inner)
    if "callbacks" in snapshot.words:
        for n, callback in enumerate(trainer.callbacks):
            if is_users_code(type(callback).__module__, packages):
                snapshot.add(f"{NAME}.callbacks[{n}]", callback)
    if "datamodule" in snapshot.words and getattr(trainer, "datamodule", None) is not None:
        snapshot.add(f"{NAME}.datamodule", trainer.datamodule)
