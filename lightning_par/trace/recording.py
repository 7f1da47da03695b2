"""Steps of one rank while they are recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lightning_par.mesh.hosts import this_host
from lightning_par.mesh.layout import Groups
from lightning_par.mesh.recorder import Recorder
from lightning_par.private.profiler import Profiler
from lightning_par.trace.breakdown import Window
from lightning_par.trace.profiled import Profiled, joined
from lightning_par.trace.record import Place, rank_trace
from lightning_par.trace.spans import RankTrace


class Recording:
    """What notes the steps of one rank, and what runs and moves meanwhile.

    Args:
        groups: the mesh axes.
        device: of this rank.
        profiles: whether torch's profiler may be on.

    Attributes:
        given: when the batch of the step that runs was there.

    Example::

        recording = Recording(groups, torch.device("cpu"), profiles=True)
        recording.begin()
        recording.end(number=0)
        own = recording.stop()
    """

    def __init__(self, groups: Groups, device: torch.device, profiles: bool) -> None:
        self.groups, self.device, self.profiles = groups, device, profiles
        self.given: int | None = None
        rank, layout = groups.world.ranks[groups.world.rank], groups.layout
        self.place = Place(rank, layout.world_size, this_host().name, groups.pipeline.rank, str(device))
        self._began: int | None = None
        self._windows: list[Window] = []
        self._recorder = Recorder(waits_in_place=device.type == "cpu")
        self._profiler: Profiler | None = None
        self._profiled: list[Profiled] = []

    def now(self) -> int:
        """Once the device has done what it was given: a step's end is that of its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter_ns()

    @property
    def has_steps(self) -> bool:
        """Whether a step has ended."""
        return bool(self._windows)

    def begin(self) -> None:
        """A step begins."""
        if self.groups.world.progress.recorder is None:
            self.groups.world.progress.recorder = self._recorder
            profiler = Profiler(self.device)
            self.profiles = self.profiles and profiler.start()
            self._profiler = profiler if self.profiles else None
        self._began, self.given = self.now(), None

    def end(self, number: int, cut: bool = False) -> None:
        """The step ends that has begun."""
        if self._began is not None:
            end = time.perf_counter_ns() if cut else self.now()
            self._windows.append(Window(number, self._began, end if self.given is None else self.given, end, cut))
        self._began = self.given = None

    def pause(self) -> None:
        """What comes is of no step, and may be long."""
        self._began = self.given = None
        self.groups.world.progress.recorder = None
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._profiled.append(profiler.stop())

    def stop(self, notes: Sequence[str] = ()) -> RankTrace:
        """Nothing is recorded any more; returns what was."""
        self.pause()
        if not self.profiles:
            notes = [*notes, "another profiler was on: what functions took counts as Python's"]
        return rank_trace(self.place, self._recorder, joined(self._profiled), self._windows, notes)
