"""The training data of a fit as its loop gets it: noted where it stands, and gone on with from where a checkpoint was.

A ``CombinedLoader`` is what Lightning makes of all that a user hands it; one that it gets it takes as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_par.checkpoint import generator_states
from lightning_par.private.loaders import is_stateful, iterators_of, without_states
from lightning_par.python_state import generators
from lightning_par.resume.data_position import DataPosition, Resumed, State, own_generators, put_back
from lightning_par.strategies.namespace import Namespace

_OURS = ("watch", "fresh", "given", "stateful", "begun", "early")


@dataclass
class Watch:
    """What a training loader tells, and asks.

    Args:
        position: of the fit, in its data.
        batches: how many batches of the epoch need not be run again; asked when the first is fetched.
        begins_step: whether the batch that is about to be fetched is the first of an optimizer step that has several.
        agree: called before generators of random numbers say in which order batches come.
        share: makes of the loaders as Lightning has prepared them, and as the user gave them, those that are read.
    """

    position: DataPosition
    batches: Callable[[Resumed], int]
    begins_step: Callable[[], bool]
    agree: Callable[[], None]
    share: Callable[[list[Any], list[Any]], list[Any]]


def watched(loaders: Any, watch: Watch, namespace: Namespace) -> Any:
    """What Lightning is to get for the user's ``loaders``."""
    combined_loader = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")
    # a fit's way to combine several, where the user chose none
    made = loaders if isinstance(loaders, combined_loader) else combined_loader(loaders, "max_size_cycle")
    given = [*made.flattened]
    stateful = all(is_stateful(namespace, each) for each in given)
    kind = _kind(type(made), namespace, stateful)  # type: ignore[arg-type]  # a class is hashable
    loader: Any = object.__new__(kind)
    vars(loader).update(vars(made))  # the user's own stays as it is
    loader.watch, loader.fresh, loader.given, loader.stateful = watch, False, given, stateful
    return loader


class TrainingLoader:
    """Goes before a class of ``CombinedLoader``.

    Attributes:
        watch: what it tells and asks.
        fresh: whether the epoch's first batch was not asked for yet.
        given: the user's loaders.
        stateful: whether all of them have a state.
        begun, early: whether it was iterated, and whether that was before its time.
        lightning_kind: the class before which it goes.
        namespace: of its Lightning.
    """

    watch: Watch
    fresh: bool
    given: list[Any]
    stateful: bool
    begun = early = False
    lightning_kind: type
    namespace: Namespace

    @property
    def flattened(self) -> list[Any]:
        return super().flattened  # type: ignore[misc, no-any-return]

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        self.lightning_kind.flattened.fset(self, self.watch.share(loaders, self.given))  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A trainer that is copied or saved as a whole has Lightning's own, and watches its runs anew."""
        state = {name: x for name, x in vars(self).items() if name not in _OURS}
        return object.__new__, (self.lightning_kind,), state

    def __iter__(self) -> Any:
        watch, self.fresh = self.watch, True
        watch.agree()
        watch.position.found = own_generators(self.flattened)
        watch.position.stateful = [each for each in self.flattened if is_stateful(self.namespace, each)]
        resumed, self.early = watch.position.resumed, False
        if resumed is not None and not self.begun:
            # before the run that is resumed would: it draws nothing, and is made again in its time
            self.begun = self.early = True
            generator_states.load_states(watch.position.found, resumed.now["own"])
            with generators.kept(watch.position.found):
                self._begin(resumed.loaders)
        else:
            watch.position.began, watch.position.first = watch.position.standing().saved(), None
            self._begin([] if resumed is None else resumed.loaders)
        return self

    def _begin(self, states: list[Any]) -> None:
        position = self.watch.position
        for each, state in zip(position.stateful, states):
            each.load_state_dict(state)
        position.restarts, position.fetched = {}, 0
        position.loaders_began = position.states()
        super().__iter__()  # type: ignore[misc]

    def __next__(self) -> Any:
        if self.fresh:
            self.fresh = False
            self._first()
        if self.watch.begins_step():
            self.watch.position.step = self.watch.position.standing()
        return self._next()

    def _next(self) -> Any:
        """The next batch; it is noted where one of several loaders begins anew for it."""
        position, several = self.watch.position, len(self.flattened) > 1
        before, standing = (iterators_of(self), position.standing()) if several else ([], None)
        batch = super().__next__()  # type: ignore[misc]
        after = iterators_of(self) if several else []
        if standing is not None and any(a is not b for a, b in zip(before, after)):
            position.restarts[position.fetched] = standing.saved()
        position.fetched += 1
        return batch

    def _first(self) -> None:
        self.watch.agree()
        position = self.watch.position
        resumed, position.resumed = position.resumed, None
        batches = self.watch.batches(resumed) if resumed is not None else 0
        if resumed is not None and resumed.has_begun and self.early:
            self._begin_again(resumed)
            position.first = position.standing().saved()
            return
        if resumed is None or not batches:
            if self.early:
                position.began = position.standing().saved()
                self._begin(resumed.loaders if resumed is not None else [])
            position.first = position.standing().saved()
            return
        assert resumed.first is not None
        with generators.kept(position.found):
            self._begin_again(resumed)
            position.first = resumed.first
            put_back(resumed.first, position.found)
            if not self.stateful:
                self._skip(batches, resumed.restarts)

    def _begin_again(self, resumed: Resumed) -> None:
        """Make the iterator as that of the epoch was made, and leave the generators where they stood then."""
        position = self.watch.position
        assert resumed.began is not None
        put_back(resumed.began, position.found)
        self._begin(resumed.loaders if self.stateful else resumed.loaders_began)
        position.began, position.loaders_began = resumed.began, resumed.loaders_began
        put_back(resumed.now, position.found)

    def _skip(self, batches: int, restarts: Mapping[int, State]) -> None:
        for i in range(batches):
            if i in restarts:
                put_back(restarts[i], self.watch.position.found)
            try:
                self._next()
            except StopIteration:
                raise RuntimeError(
                    f"The checkpoint was written after {batches} batches of an epoch, and the training dataloader "
                    f"gives {i}. Resume with the data that the run began with."
                ) from None


@functools.cache
def _kind(base: Any, namespace: Namespace, stateful: bool) -> type:
    # Without, those that have a state go on from the epoch's beginning, with the others.
    parent = base if stateful else without_states(base)
    return type(base.__name__, (TrainingLoader, parent), {"lightning_kind": base, "namespace": namespace})
