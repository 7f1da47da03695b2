"""What a dict holds, whatever its class makes of that."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

_PLAIN = (dict, OrderedDict, defaultdict, Counter)


class Entries(MutableMapping[Any, Any]):
    """The entries of a dict whose class may do more, or other things, where they are read or written.

    Example::

        class Doubled(dict):
            def __getitem__(self, key):
                return 2 * super().__getitem__(key)

        assert Entries(Doubled(a=1))["a"] == 1
    """

    def __init__(self, owner: dict[Any, Any]) -> None:
        self.owner = owner
        self.kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict

    def __getitem__(self, key: Any) -> Any:
        if key not in self:  # a class may make up what is missing
            raise KeyError(key)
        return self.kind.__getitem__(self.owner, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.kind.__setitem__(self.owner, key, value)

    def __delitem__(self, key: Any) -> None:
        self.kind.__delitem__(self.owner, key)

    def __contains__(self, key: Any) -> bool:
        return bool(self.kind.__contains__(self.owner, key))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kind.__iter__(self.owner))

    def __len__(self) -> int:
        return int(self.kind.__len__(self.owner))

    def clear(self) -> None:
        self.kind.clear(self.owner)


def entries_of(mapping: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """``mapping``, or its `Entries` where it is a dict of a class of its own."""
    return Entries(mapping) if isinstance(mapping, dict) and type(mapping) not in _PLAIN else mapping
