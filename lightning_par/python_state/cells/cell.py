"""What all cells have; see `lightning_par.python_state.cells`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_par.python_state.changes import Change
from lightning_par.python_state.tensor_writes import is_written, version_of


class Cell:
    """One mutable object; subclasses know its kind.

    Args:
        name: how the user reaches it, e.g. ``self.outputs['loss']``; the same on all ranks.
        owner: the object.
        fixed: why a run may not change it, where the change could not be told.
    """

    dotted = False
    before: Any

    def __init__(self, name: str, owner: Any, fixed: str | None = None) -> None:
        self.name = name
        self.owner = owner
        self.fixed = fixed
        self.lent: dict[Any, tuple[Any, int | None]] = {}  # by key: what stands in, its version as the run begins
        self.versions: dict[Any, tuple[Tensor, int, Tensor | None]] = {}  # and copies, of tensors that are watched only

    def place(self, key: Any) -> str:
        return f"{self.name}.{key}" if self.dotted else f"{self.name}[{key!r}]"

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The keys and values in it, as they were before."""
        return iter(())

    def watch(self, key: Any, tensor: Tensor, copy: Tensor | None = None) -> None:
        """Note how often ``tensor`` was changed; with a ``copy``, what it holds."""
        self.versions[key] = tensor, version_of(tensor), copy

    def lend(self, key: Any, stand_in: Any) -> None:
        """Let the run see ``stand_in`` in place of what is there."""
        self.lent[key] = stand_in, version_of(stand_in) if isinstance(stand_in, Tensor) else None
        self._put(key, stand_in)

    def overwritten(self) -> list[str]:
        """Tensors without a spare that were changed in place."""
        return [self.place(key) for key, watched in self.versions.items() if is_written(*watched)]

    def inplace(self) -> dict[Any, Tensor]:
        """The new values of tensors that were changed in place, by key."""
        return {
            key: spare.detach()
            for key, (spare, version) in self.lent.items()
            if version is not None and is_written(spare, version)
        }

    def moved(self) -> bool:
        """Whether it holds something else than before."""
        return False

    def counted(self) -> dict[Any, Any] | None:
        """A dict whose version, if it has not changed, tells that nothing has moved."""
        return None

    def now(self) -> dict[Any, Any]:
        """What it holds now, by key; of a long one as much as tells that something came or went."""
        return {}

    def renew(self, atoms: Collection[Any]) -> bool:
        """Take what it holds now for what it held before; False where more than ``atoms`` came or went."""
        return not self.moved()

    def change(self) -> Change | None:
        """What the run changed, or None."""
        raise NotImplementedError

    def change_unlent(self) -> Change | None:
        """What was changed, where all tensors are watched only."""
        written = {key for key, watched in self.versions.items() if is_written(*watched)}
        # no version is -2: they count as written
        self.lent = {key: (self.versions[key][0].detach().clone(), -2) for key in written}
        try:
            return self.change()
        finally:
            self.lent = {}

    def restore(self) -> None:
        """Put back what the object held, the same objects."""
        raise NotImplementedError

    def keep(self, key: Any, value: Any, instead: Sequence[Any]) -> None:
        """From now on ``value`` is what it holds, if it is one of those that it holds now."""
        raise NotImplementedError

    def apply(self, change: Any) -> None:
        """Change the object, which holds what it held before, as the run did."""
        raise NotImplementedError

    def apply_again(self, change: Any) -> None:
        """The run was here: put what ``change`` stores in place of what the run has stored."""

    def _put(self, key: Any, value: Any) -> None:
        raise NotImplementedError


def is_among(value: Any, values: Sequence[Any]) -> bool:
    """Whether ``value`` is one of ``values`` itself, and not only equal to one."""
    return any(value is x for x in values)
