"""When this rank's messages begin and end, and when its own code waits for them, while a trace is on.

`Progress` notes what a rank begins; where it has a recorder, the same places tell that when. One that has none pays a
look at an attribute for each message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_par.mesh.progress import Begun

MOST = 1_000_000
"""Messages and waits that a recorder takes, about 200 MB; then it is full."""


class Moved:
    """One message of this rank.

    Attributes:
        begun: what it is; see `lightning_par.mesh.progress.Begun`.
        nbytes: of the whole message, 0 for an object.
        begin: nanoseconds of the recorder's clock, before it was handed to the backend.
        end: when its sender or receiver knew that it had left or come; None while nobody has waited for it.
    """

    __slots__ = ("begin", "begun", "end", "nbytes")

    def __init__(self, begun: Begun, nbytes: int, begin: int) -> None:
        self.begun, self.nbytes, self.begin = begun, nbytes, begin
        self.end: int | None = None


class Spent(NamedTuple):
    """Time that this rank's own code spent on a message, handing it over or waiting.

    Attributes:
        message: which of `Recorder.messages`; -1: one that began before the recorder.
        begin: nanoseconds.
        end: nanoseconds.
    """

    message: int
    begin: int
    end: int


class Recorder:
    """What a rank sends, receives and waits for from when it is put on a `Progress`.

    Args:
        clock: nanoseconds.
        waits_in_place: whether who waits for a message stands still till then. On a GPU the device waits, and what the
            host spends says nothing.

    Attributes:
        messages: in the order in which they began.
        spent: one after another, as one thread runs at a time.
        actions: of a pipeline's step: `lightning_par.pipeline.simulate.Span`, in seconds of ``time.perf_counter``.
        is_full: whether something was left out since there was too much.

    Example::

        recorder = axis.progress.recorder = Recorder()
        axis.all_reduce_(x, "loss")
        axis.progress.recorder = None
        assert len(recorder.messages) == 1
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, waits_in_place: bool = True) -> None:
        self.clock, self.waits_in_place = clock, waits_in_place
        self.messages: list[Moved] = []
        self.spent: list[Spent] = []
        self.actions: list[Any] = []
        self.is_full = False
        # By `id`, so that nothing lives longer: who waits for a work holds it from when it began.
        self._under_way: dict[int, tuple[int, ...]] = {}

    def call(self, begun: Begun | None, nbytes: int, start: Callable[[], Any], of_objects: bool = False) -> Any:
        """``start`` a collective; what it returns is a work to wait on, unless it is None or the collective's result.

        Args:
            begun: what it is.
            nbytes: of the whole message.
            start: begins it.
            of_objects: whether it has ended when it returns, whatever that is.
        """
        assert begun is not None, "an axis notes what it begins"
        if self._has_no_room():
            return start()
        first = len(self.messages)
        begin = self.clock()
        self.messages.append(Moved(begun, nbytes, begin))
        work = start()
        end = self.clock()
        self.spent.append(Spent(first, begin, end))
        if work is None or of_objects:
            self.messages[first].end = end
        else:
            self._under_way[id(work)] = (first,)
        return work

    def exchange(self, begun: Sequence[tuple[Begun, int]], start: Callable[[], list[Any]]) -> list[Any]:
        """``start`` messages between two ranks, given what they are and their bytes; returns a work for each."""
        if self._has_no_room():
            return start()
        first = len(self.messages)
        begin = self.clock()
        self.messages += [Moved(one, nbytes, begin) for one, nbytes in begun]
        works = start()
        self.spent.append(Spent(first, begin, self.clock()))
        for number, work in enumerate(works, first):
            # NCCL has one work for the whole batch
            self._under_way[id(work)] = (*self._shared(work, first), number)
        return works

    def wait(self, work: Any) -> None:
        """`torch.distributed.Work.wait`."""
        begin = self.clock()
        try:
            work.wait()
        finally:
            end = self.clock()
            numbers = self._under_way.pop(id(work), ())
            for number in numbers:
                self.messages[number].end = end
            if not self._has_no_room():
                self.spent.append(Spent(numbers[0] if numbers else -1, begin, end))

    def _shared(self, work: Any, first: int) -> tuple[int, ...]:
        known = self._under_way.get(id(work), ())
        return known if known and known[0] >= first else ()  # else one that has ended had its place in memory

    def _has_no_room(self) -> bool:
        self.is_full = self.is_full or len(self.messages) + len(self.spent) >= MOST
        return self.is_full
