"""What a rank has begun and come to so far: who waits for whom when a run stands still is read from it.

Only numbers that code of the run counts up, and the last operation in a slot: to note one takes well under a
microsecond. Since when it stands, and where, is found out by who asks; see `lightning_par.hang_report`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_par.mesh.recorder import Recorder

Line = tuple[str, tuple[int, ...]]
"""An axis, or something that ranks come to: its name, and the global ranks that take part."""
Begun = tuple[Line, int, str, str, int, int | None]
"""One operation, or a place that ranks come to: its line, which of the line's it is, the verb or the words for having
come there, the purpose as in the ledger, the elements of the message, and of a message between two ranks the other
one's index along the line. (A named tuple takes four times as long to make.)"""


class Progress:
    """What this rank has begun in one run. Ranks of a line begin the same in one order, so counts tell who is behind.

    Attributes:
        last: what was begun last; another object each time.
        counts: of collectives by axis, and of places come to, in a list of one number each.
        sent: by axis, how many messages went to each index along it.
        received: by axis, how many were asked for of each index along it.
        event: of a pipeline's step, what runs; something that `str` tells.
        recorder: what notes when it was, while a trace is on.

    Example::

        progress = Progress()
        progress.come("barrier", (0, 1), "came to a barrier")
        assert progress.last[1] == 1
    """

    current: Progress

    def __init__(self) -> None:
        self.last: Begun | None = None
        self.counts: dict[Line, list[int]] = {}
        self.sent: dict[Line, list[int]] = {}
        self.received: dict[Line, list[int]] = {}
        self.event: Any = None
        self.recorder: Recorder | None = None
        self._outer: Progress | None = None
        self._ended = False

    def __reduce__(self) -> tuple[type[Progress], tuple[()]]:
        """A trainer that is copied or saved as a whole begins its own runs."""
        return Progress, ()

    def counter(self, line: Line) -> list[int]:
        """The number of collectives along ``line``, to be counted up in place."""
        return self.counts.setdefault(line, [0])

    def messages(self, line: Line) -> tuple[list[int], list[int]]:
        """How many were sent to each index along ``line``, and asked for of each, to be counted up in place."""
        none = [0] * len(line[1])
        return self.sent.setdefault(line, [*none]), self.received.setdefault(line, none)

    def come(self, kind: str, ranks: tuple[int, ...], doing: str) -> None:
        """This rank comes to something that all of ``ranks`` come to."""
        line = kind, ranks
        count = self.counter(line)
        count[0] += 1
        self.last = (line, count[0], doing, "", 0, None)

    def begin(self) -> None:
        """From now on it is the current one, until it ends: axes that are made meanwhile count here."""
        self._outer, Progress.current = Progress.current, self

    def end(self) -> None:
        """The run that it began within is the current one again."""
        self._ended = True
        current = Progress.current
        while current._ended and current._outer is not None:
            current = current._outer
        Progress.current = current


Progress.current = Progress()  # of what is outside of any run
