"""What torch's profiler has seen, without the objects that it makes of each event.

`torch.profiler.profile.events()` builds a tree, at tens of microseconds an event; a step has thousands. What kineto
gives, `kineto_results`, is an attribute without an underscore of an object that is documented nowhere.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from lightning_par.trace.profiled import Profiled, Ran

_MARK = "lightning_par trace clock"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Profiler:
    """torch's profiler, of functions and kernels alone.

    Args:
        device: whose kernels are looked at, beside the host's functions.

    Example::

        profiler = Profiler(torch.device("cpu"))
        if profiler.start():
            torch.ones(3) + 1
            print(profiler.stop().functions)
    """

    def __init__(self, device: torch.device) -> None:
        self._marks: list[tuple[int, int, int]] = []
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = profile(activities=activities)

    def start(self) -> bool:
        """Whether it could: a process has one profiler at a time."""
        if torch.autograd._profiler_enabled():
            return False
        try:
            self._profile.start()
        except RuntimeError:  # kineto's own is on, as by another thread
            return False
        self._mark()
        self._mark()  # the first one takes longer
        return True

    def stop(self) -> Profiled:
        """What it has seen; to be called by the thread that started it."""
        self._mark()
        self._profile.stop()
        inner: Any = self._profile.profiler
        return _read(inner.kineto_results.events(), self._marks)

    def _mark(self) -> None:
        before = time.perf_counter_ns()
        with record_function(_MARK):
            within = time.perf_counter_ns()
        self._marks.append((before, within, time.perf_counter_ns()))


def _read(events: Any, marks: list[tuple[int, int, int]]) -> Profiled:
    host, device, launches, found = [], [], {}, []
    for event in events:
        if event.name() == _MARK and event.device_type() == torch.autograd.DeviceType.CPU:
            found.append(event)
        elif event.device_type() != torch.autograd.DeviceType.CPU:
            device.append(event)
        elif event.name().startswith("cuda"):
            launches[event.correlation_id()] = event.start_ns()
        else:
            host.append(event)
    shift, uncertainty = _shift(sorted((one.start_ns(), one.end_ns()) for one in found), marks)
    own = found[0].start_thread_id()
    ran = sorted(
        (e.start_ns() - shift, e.end_ns() - shift, e.name())
        for e in host
        if e.start_thread_id() == own and _is_function(e)
    )
    functions: list[Ran] = []
    for begin, end, name in ran:
        if not functions or begin >= functions[-1].end:  # else it lies within
            functions.append(Ran(name, begin, end, begin))
    kernels = [
        Ran(e.name(), e.start_ns() - shift, e.end_ns() - shift,
            launches.get(e.correlation_id(), e.start_ns()) - shift)
        for e in device
        if _is_work(e)
    ]  # fmt: skip
    return Profiled(tuple(functions), tuple(sorted(kernels, key=lambda one: one.begin)), uncertainty)


def _shift(seen: list[tuple[int, int]], marks: list[tuple[int, int, int]]) -> tuple[int, int]:
    """What the profiler's clock is ahead: each mark began and ended between two looks at the host's."""
    lows, highs = [], []
    for (start, end), (before, within, after) in zip(seen, marks):
        lows += [start - within, end - after]
        highs += [start - before, end - within]
    low, high = max(lows), min(highs)
    return (low + high) // 2, abs(high - low) // 2 + 1


def _is_function(event: Any) -> bool:
    """Of the dispatcher, as aten's: not a range that somebody named, nor autograd's around a node of Python's."""
    name = event.name()
    if event.is_user_annotation() or name.startswith("autograd::"):
        return bool(name.startswith("Torch-Compiled Region"))
    return "::" in name and "#" not in name


def _is_work(event: Any) -> bool:
    """Not a range of the host's that is shown on the device's line, too."""
    kind = getattr(event, "activity_type", None)
    return not event.is_user_annotation() if kind is None else kind() in _DEVICE_WORK
