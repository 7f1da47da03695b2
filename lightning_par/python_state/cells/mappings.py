"""Dicts, and what holds the attributes of an object or a class."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from itertools import compress, repeat
from operator import is_, is_not, not_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.private.dict_versions import dict_behind
from lightning_par.python_state.cells.cell import Cell, is_among
from lightning_par.python_state.changes import MappingChange
from lightning_par.python_state.dict_entries import Entries, entries_of
from lightning_par.python_state.tensor_writes import overwrite

NOTHING: Any = object()
"""What a name without a value has."""


class MappingCell(Cell):
    """A dict, or what holds an object's attributes. ``skipped`` keys are nobody's business.

    ``passing`` keys come and go as runs begin and end, by whoever puts them there: nor are they put back.
    """

    def __init__(
        self, name: str, owner: Any, mapping: MutableMapping[Any, Any], skipped: Collection[str] = (),
        fixed: str | None = None, passing: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(name, owner, fixed)
        self.passing = passing
        self.dotted = mapping is not owner
        self.mapping = entries_of(mapping)
        self.skipped = skipped
        self.before: dict[Any, Any] = dict(self.mapping)

    def counted(self) -> dict[Any, Any] | None:
        held: Any = self.mapping
        if type(held) is Entries:
            return held.owner if held.kind is dict else None
        # an OrderedDict can move on within a version
        return held if type(held) in (dict, defaultdict, Counter) else None

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from ((key, x) for key, x in self.before.items() if not self._skips(key))

    def _skips(self, key: Any) -> bool:
        return self.dotted and key in self.skipped

    def _put(self, key: Any, value: Any) -> None:
        self.mapping[key] = value

    def _delete(self, key: Any) -> None:
        del self.mapping[key]

    def _now(self) -> MutableMapping[Any, Any]:
        return self.mapping

    def now(self) -> dict[Any, Any]:
        return {**self._now()}

    def moved(self) -> bool:
        now, before = self.mapping, self.before
        if self.passing and (any(map(now.__contains__, self.passing)) or any(map(before.__contains__, self.passing))):
            now, before = self._staying(now), self._staying(before)
        return not (
            len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values()))
        )

    def _staying(self, held: MutableMapping[Any, Any]) -> dict[Any, Any]:
        return {key: x for key, x in held.items() if key not in self.passing}

    def renew(self, atoms: Collection[Any]) -> bool:
        if not self.moved():
            return True
        now, before = dict(self._now()), self.before
        came = (x for key, x in now.items() if x is not before.get(key, NOTHING))
        went = (x for key, x in before.items() if x is not now.get(key, NOTHING))
        if not all(type(x) in atoms for values in (came, went) for x in values):
            return False
        self.before = now
        return True

    def change(self) -> MappingChange | None:
        inplace = self.inplace()
        if not inplace and not self.moved():
            return None
        now, before = self._now(), self.before
        others = map(is_not, now.values(), map(before.get, now, repeat(NOTHING)))
        entries = {}
        for key, value in compress(now.items(), others):
            lent = self.lent.get(key)
            if (lent is None or value is not lent[0]) and not self._skips(key):
                entries[key] = value
        gone = [*compress(before, map(not_, map(now.__contains__, before)))]
        deleted = [key for key in gone if not self._skips(key)]
        inplace = {key: x for key, x in inplace.items() if key not in entries and key not in deleted}
        if not (entries or deleted or inplace or (not self.dotted and list(now) != list(before))):
            return None
        return MappingChange(entries, inplace, deleted, None if self.dotted else self._order(now, entries))

    def _order(self, now: MutableMapping[Any, Any], entries: dict[Any, Any]) -> list[Any] | None:
        """The keys, where they are in another order than writing ``entries`` would leave them in."""
        expected = [k for k in self.before if k in now] + [k for k in entries if k not in self.before]
        return None if list(now) == expected else list(now)

    def restore(self) -> None:
        self.lent = {}
        if not self.moved():
            return
        now = self._now()
        if not self.dotted and (len(now) != len(self.before) or not all(map(is_, now, self.before))):
            self._fill(self.before)
            return
        passing = self.passing
        for key in [key for key in now if key not in self.before and key not in passing and not is_dunder(key)]:
            self._delete(key)
        for key, value in self.before.items():
            if key not in passing and now.get(key, NOTHING) is not value:
                self._put(key, value)

    def keep(self, key: Any, value: Any, instead: Sequence[Any]) -> None:
        if is_among(self._now().get(key), instead):
            self.before[key] = value
            self._put(key, value)

    def apply(self, change: MappingChange) -> None:
        for key, value in change.inplace.items():
            overwrite(self.before[key], value)
        for key in change.deleted:
            self._delete(key)
        for key, value in change.entries.items():
            self._put(key, value)
        if change.order is not None:
            self._fill({key: self.mapping[key] for key in change.order})

    def apply_again(self, change: MappingChange) -> None:
        for key, value in change.entries.items():
            self._put(key, value)

    def _fill(self, entries: dict[Any, Any]) -> None:
        self.mapping.clear()
        for key, value in entries.items():  # a Counter's update would add
            self.mapping[key] = value


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
               nn.InstanceNorm3d)  # fmt: skip
"""Modules whose buffers' versions don't tell that they were written."""


class BuffersCell(MappingCell):
    """The buffers of a batch norm, whose kernels write into them without counting that as a change."""

    def inplace(self) -> dict[Any, Tensor]:
        moved = ((k, spare) for k, (spare, _) in self.lent.items() if not torch.equal(spare, self.before[k]))
        return {key: spare.detach() for key, spare in moved}


class BodyCell(MappingCell):
    """What a class body assigned, methods included; names with double underscores are Python's own."""

    def __init__(self, name: str, owner: type) -> None:
        super().__init__(name, owner, vars(owner))  # type: ignore[arg-type]

    def counted(self) -> dict[Any, Any] | None:
        return dict_behind(vars(self.owner))

    def _skips(self, key: Any) -> bool:
        return is_dunder(key)

    def _put(self, key: Any, value: Any) -> None:
        type.__setattr__(self.owner, key, value)

    def _delete(self, key: Any) -> None:
        type.__delattr__(self.owner, key)


def is_dunder(name: Any) -> bool:
    """Whether ``name`` is one of Python's own, as ``__init__``."""
    return isinstance(name, str) and name.startswith("__") and name.endswith("__")
