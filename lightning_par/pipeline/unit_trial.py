"""May a unit be given a microbatch as if that were the batch? Found out by running it both ways on fakes.

To the step a microbatch is a view of the whole batch: ``x.shape[0]`` is the batch's. A unit runs faster on the plain
tensors beneath, where it sees the microbatch's own size. That is right only if what it computes is the same, and if a
call leaves nothing behind that the next one meets: on one device there is no next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from lightning_par.pipeline.changes import Change, MappingChange
from lightning_par.pipeline.constants import constants_of
from lightning_par.pipeline.microbatch import SamplesMixError
from lightning_par.pipeline.structure import map_tensors, tensors_in
from lightning_par.pipeline.values import of_microbatch
from lightning_par.pipeline.watch import Snapshot
from lightning_par.private import TorchDispatchMode

if TYPE_CHECKING:
    from lightning_par.pipeline.analysis import Analysis

_NOTHING_DONE = frozenset(("aten::detach", "aten::alias", "aten::lift_fresh"))
_DEEP = 5  # of what is stored on a module


class Trace(TorchDispatchMode):
    """What is computed inside, on parts: the kernels in order, what they are given, and where that came from.

    Two traces agree if the same was computed from the same tensors.

    Args:
        inputs: whose places count, not which tensors they are.

    Example::

        x = torch.ones(2)
        with Trace([x]) as first:
            x + 1
        with Trace([y := torch.ones(2)]) as second:
            y + 1
        assert first.calls == second.calls
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._known: dict[int, Any] = {id(x): ("given", n) for n, x in enumerate(inputs)}
        self._kept: list[Any] = [inputs]  # ids stay valid as long as the objects live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name in _NOTHING_DONE and isinstance(result, Tensor):
            self._known[id(result)] = self._name(args[0])
        else:
            self.calls.append((str(func), tree_map(self._name, (args, kwargs))))
            for n, x in enumerate(tensors_in(result)):
                self._known.setdefault(id(x), ("made", len(self.calls), n))
        self._kept.append((args, kwargs, result))
        return result

    def _name(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
        if id(value) not in self._known:
            fake = isinstance(value, FakeTensor)
            self._known[id(value)] = ("fake", id(value)) if fake else constants_of(value, lambda _: False)
        return self._known[id(value)]


def acts_plainly(
    run: Analysis, path: str, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, bool]:
    """Call the unit ``path`` on views of a microbatch.

    Returns:
        Its result, and whether it does the same on the plain tensors beneath.

    Raises:
        SamplesMixError: a call leaves behind what the next one meets, or what counts calls.
    """
    beneath = [of_microbatch(x) for x in tensors_in((args, kwargs))]
    plain_args, plain_kwargs = map_tensors(of_microbatch, (args, kwargs))
    with Trace(beneath) as viewed:
        result = call(*args, **kwargs)
    modules = [(f"{path}.{name}".rstrip("."), m) for name, m in module.named_modules()]
    after = Snapshot(modules, None)
    try:
        with _aside(run):
            first = _traced(beneath, call, plain_args, plain_kwargs)
            between = Snapshot(modules, None)
            second = _traced(beneath, call, plain_args, plain_kwargs)
            if first is not None and second != first:
                raise _mixed(path, f"what {path!r} computes depends on its last call")
            for cell in between.cells.values():
                place = _counted(cell, cell.change_unlent())
                if place is not None:
                    raise _mixed(path, f"{place} changes at each call of {path!r}")
            if first is not None and viewed.calls != first:  # the first call of all may do more
                with Trace(beneath) as viewed:
                    call(*args, **kwargs)
    finally:
        after.restore()
    return result, viewed.calls == first


def _mixed(path: str, reason: str) -> SamplesMixError:
    error = SamplesMixError(reason)
    error.unit = path
    return error


def _traced(inputs: list[Tensor], call: Callable[..., Any], args: Any, kwargs: Any) -> list[Any] | None:
    try:
        with Trace(inputs) as trace:
            call(*args, **kwargs)
    except Exception:  # user code that wants the whole batch's size; it will see that
        return None
    return trace.calls


@contextmanager
def _aside(run: Analysis) -> Iterator[None]:
    """What is computed inside costs nothing and is no part of the step."""
    from lightning_par.pipeline.costs import Frame

    unsized, frames = run.unsized, run.frames
    run.frames = [Frame("", 0)]
    try:
        yield
    finally:
        run.unsized, run.frames = unsized, frames


def _counted(cell: Any, change: Change | None) -> str | None:
    """Where something was changed that is no tensor made anew by each call."""
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


def _alike(before: Any, after: Any, depth: int) -> bool:
    """Whether two values are the same but for the tensors in them."""
    if before is after or isinstance(before, Tensor) and isinstance(after, Tensor):
        return True
    if type(before) is not type(after) or not depth:
        return False
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(_alike(before[k], after[k], depth - 1) for k in before)
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(_alike(a, b, depth - 1) for a, b in zip(before, after))
    if hasattr(before, "__dict__") and not callable(before):
        return _alike(vars(before), vars(after), depth - 1)
    try:
        return bool(before == after)
    except Exception:  # whatever a class makes of `==`
        return False
