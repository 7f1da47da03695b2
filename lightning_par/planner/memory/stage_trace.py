"""Bytes of live tensors of one stage while it runs one microbatch, change by change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from lightning_par.planner.memory.live_bytes import LiveBytes


@dataclass(frozen=True)
class Trace:
    """Of one action of a schedule: a forward, a backward, or a part of one.

    Attributes:
        live: bytes after each change, counted from what lived as the stage's forward began.
        gradients: of each parameter of whose gradient the action makes a part, the change with which it is there, the
            parameter's name, and bytes. It is added to one that is there, and let go.
    """

    live: tuple[int, ...]
    gradients: tuple[tuple[int, str, int], ...] = ()

    @property
    def end(self) -> int:
        """Bytes as the action ends."""
        return self.live[-1]


class Taken(NamedTuple):
    """A value that comes from the stage before.

    Attributes:
        nbytes: of it.
        wanted: whether its gradient goes back.
        held: bytes of the memory that this lies in, which may be more: a part of what came for the stage's own values
            is one of theirs. 0 where another gradient lies there, too, that is counted.
    """

    nbytes: int
    wanted: bool
    held: int


@dataclass(frozen=True)
class StageTrace:
    """Of one stage and one microbatch.

    Attributes:
        actions: by their letters in schedules: F, and B or I and W.
        taken: the values that it takes.
    """

    actions: Mapping[str, Trace]
    taken: tuple[Taken, ...]


class TraceRecorder:
    """Records a stage's actions one after the other.

    Args:
        leaves: parameters that get gradients, by name.

    Example::

        weight = torch.ones(10, requires_grad=True)
        recorder = TraceRecorder({"weight": weight})
        with recorder.action("F"):
            y = weight.sum()
        with recorder.action("B"):
            y.backward()
        assert recorder.actions["F"].end == 4
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self._live = LiveBytes()
        self._leaves = leaves
        self.actions: dict[str, Trace] = {}

    @contextmanager
    def action(self, op: str) -> Iterator[None]:
        """What is made and let go inside is of ``op``."""
        live, begin = self._live, len(self._live.steps)
        found: list[tuple[int, str, int]] = []

        def note(name: str, x: Tensor) -> None:
            size, steps = x.numel() * x.element_size(), live.steps
            before = steps[-2] if len(steps) > begin + 1 else start
            freed = len(steps) > begin and steps[-1] - before == -size  # it was, as it was added
            found.append((len(steps) - begin + (not freed), name, size))

        trained = [(name, x) for name, x in self._leaves.items() if x.requires_grad]
        handles = [x.register_post_accumulate_grad_hook(partial(note, name)) for name, x in trained]
        start = live.now
        try:
            with live:
                yield
        finally:
            for handle in handles:
                handle.remove()
        last = len(live.steps) - begin
        self.actions[op] = Trace((start, *live.steps[begin:]), tuple((min(i, last), n, s) for i, n, s in found))
