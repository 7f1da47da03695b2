"""Where the ranks of a run are: each posts what it comes to, so that who waits for it knows when it won't come."""

from __future__ import annotations

import json
from collections import Counter

import torch.distributed as dist

from lightning_par.mesh.progress import Progress
from lightning_par.private.process_groups import default_store


class Whereabouts:
    """What this rank of a run has come to, in order, for others to see.

    All ranks come to the same in one order. A rank that has come to something that another has not yet come to, while
    that one waits for it, has left out what it waits for.

    Example::

        whereabouts = Whereabouts()
        whereabouts.run = 1  # alike on all ranks
        whereabouts.come("batch", axis.ranks, "came to the next batch")
        missed = whereabouts.passed_by(1)  # what rank 1 came to, where it has left this rank behind
    """

    def __init__(self) -> None:
        self.run: int | None = None  # which of the job; None before it is known
        self._counts: Counter[str] = Counter()
        self._last = ""  # what it came to

    def come(self, kind: str, ranks: tuple[int, ...], doing: str) -> None:
        """Post that this rank comes to something. No rank waits.

        Args:
            kind: of what it comes to.
            ranks: who must come, too.
            doing: the same in words, in the past tense.
        """
        Progress.current.come(kind, ranks, doing)
        if self.run is None or len(ranks) == 1 or not dist.is_initialized():
            return
        what = f"{kind} {ranks}"
        self._counts[what] += 1
        self._last = doing
        default_store().set(_key(dist.get_rank()), json.dumps((self.run, what, ranks, self._counts[what], doing)))

    def end(self, ranks: tuple[int, ...], error: BaseException) -> None:
        """Post that this rank ends with ``error``, and what it came to before: whoever waits, waits in vain."""
        self.come("exception", ranks, f"{self._last}, and ended with {type(error).__name__}".removeprefix(", and "))

    def passed_by(self, rank: int) -> str | None:
        """What ``rank`` has come to without this rank, which must come, too; None where it may be still on its way."""
        store = default_store()
        if self.run is None or not store.check([_key(rank)]):
            return None
        run, what, ranks, count, doing = json.loads(store.get(_key(rank)))
        left = run == self.run and dist.get_rank() in ranks and self._counts[what] < count
        return str(doing) if left else None


def _key(rank: int) -> str:
    return f"lightning_par/whereabouts/{rank}"
