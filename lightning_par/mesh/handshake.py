"""Outside a step the ranks meet before they talk, and who does not come, or does something else, is named.

Within a step Lightning has all ranks run the same code, which the first one of each kind shows. Between steps user code
may run on one rank alone, as in ``if trainer.is_global_zero: self(x)``. A module that is split needs its peers there;
without a word, they would wait for each other until the process group's timeout.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta

from lightning_par.mesh.axis import Axis
from lightning_par.private.process_groups import default_store
from lightning_par.sharded.run_state import RunState

PATIENCE = timedelta(seconds=60)
GLANCE = timedelta(seconds=0.3)
"""How long a rank waits for its peers before it looks where they are, and again."""
STEP = timedelta(minutes=30)
CALLED = "called the module outside a step"
ADVICE = (
    "Call it on all of them, and let one rank alone use the result: write `y = self(x)` before "
    "`if self.trainer.is_global_zero:`."
)
ALIKE = "In a step all of them must run the same code, in one order."


class Meeting:
    """Guards the collectives of an axis while no step runs.

    Args:
        axis: the axis whose ranks must come together.
        timeout: the process group's; a rank waits for its peers no longer than that, nor than `PATIENCE`.
        name: of what meets; it goes into keys of the store.
        shared: what of its ranks needs them all.

    Example::

        meeting = Meeting(axis, timedelta(seconds=30))
        meeting("saved a picture", "Do it on all ranks.")
    """

    def __init__(
        self, axis: Axis, timeout: timedelta | None, name: str = "", shared: str = "weights are split"
    ) -> None:
        self.axis, self.shared = axis, shared
        self.name = f"{name} {number_of(axis, name)}"  # what an earlier meeting left in the store is not mistaken
        self.timeout = timeout
        self._steps = 0  # steps that run, one within the other
        self._met: Counter[tuple[int, ...]] = Counter()  # by the ranks that met
        self._shown: set[str] = set()  # kinds of steps that ran
        self._shows = False  # whether a step runs that is the first of its kind

    @contextlib.contextmanager
    def step(self, kind: str = "") -> Iterator[None]:
        """Inside, all ranks run the same code, which the first step of each ``kind`` in a run shows.

        Args:
            kind: the hook that runs, such as "training_step"; empty for what is within another step.
        """
        self._steps += 1
        names = RunState.current.names
        before = names.on, self._shows
        if self._steps == 1:
            self._shows = kind not in self._shown
            names.on = names.on and self._shows
        try:
            yield
            self._shown.add(kind)
        finally:
            self._steps -= 1
            names.on, self._shows = before

    def about_to_talk(self, axis: Axis) -> None:
        """Called before sharded tensors talk along ``axis``: its ranks must come for the same one; raises as a call.

        Over a set of names each process goes in another order, and parts of different tensors would be joined. Outside
        of steps this is looked at each time, in steps in the first one of a kind: there, each rank may take its time.
        """
        about = RunState.current.names.current
        if self._shows and axis.size > 1:
            self._meet(axis, "came to a collective in a step", ALIKE, about, self.timeout or STEP)
        elif not self._steps:
            self(about=about)

    def __call__(self, doing: str = CALLED, advice: str = ADVICE, about: str = "") -> None:
        """Wait for the peers, outside a step.

        Args:
            doing: what this rank is about to do, in the past tense; the peers must do the same.
            advice: how to do it on all ranks.
            about: the name of the tensor that it is done to, the same on all ranks.

        Raises:
            RuntimeError: a peer did not come in time, or came for something else.
        """
        if not self._steps:
            self.at_any_time(doing, advice, about)

    def at_any_time(self, doing: str, advice: str, about: str = "", patience: timedelta = PATIENCE) -> None:
        """As a call, within a step, too: for what one rank alone may have met there."""
        if self.axis.size == 1:
            return
        self._meet(self.axis, doing, advice, about, min(self.timeout or patience, patience))

    def _meet(self, axis: Axis, doing: str, advice: str, about: str, patience: timedelta) -> None:
        if axis.dry:
            return
        ranks = axis.ranks
        self._met[ranks] += 1
        store = default_store()
        keys = {rank: self._key(ranks, rank) for rank in ranks}
        me = ranks[axis.rank]
        RunState.current.whereabouts.come(f"meeting {self.name}", ranks, doing)
        store.set(keys[me], f"{doing}\n{about}")
        others = {rank: key for rank, key in keys.items() if rank != me}
        self._wait(others, f"Rank {me} {doing}", f"{', '.join(map(str, ranks))}. {advice}", patience)
        for rank, value in zip(others, store.multi_get([*others.values()])):
            told, _, of = value.decode().partition("\n")
            if told == doing and of != about:
                raise RuntimeError(_other_order(me, about, rank, of))
            if told != doing:
                raise RuntimeError(f"Rank {me} {doing}, while rank {rank} {told}. All must do the same. {advice}")
        if self._met[ranks] > 1:
            store.delete_key(self._key(ranks, me, before=1))

    def _wait(self, others: dict[int, str], who: str, among: str, patience: timedelta) -> None:
        """Wait for the keys of ``others``, until they come, or are seen to have gone on to something else."""
        store, end = default_store(), time.monotonic() + patience.total_seconds()
        while True:
            left = end - time.monotonic()
            if _come(others.values(), min(GLANCE.total_seconds(), left)):
                return
            missing = [rank for rank, key in others.items() if not store.check([key])]
            named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            for rank in missing:
                gone = RunState.current.whereabouts.passed_by(rank)
                if gone is not None and not store.check([others[rank]]):
                    raise RuntimeError(
                        f"{who}, and waits in vain for {named}: rank {rank} {gone}. {self.shared.capitalize()} over "
                        f"ranks {among}"
                    )
            if missing and left <= 0:
                raise RuntimeError(
                    f"{who}, and waited {patience.total_seconds():.0f} s for {named}, which it can't do "
                    f"without: its {self.shared} over ranks {among}"
                )

    def _key(self, ranks: tuple[int, ...], rank: int, before: int = 0) -> str:
        return f"lightning_par/{ranks}/{self.name}/{self._met[ranks] - before}/{rank}"


def _come(keys: Iterable[str], seconds: float) -> bool:
    """Whether the store has all ``keys`` in time. (Its own `wait` writes to the user's terminal when it has not.)"""
    store, wanted, end, pause = default_store(), [*keys], time.monotonic() + seconds, 0.0002
    while not store.check(wanted):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
    return True


def refuse_alone(axis: Axis, doing: str) -> None:
    """To be called before what a rank hears of others decides what it does: in a dry run none is there to be asked.

    Raises:
        NotImplementedError: the axis is that of a dry run.
    """
    if axis.dry:
        raise NotImplementedError(
            f"The run {doing}, which asks other stages of the pipeline, and in a dry run these are not there. Leave it "
            "out of the module for the dry run, or dry-run a layout without a pipeline."
        )


def number_of(axis: Axis, name: str) -> int:
    """How often it was asked for in this job, by ranks of the axis that ask alike: of a meeting, or of a run."""
    if axis.size == 1:
        return 0
    me = axis.ranks[axis.rank]
    return int(default_store().add(f"lightning_par/meetings/{axis.ranks}/{name}/{me}", 1))


def _other_order(me: int, about: str, rank: int, of: str) -> str:
    from lightning_par.sharded.rules.gather_report import user_line

    return (
        f"At {user_line()} rank {me} comes to {about or 'a tensor without a name'}, while rank {rank} comes to "
        f"{of or 'one without a name'}: ranks must come to sharded tensors in one order, and over a set, for one, each "
        "process has its own. Write `for name in sorted(names)`, or go through `self.named_parameters()`. What one "
        "rank alone does, as under `if self.trainer.is_global_zero`, must not come to them: ask on all ranks before."
    )
