"""What units log, print by the module or give to loggers in a recorded run, and the sums over samples that they make
for that alone.

A unit that is given a microbatch says something of that. Where it is a sum or a mean over samples, the microbatches'
add up to the batch's; where it is samples, they are put one after another; and what no samples are in is the same for
all. Anything else needs the batch whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.program.program import Shares
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.samples.function_calls import Trace
from lightning_par.pipeline.trial.samples.sample_sums import Share
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.nested_tensors import returned_tensors, tensors_in
from lightning_par.sharded.functions import HOOKS, LINEAR, READS, SCALES, SUMS, name_of
from lightning_par.sharded.rules.lookup import user_line, writes
from lightning_par.sharded.tensor import ShardedTensor

_SUMS = SUMS & (LINEAR | SCALES | {"nansum", "count_nonzero"})  # of which no other tensor tells the denominator


class UnitLogs:
    """Hears what units say in a recorded run.

    Attributes:
        any: whether any has said something.
        sums: units that sum over samples for that, and what they say.

    Example::

        outputs = UnitLogs()
        with outputs.unit("net.0"):
            ...  # which calls `outputs.ran` for every function, and `outputs.say`
            shares = outputs.end()
    """

    def __init__(self) -> None:
        self.any = False
        self.sums: dict[str, str] = {}
        self.path: str | None = None
        self._begin(None)

    def _begin(self, path: str | None) -> None:
        self.path = path
        self.said: list[str] = []  # in words, by the unit that runs
        self.of_samples = False  # whether any of it is made of samples
        self.shares: tuple[list[bool], list[bool]] = [], []
        self.mixed: str | None = None  # why what it says can't be put together
        self._used: str | None = None  # where a sum is used for something else
        self._tags: dict[int, str] = {}
        self._kept: list[Any] = []  # ids stay valid as long as the objects live
        self._counts = True

    @contextmanager
    def unit(self, path: str) -> Iterator[None]:
        """The unit ``path`` runs inside."""
        self._begin(path)
        try:
            yield
        finally:
            self.path, self._tags, self._kept = None, {}, []

    @contextmanager
    def again(self) -> Iterator[None]:
        """The unit is called once more inside, which is no part of the step."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, reduced: bool) -> None:
        """The unit has called ``func``; ``reduced`` if that summed over samples."""
        if self.path is None or not self._counts or not (reduced or self._tags):
            return
        name, given = name_of(func), tensors_in((args, kwargs))
        if name in HOOKS:
            self._use()
        if not reduced and not any(id(x) in self._tags for x in given):
            return
        if name in READS or writes(name) or "out" in kwargs:
            self._use()
        share = Share.after(func, args, kwargs, self._tags, reduced)
        plain = not share.scaled and (not reduced or name in _SUMS)
        for x in tensors_in(result):
            if isinstance(x, ShardedTensor):
                self._use()
            elif share.tag is not None:
                self._tags[id(x)] = share.tag if plain else Share.MIXED
                self._kept.append(x)

    def _use(self) -> None:
        self._used = self._used or user_line()

    def say(self, what: str, given: Any, trace: Trace | None, to_logger: bool = False) -> None:
        """The unit says something.

        Args:
            what: it calls for that.
            given: what it says.
            trace: of what the unit calls.
            to_logger: whether a logger is given it.
        """
        self.any = True
        if trace is not None:
            trace.note(("say", what), given, {}, None)
        if self.path is None or not self._counts:
            return
        self.said.append(f"{what} at {user_line()}")
        for x in tensors_in(given):
            tag = self._tags.get(id(x))
            self.of_samples |= tag is not None or isinstance(x, ShardedTensor)
            self.shares[to_logger].append(tag == Share.SHARE)
            if tag == Share.MIXED:
                self.mixes(f"calls {self.said[-1]} with what is no sum or mean over the samples of a batch")
        if any(isinstance(x, nn.Module) for x in tree_leaves(given)):
            self.mixes(f"calls {self.said[-1]} with a metric")

    def write(self, given: Iterable[Tensor]) -> None:
        """What was said last is a text, with these in it."""
        if self._counts and any(isinstance(x, ShardedTensor) or id(x) in self._tags for x in given):
            self.mixes(f"calls {self.said[-1]} with samples")

    def mixes(self, why: str) -> None:
        """What the unit says, or keeps in a metric, can't be put together of microbatches."""
        self.mixed = self.mixed or why

    def end(self) -> Shares | None:
        """What the unit has said of a microbatch; None if nothing.

        Raises:
            SamplesMixError: it says what needs the samples together.
        """
        if self.mixed is not None:
            raise SamplesMixError(f"{self.path!r} {self.mixed}")
        return (tuple(self.shares[0]), tuple(self.shares[1])) if self.said else None

    def alone(self, result: Any) -> bool:
        """Whether nothing of the sums over samples that the unit made goes anywhere but to what it says."""
        path, returned = self.path, returned_tensors(result)
        if path is None or not self.said or self._used is not None or any(id(x) in self._tags for x in returned):
            return False
        self.sums.setdefault(path, self.said[0])
        return True
