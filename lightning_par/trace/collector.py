"""How the ranks' traces come to rank 0: each tells its own, by a connection that needs no other rank to come.

So a rank that an exception ends can tell, whatever the others do, and no process group moves anything of a trace.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import number_of
from lightning_par.mesh.hosts import this_host
from lightning_par.mesh.side_channel import Line, SideChannel
from lightning_par.trace.clock import PINGS, ping, pong
from lightning_par.trace.spans import Clock, RankTrace

MOST_BYTES = 1 << 30


class TraceCollector:
    """Where ranks tell what they have recorded; rank 0 takes it in. All ranks must make one, in the same order.

    Args:
        world: all ranks.

    Example::

        collector = TraceCollector(groups.world)
        collector.tell(own)
        groups.world.all_gather_object(None, "trace")
        traces = collector.taken()  # on rank 0: all
        collector.close()
    """

    def __init__(self, world: Axis) -> None:
        self.world = world
        self._taken: dict[int, bytes] = {}
        self._came = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._channel: SideChannel | None = None
        if world.size > 1:
            name = f"trace {number_of(world, 'trace')}"
            self._channel = SideChannel(name, world.ranks[world.rank], self._answer)

    def tell(self, own: RankTrace, patience: float = 60.0) -> None:
        """Bring this rank's trace to rank 0, on its clock.

        Args:
            own: what it has recorded, on its own clock.
            patience: seconds for each answer.

        Raises:
            RuntimeError: rank 0 does not answer.
        """
        first = self.world.ranks[0]
        if self.world.rank == 0 or self._channel is None:
            self._taken[own.rank] = json.dumps(own.to_json()).encode()
            return
        clock = self._clock(first, patience)
        data = json.dumps(own.shifted(clock).to_json()).encode()
        with self._channel.ask(first, {"trace": own.rank, "length": len(data)}, patience) as line:
            line.send(memoryview(data))
            line.hear()

    def _clock(self, first: int, patience: float) -> Clock:
        assert self._channel is not None
        with self._channel.ask(first, {"clock": [*astuple(this_host())]}, patience) as line:
            if line.hear() == "shared":
                return Clock()
            return ping(line)

    def _answer(self, question: Any, line: Line) -> None:
        if "clock" in question:
            if question["clock"] == [*astuple(this_host())]:
                line.say("shared")
                return
            with self._one_at_a_time:  # else the threads would wait for one another, and pings with them
                line.say("ping")
                pong(line, count=PINGS)
            return
        length = int(question["length"])
        if not 0 <= length <= MOST_BYTES:
            raise ValueError(f"a trace of {length} bytes")
        data = bytearray(length)
        line.receive_into(memoryview(data))
        with self._came:
            self._taken[int(question["trace"])] = bytes(data)
            self._came.notify_all()
        line.say("taken")

    def wait(self, seconds: float) -> None:
        """Until all ranks have told, or so long."""
        deadline = time.monotonic() + seconds
        with self._came:
            while len(self._taken) < self.world.size and (left := deadline - time.monotonic()) > 0:
                self._came.wait(left)

    def taken(self) -> tuple[RankTrace, ...]:
        """What was told, by rank."""
        with self._came:
            told = sorted(self._taken.items())
        return tuple(_read(data for _, data in told))

    def close(self) -> None:
        """Nothing is taken any more."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _read(told: Iterable[bytes]) -> Iterable[RankTrace]:
    for data in told:
        with contextlib.suppress(TypeError, ValueError, KeyError, IndexError):  # from another version
            yield RankTrace.from_json(json.loads(data))
