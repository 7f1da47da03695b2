"""May a unit be given a microbatch as if that were the batch? Found out by running it both ways on fakes.

To the step a microbatch is a view of the whole batch: ``x.shape[0]`` is the batch's. A unit runs faster on the plain
tensors beneath, where it sees the microbatch's own size. That is right only if what it computes is the same, and if a
call leaves nothing behind that the next one meets: on one device there is no next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_par.pipeline.program.microbatch_values import of_microbatch
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.call_costs import Frame
from lightning_par.pipeline.trial.samples.by_sample import by_sample
from lightning_par.pipeline.trial.samples.function_calls import Trace, tracing
from lightning_par.pipeline.trial.samples.scripted import scripts_unseen
from lightning_par.pipeline.trial.samples.unit_outline import UnitOutline
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.changes import Change, MappingChange
from lightning_par.python_state.nested_tensors import tensors_in, twin
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis

_DEEP = 5  # of what is stored on a module


def acts_plainly(
    run: Analysis, path: str, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, bool]:
    """Call the unit ``path`` on views of a microbatch.

    Returns:
        Its result, and whether it does the same on the plain tensors beneath.

    Raises:
        SamplesMixError: a call leaves behind what the next one meets, or what counts calls.
    """
    inputs = tensors_in((args, kwargs))
    lead = next((x for x in inputs if isinstance(x, ShardedTensor)), None)
    if lead is None:
        return _called_whole(path, module, partial(call, *args, **kwargs)), True
    given = twin((args, kwargs))  # a cache among the arguments may grow
    outline = UnitOutline(module, given)
    modules = [(f"{path}.{name}".rstrip("."), m) for name, m in module.named_modules()]
    before, reads = Snapshot(modules, hooks=False), run.values_read
    try:
        with tracing(run, inputs) as viewed, scripts_unseen(f"{path!r} calls code"):
            result = call(*args, **kwargs)
            viewed.end(result)
        run.check_fit()
    except Exception as error:
        if not isinstance(run.unfit or error, SamplesMixError):
            raise
        before.restore()
        result = _sample_by_sample(run, module, call, given)
        if result is NotImplemented or run.outputs.said or run.outputs.mixed:
            raise
        run.unfit = None
        return result, True
    drawn, run.draws.drawn = run.draws.drawn, []  # what follows is no part of it
    after, left = Snapshot(modules, hooks=False), before.left()
    _refuse_samples(path, lead, after, left)
    lone = bool(left) or run.draws.owned or run.values_read > reads or outline.words is None
    like = None if lone else (outline.words, viewed.outline, bool(drawn))
    if like in run.tried:
        plain, run.draws.parts = run.tried[like]
        run.draws.drawn = drawn
        return result, plain
    try:
        with _aside(run):
            before.restore()  # it may keep the largest size it has seen, which views have to show it
            plain = _Repeats(run, path, modules, call, given).agree(viewed, lead, before, after, left, bool(drawn))
    finally:
        after.restore()
        run.draws.drawn, run.unfit = drawn, None
    if like is not None and run.values_read == reads:
        run.tried[like] = plain, run.draws.parts
    return result, plain


def _sample_by_sample(run: Analysis, module: nn.Module, call: Callable[..., Any], given: Any) -> Any:
    """What a unit returns that needs samples together; `NotImplemented` where it is not known to act on each."""
    run.draws.drawn, run.draws.owned = [], False
    result = by_sample(run, module, call, *twin(given))
    return NotImplemented if run.draws.drawn or run.draws.owned else result  # nobody knows for which samples that is


class _Repeats:
    """Further calls of a unit, which are no part of the step.

    Args:
        run: the analysis.
        path: the unit's.
        modules: all in it, by name.
        call: calls it.
        given: what the first call was given.
    """

    def __init__(
        self, run: Analysis, path: str, modules: list[tuple[str, nn.Module]], call: Callable[..., Any], given: Any
    ) -> None:
        self._run, self._path, self._modules, self._call, self._given = run, path, modules, call, given

    def agree(
        self, viewed: Trace, lead: ShardedTensor, before: Snapshot, after: Snapshot, left: dict[str, Change], drew: bool
    ) -> bool:
        """Whether calls on plain tensors do what the first call, or another one, did on views.

        Args:
            viewed: what the first call did.
            lead: a view that it was given.
            before: what the unit held before it.
            after: and what it held then.
            left: what that call changed.
            drew: whether it drew.

        Raises:
            SamplesMixError: calls go by what others left, or nobody knows what each microbatch is to draw.
        """
        samples, own, owned = lead.positions.size, lead.positions.count(lead.axis.rank), self._run.draws.owned
        first = self._first_on_plain(before, after, left)
        plain = first is not None and viewed.agrees(first, samples, own)
        if not plain:  # it will see views; and the first call of all may have done more
            after.restore()
            again = self._twice(self._as_views)
            plain = first is not None and again is not None and again.agrees(first, samples, own)
            viewed = viewed if again is None else again
        plain &= not self._run.outputs.of_samples  # of which it says the batch's
        if plain and first is not None and (drew or owned):
            self._run.draws.parts = viewed.parts_drawn(first, samples, own, lead.positions)
        elif owned:  # from which each microbatch would draw anew
            raise _mixed(self._path, f"{self._path!r} draws from a generator of its own")
        return plain

    def _first_on_plain(self, before: Snapshot, after: Snapshot, left: dict[str, Change]) -> Trace | None:
        """What the first of calls on plain tensors does; None where it can't be called so, or leaves something else."""
        start = self._plainly()
        same = start is not None and _alike(left, before.left(), _DEEP + 4, remade=True)
        if left:  # what is stored by the first call alone is no change at each call
            after.restore()
        return self._twice(self._plainly, None if left else start) if same else None

    def _traced(self, given: Any) -> Trace:
        with tracing(self._run, tensors_in(given)) as trace:
            trace.end(self._call(*given[0], **given[1]))
        return trace

    def _plainly(self) -> Trace | None:
        try:
            return self._traced(twin(self._given, of_microbatch))
        except Exception:  # user code that wants the whole batch's size; it will see that
            return None

    def _as_views(self) -> Trace:
        try:
            return self._traced(twin(self._given))
        except Exception as error:
            why = f"{self._path!r} can't be called with what its last call left: {error}"
            raise _mixed(self._path, why) from error

    def _twice(self, call: Callable[[], Trace | None], first: Trace | None = None) -> Trace | None:
        """What the first of two calls did, if it could be called; with ``first`` that was the first one.

        Raises:
            SamplesMixError: the second call did something else, or something is left behind.
        """
        first = first or call()
        between = Snapshot(self._modules, hooks=False)
        second = None if first is None else call()
        if first is None or second is None:
            return None
        if second.calls != first.calls:
            raise _mixed(self._path, f"what {self._path!r} computes depends on its last call")
        for cell in between.cells.values():
            place = _counted(cell, cell.change_unlent())
            if place is not None:
                raise _mixed(self._path, f"{place} changes at each call of {self._path!r}")
        return first


