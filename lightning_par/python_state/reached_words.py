"""The names of attributes in the code that a step reaches: what else of a class may run goes by them."""

from __future__ import annotations

from collections.abc import Iterable, Set

from lightning_par.python_state.found import Found

ANY_NAME = frozenset("getattr setattr delattr vars eval exec globals attrgetter methodcaller __dict__".split())
"""Words by which code reaches attributes that it does not name."""
_STEPS = frozenset("training_step validation_step test_step predict_step forward on_before_batch_transfer "
                   "transfer_batch_to_device on_after_batch_transfer".split())  # fmt: skip


class ReachedWords:
    """The words of the code that was looked at, and the methods that no such code has named yet.

    Attributes:
        reached: the words.
        said: the same, but for what only code says that makes an object.

    Example::

        words = ReachedWords()
        words.wait("helper", found)
        assert words.add({"helper"}, makes=False) == [found]
    """

    def __init__(self) -> None:
        self.reached: set[str] = set(_STEPS)
        self.said: set[str] = set()
        self._unreached: dict[str, list[Found]] = {}

    def names(self, method: str) -> bool:
        """Whether code may call the method of this name."""
        return method in self.reached or not self.reached.isdisjoint(ANY_NAME)

    def wait(self, method: str, found: Found) -> None:
        """What was ``found`` under this name is not to be looked at before code names it."""
        self._unreached.setdefault(method, []).append(found)

    def add(self, words: Set[str], makes: bool) -> Iterable[Found]:
        """Code has these ``words``, as a constructor if it ``makes`` objects; gives what waited for them."""
        new = words - self.reached
        self.said.update(() if makes else words)
        self.reached |= new
        flushed = self._unreached if not new.isdisjoint(ANY_NAME) else new & self._unreached.keys()
        return [found for name in sorted(flushed) for found in self._unreached.pop(name)]
