"""When torch is changed, and when it is as it was: as long as somebody holds the `Patches` that say how.

A strategy holds them from the start of its set-up to the end of its teardown, and a trial run while it runs. What is
collected holds nothing. Sharded tensors that outlive the last run hold them, too: the module that an exception left in
parts, or what user code kept. Others don't: a plan may keep the fakes of its trial, and torch's graph those of a dry
run, which no user meets.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.sharded.patches.replacement import Patch
from lightning_par.sharded.tensor import ShardedTensor

_TOKENS = "_patches"
"""The attribute of a tensor that holds patches."""

_lock = threading.RLock()  # a holder may be collected while another is noted


class Patches:
    """Changes that are made together, when their first holder comes, and undone when their last one goes.

    Args:
        make: makes the patches, at the first time.

    Example::

        patches = Patches(lambda: [Replacement(math, "sqrt", make)])
        patches.hold(trainer)
        patches.release(trainer)  # or `del trainer`
    """

    def __init__(self, make: Callable[[], Iterable[Patch]]) -> None:
        self._make = make
        self._patches: list[Patch] | None = None
        self._holders: dict[int, weakref.finalize[Any, Any]] = {}

    @property
    def are_installed(self) -> bool:
        return bool(self._holders)

    def hold(self, holder: object) -> None:
        """From now on they are installed, until ``holder`` is released or collected. May be called again."""
        with _lock:
            if id(holder) in self._holders:
                return
            if not self._holders:
                self._install()
            end = weakref.finalize(holder, self._collected, id(holder))
            end.atexit = False
            self._holders[id(holder)] = end

    def release(self, holder: object) -> None:
        """``holder`` needs them no longer; may be called of any object."""
        with _lock:
            end = self._holders.get(id(holder))
            if end is not None:
                end.detach()
                self._let_go(id(holder))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, they are."""
        holder = _Holder()
        self.hold(holder)
        try:
            yield
        finally:
            self.release(holder)

    def is_last(self, holder: object) -> bool:
        """Whether nobody else holds them."""
        return self._holders.keys() == {id(holder)}

    def _collected(self, key: int) -> None:
        with _lock:
            if self._holders.keys() == {key}:
                _hold_for_sharded([self])  # what outlives it holds them in its place
            self._let_go(key)

    def _let_go(self, key: int) -> None:
        with _lock:
            del self._holders[key]
            if not self._holders:
                self._undo(self._patches or [])

    def _install(self) -> None:
        if self._patches is None:
            self._patches = [*self._make()]
        done: list[Patch] = []
        try:
            for patch in self._patches:
                patch.install()
                done.append(patch)
        except BaseException:
            self._undo(done)
            raise

    def _undo(self, patches: list[Patch]) -> None:
        for patch in reversed(patches):
            patch.undo()


class _Holder:
    """Holds patches as long as something refers to it; not what is copied or pickled of it."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Holder, ()


def release(holder: object, every: Iterable[Patches]) -> None:
    """Release ``every`` kind of patches, but those that no other holder has where sharded tensors are left.

    Theirs they are until the last of them is collected, or made whole.
    """
    with _lock:
        ending = [patches for patches in every if patches.is_last(holder)]
        if ending:
            _hold_for_sharded(ending)
        for patches in every:
            patches.release(holder)


def _hold_for_sharded(kinds: list[Patches]) -> None:
    left = _sharded()
    if left:
        gc.collect()  # many are in cycles, as what an exception had in hand
        left = _sharded()
    token = _Holder()
    for x in left:
        vars(x)[_TOKENS] = (*vars(x).get(_TOKENS, ()), token)  # no weak reference: it may be swapped
    if left:
        for patches in kinds:
            patches.hold(token)


def _sharded() -> list[Tensor]:
    """The tensors of runs there are of which this rank has a part or nothing."""
    from lightning_par.absent.elsewhere import Elsewhere

    kinds: dict[type, bool] = {}
    found = []
    for x in gc.get_objects():
        kind = type(x)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, (ShardedTensor, Elsewhere))
        if kinds[kind] and _is_of_a_run(x):
            found.append(x)
    return found


def _is_of_a_run(x: Any) -> bool:
    """Whether other ranks have the rest of its values; none has in a trial of a step, or in a dry run."""
    axis = x.axis if isinstance(x, ShardedTensor) else x.origin.axis
    return axis.group is not None and not axis.dry and not isinstance(getattr(x, "_innermost", None), FakeTensor)
