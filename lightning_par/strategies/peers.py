"""How the ranks of a replica keep together: where sharded tensors talk outside of steps, where a loop is to stop."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial

from lightning_par.checkpoint.weight_reads import WeightReads
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting, number_of
from lightning_par.mesh.layout import Groups
from lightning_par.mesh.standing import Standing
from lightning_par.sharded.run_state import RunState
from lightning_par.strategies.part import Part
from lightning_par.strategies.stop_iteration import AllStop, Stopping
from lightning_par.trial.first_step import FirstStep


class PeersPart(Part):
    """Has the ranks that share tensors meet before these talk, but in steps, which all of them run alike.

    Args:
        groups: the mesh axes.
        talking: the axes along which sharded tensors talk.
        stored: whether weights are stored in parts.
        timeout: how long a rank waits for another.
    """

    def __init__(self, groups: Groups, talking: Sequence[Axis], stored: bool, timeout: timedelta | None) -> None:
        self.groups, self.talking, self.stored, self.timeout = groups, talking, stored, timeout
        self._meeting: Meeting | None = None
        self._stops: AllStop | None = None
        self._standing = Standing()

    def apply(self, first: FirstStep) -> None:
        groups = self.groups
        split = groups.split
        if split or self.stored:
            among = split[0] if len(split) == 1 else groups.stage_of_replica
            self._meeting = Meeting(groups.stage if self.stored else among, self.timeout)
            for axis in self.talking:
                axis.guard = partial(self._meeting.about_to_talk, axis)
            RunState.current.names.name_weights(first.module)
        self._stops = AllStop(Meeting(groups.replica, self.timeout, "stop"))
        if split or self.stored or groups.pipeline.size > 1:
            run = f"run {number_of(groups.world, 'weights read')}"
            state = RunState.current
            state.reads = WeightReads(first.module, groups.world.rank, run, self._standing)

    @contextmanager
    def step(self, kind: str) -> Generator[None, None, None]:
        if not self._standing.inside and RunState.current.reads is not None:
            RunState.current.reads.forget()
        with (
            self._standing.step(),
            nullcontext() if self._meeting is None else self._meeting.step(kind),
            nullcontext() if self._stops is None else Stopping(self._stops),
        ):
            yield

    def close(self) -> None:
        for axis in self.talking:
            axis.guard = None
        self._meeting = self._stops = None
        RunState.current.names.end()