def _called_whole(path: str, module: nn.Module, call: Callable[[], Any]) -> Any:
    """What ``call`` returns, which each microbatch repeats as it is.

    Raises:
        SamplesMixError: it changes what the unit holds, which it would do for each microbatch.
    """
    before = Snapshot([(f"{path}.{name}".rstrip("."), m) for name, m in module.named_modules()], hooks=False)
    result = call()
    left = before.left()
    if left:
        before.restore()
        raise _mixed(path, f"{path!r} changes {min(left)}, as it would for each microbatch")
    return result


def _refuse_samples(path: str, lead: ShardedTensor, after: Snapshot, left: dict[str, Change]) -> None:
    """Raises `SamplesMixError` where a call has left samples behind: the next one meets those of another microbatch."""
    places = [(held.slots[0][0].place(held.slots[0][1]), held.tensor) for held in after.tensors.values()]
    places += [(name, x) for name, change in left.items() for x in tree_leaves(vars(change))]
    for place, x in places:
        if isinstance(x, ShardedTensor) and x.axis is lead.axis:
            raise _mixed(path, f"{place} keeps samples from one call of {path!r} to the next")


def _mixed(path: str, reason: str) -> SamplesMixError:
    error = SamplesMixError(reason)
    error.unit = path
    return error


@contextmanager
def _aside(run: Analysis) -> Iterator[None]:
    """What is computed inside costs nothing and is no part of the step."""
    unsized, frames, casts = run.unsized, run.frames, run.casts
    run.frames, run.casts = [Frame("", 0)], Counter()
    try:
        with run.outputs.again():
            yield
    finally:
        run.unsized, run.frames, run.casts = unsized, frames, casts


def _counted(cell: Any, change: Change | None) -> str | None:
    """Where something was changed."""
    if change is None or cell.fixed:
        return None
    if not isinstance(change, MappingChange):
        return str(cell.name)
    for key in (*change.inplace, *change.deleted):
        return str(cell.place(key))
    for key, value in change.entries.items():
        if key not in cell.before or not _alike(cell.before[key], value, _DEEP):
            return str(cell.place(key))
    return None


def _alike(before: Any, after: Any, depth: int, remade: bool = False) -> bool:
    """Whether two values are the same; with ``remade`` two tensors of one shape and type are."""
    if before is after:
        return True
    if remade and isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and before.dtype == after.dtype
    if type(before) is not type(after) or not depth or isinstance(before, Tensor):
        return False  # a tensor is made anew by each call, of its samples
    alike = partial(_alike, depth=depth - 1, remade=remade)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(alike(before[k], after[k]) for k in before)
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(alike, before, after))
    if hasattr(before, "__dict__") and not callable(before):
        return alike(vars(before), vars(after))
    try:
        return bool(before == after)
    except Exception:  # whatever a class makes of `==`
        return False
