"""In which order one rank runs its stages: one generator a schedule.

The orders are those of ``torch.distributed.pipelining.schedules`` wherever torch gives one, and exist for any number of
microbatches: an order for more is made and what is too much left out. Leaving out whole microbatches can neither make a
cycle nor change the order of the messages that stay.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

Op = Literal["F", "B", "I", "W"]
"""Forward, whole backward, backward of inputs only, backward of weights only."""
_WORDS = {"F": "forward", "B": "backward", "I": "backward of the inputs", "W": "backward of the weights"}


@dataclass(frozen=True)
class Action:
    """One op of one stage on one microbatch.

    Example::

        assert str(Action("F", stage=0, microbatch=3)) == "F0.3"
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"

    @property
    def what(self) -> str:
        """The same in words."""
        return f"the {_WORDS[self.op]} of stage {self.stage}, microbatch {self.microbatch}"


def gpipe(rank: int, ranks: int, stages: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965)."""
    return [Action(op, rank, i) for op in ("F", "B") for i in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, stages: int, microbatches: int) -> list[Action]:
    """A backward as soon as there can be one, so that rank i holds at most p - i microbatches (arXiv 2104.04473)."""
    warmup = min(ranks - rank, microbatches)
    order = [Action("F", rank, i) for i in range(warmup)]
    for i in range(microbatches):
        order.append(Action("B", rank, i))
        if warmup + i < microbatches:
            order.append(Action("F", rank, warmup + i))
    return order


def interleaved(rank: int, ranks: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B over several stages a rank, which cuts the bubble by their number (arXiv 2104.04473, section 2.2)."""
    return _in_rounds(rank, ranks, stages, microbatches, split=False)


def interleaved_zero_bubble(rank: int, ranks: int, stages: int, microbatches: int) -> list[Action]:
    """Interleaved, with the weights' part of each backward moved to where a rank would wait (arXiv 2401.10241)."""
    return _in_rounds(rank, ranks, stages, microbatches, split=True)


def _in_rounds(rank: int, ranks: int, stages: int, microbatches: int, split: bool) -> list[Action]:
    chunks = stages // ranks
    rounds = max(1, microbatches // ranks)
    size = -(-microbatches // rounds)  # microbatches a round: each runs through one chunk before the next chunk begins
    total = chunks * rounds * size

    def at(op: Op, step: int) -> Action:
        round_, within = divmod(step, size * chunks)
        chunk, i = divmod(within, size)
        return Action(op, (chunk if op == "F" else chunks - 1 - chunk) * ranks + rank, round_ * size + i)

    warmup = min((chunks - 1) * size + (1 if split else 2) * (ranks - 1 - rank), total)
    order = [at("F", step) for step in range(warmup)]
    for step in range(total):
        if warmup + step < total:
            order.append(at("F", warmup + step))
        order.append(at("I" if split else "B", step))
        if split and step >= rank:
            order.append(at("W", step - rank))
    if split:
        order += [at("W", step) for step in range(max(0, total - rank), total)]
    return [action for action in order if action.microbatch < microbatches]


def zbv(rank: int, ranks: int, stages: int, microbatches: int) -> list[Action]:
    """Two stages a rank in a V, the weights' parts filling the waits (arXiv 2401.10241, section 6)."""
    count = max(2 * ranks - 1, microbatches)
    stage = (rank, stages - 1 - rank)
    done = {(op, chunk): 0 for op in ("F", "I", "W") for chunk in (0, 1)}
    order: list[Action] = []

    def run(chunk: int, *ops: Op) -> None:
        for op in ops:
            order.append(Action(op, stage[chunk], done[op, chunk]))
            done[op, chunk] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run(0, "F")
    for _ in range(rank):
        run(1, "F")
        run(0, "F")
    for _ in range(ranks - rank):
        run(1, "F", "I", "W")
    while done["F", 1] < done["F", 0] or done["F", 0] < count:
        if done["F", 0] < count:
            run(0, "F")
        run(0, "I", "W")
        run(1, "F", "I", "W")
    for _ in range(rank):
        run(0, "I")
        run(1, "I")
    for _ in range(ranks - rank):
        run(0, "I", "W")
    for chunk in (1, 0):
        while done["W", chunk] < done["I", chunk]:
            run(chunk, "W")
    return [action for action in order if action.microbatch < microbatches]


def forwards(placement: tuple[int, ...], microbatches: int) -> list[list[Action]]:
    """The forwards of all ranks under any placement: each rank takes, of what has arrived, the deepest stage.

    Values from one rank are taken in the order in which they came, so the order of messages holds.
    """
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    arrived: dict[tuple[int, int], deque[tuple[int, int]]] = {
        (placement[0], -1): deque((0, i) for i in range(microbatches))
    }
    while any(arrived.values()):
        taken: dict[int, tuple[tuple[int, int], int]] = {}
        for (rank, source), queue in arrived.items():
            if queue:
                taken[rank] = max(taken.get(rank, ((-1, 0), -1)), (queue[0], source))
        for rank, ((stage, i), source) in taken.items():
            arrived[rank, source].popleft()
            orders[rank].append(Action("F", stage, i))
            if stage + 1 < len(placement):
                arrived.setdefault((placement[stage + 1], rank), deque()).append((stage + 1, i))
    return orders


def there_and_back(placement: tuple[int, ...], microbatches: int) -> list[list[Action]]:
    """All forwards under any placement, then the backwards in the reverse order, in which messages fit as well."""
    orders = forwards(placement, microbatches)
    return [[*order, *(Action("B", f.stage, f.microbatch) for f in reversed(order))] for order in orders]
