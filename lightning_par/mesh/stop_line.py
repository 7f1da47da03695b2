"""At which point of a run its ranks stop together, once one of them is to.

All ranks of a run come to the same points in one order, though not at one time: a rank may be a batch ahead of another.
Where all are to stop, they must do so at one point, or those that go on wait for the others. No message is sent for it
while nothing is to stop. The protocol:

1. Each rank is told to stop, and answers which point it has entered last. From then on it enters none before it knows
   the line. Whoever answers is a thread, so that no rank's own code need come anywhere for it.
2. The line is the last of the points that were answered. Each rank is told it, goes on up to it, and stops behind it.

A rank that was told before it came to a point stops there or knows better; one that entered it before has answered it.
So no rank has entered a point behind the line, and none stops before it: a rank that is behind finds all that it needs
of others, who have been there.

Points of validation are counted from the last point that all ranks come to: loaders of several replicas may differ in
length, and who has no batch left goes on to the next point of all.
"""

from __future__ import annotations

import sys

Point = tuple[int, int]
"""The number of a point that all ranks come to, and how many of a replica's own came behind it."""

ENDED: Point = (sys.maxsize, 0)
"""The answer for a rank whose run has ended: the others, who have all that they need of it, stop nowhere."""


class StopLine:
    """What one rank knows of where it stands and where all stop. Not safe to be used by threads at one time.

    Example::

        line = StopLine()
        line.arrive(of_all=True)
        assert line.stops() is False  # nobody is to stop: this rank enters the point
        entered = line.tell()
        line.arrive(of_all=True)
        assert line.stops() is None  # it waits
        line.draw(max(entered, (1, 3)))
        assert line.stops() is True
    """

    def __init__(self) -> None:
        self.told = False
        """Whether this rank knows that all are to stop."""
        self.line: Point | None = None
        """The last point that a rank has entered; none is entered behind it."""
        self._at: Point = (0, 0)
        self._entered: Point = (0, 0)

    def arrive(self, of_all: bool) -> None:
        """This rank has come to the next point, which all ranks come to, or those of a replica alone."""
        number, own = self._at
        self._at = (number + 1, 0) if of_all else (number, own + 1)

    def stops(self) -> bool | None:
        """Whether this rank is to stop where it has arrived; where not, it enters. None where it is to wait."""
        if self.told and self.line is None:
            return None
        if self.line is not None and self._at > self.line:
            return True
        self._entered = self._at
        return False

    def tell(self) -> Point:
        """All are to stop; the last point that this rank has entered."""
        self.told = True
        return self._entered

    def draw(self, line: Point) -> None:
        """All ranks have answered, and ``line`` is the last of their points."""
        self.told = True
        self.line = line
