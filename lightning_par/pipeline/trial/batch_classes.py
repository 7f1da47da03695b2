"""Tensors of a batch that are of a class of another library's, which says itself what torch functions do with them.

A class keeps to itself where its functions give back plain tensors, as torchvision's `tv_tensors.Image` does. Each run
of a step has the batch's own objects, so that the class is asked as on one device; values of the model are plain. Only
samples of a microbatch are handed to functions as plain tensors: where the class has been asked, and was torch.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.tensor_classes import class_of, plain
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.user_classes import own_ways
from lightning_par.trial.step import Step


class BatchClasses:
    """Of the tensors of one batch.

    Attributes:
        other: in words, the first thing that a class does otherwise than torch; empty where all are torch's.

    Args:
        step: on the batch.

    Raises:
        NoScheduleError: a tensor holds others, or its operations are not torch's.
    """

    def __init__(self, step: Step) -> None:
        self.other = ""
        for x in tensors_in(step.batch):
            kind = class_of(x)
            if kind is None:
                continue
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensors_in(list(vars(x).values())):  # type: ignore[attr-defined]
                raise NoScheduleError(
                    f"{step.name} is given a {_name(kind)} in its batch, which holds more than its values, or does "
                    "itself what torch does below the level of functions: a pipeline does not follow that from stage "
                    "to stage. Take plain tensors in on_after_batch_transfer, or use TensorParallelStrategy."
                )
            if x.ndim and x.shape[0] == step.samples:
                self.other = self.other or _other_than_torch(x, kind)

    def run(self, call: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func`` as classes among its arguments have it, which find ``call(func, args, kwargs)`` there.

        Fakes go with no classes but torch's: that is given plain tensors.
        """
        if not any(map(class_of, tensors_in((args, kwargs)))):
            return call(func, args, kwargs)
        asking = _Asking(call)
        with asking:
            result = func(*args, **kwargs)
        if not (asking.is_torch or self.other):
            names = ", ".join(sorted({_name(kind) for x in tensors_in((args, kwargs)) if (kind := class_of(x))}))
            self.other = f"{names} does otherwise than torch with `{getattr(func, '__name__', func)}` at {user_line()}"
        return result

    def refuse_parts(self) -> None:
        """Raises `SamplesMixError` where parts of the batch are no plain tensors to torch's functions."""
        if self.other:
            raise SamplesMixError(self.other)


def _other_than_torch(x: Tensor, kind: type) -> str:
    """What of ``x``, beside what its class does with torch's functions, a view of its samples has not."""
    if vars(x):
        return f"a {_name(kind)} of the batch has attributes, which may be of its samples"
    for name in own_ways(kind):
        if name != "__torch_function__" and not _tells_the_same(x, kind, name):
            return f"a {_name(kind)} of the batch has its own {name}"
    return ""


def _tells_the_same(x: Tensor, kind: type, name: str) -> bool:
    """Whether a property, as one for the shape, is what torch's is."""
    if not isinstance(getattr_static(kind, name), property):
        return False
    ours, torchs = getattr(x, name), getattr(plain(x), name)
    return not isinstance(torchs, Tensor) and bool(ours == torchs)


def classes_of(step: Step) -> BatchClasses | None:
    """Those in the batch of ``step``, None where all is torch's."""
    return BatchClasses(step) if any(map(class_of, tensors_in(step.batch))) else None


def _name(kind: type) -> str:
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


class _Asking(TorchFunctionMode):
    """Whether the classes that one function asks call it once, on what they are given, and return what it does.

    Args:
        call: runs a function of plain tensors.

    Attributes:
        is_torch: whether that is so.
    """

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._call = call
        self.is_torch = True
        self._asked: tuple[Any, list[Any]] | None = None
        self._results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._asked is None:
            return self._ask(func, types, args, kwargs)
        self.is_torch &= (func, [*map(id, (*args, *kwargs.values()))]) == self._asked
        self._results.append(self._call(func, *map_tensors(plain, (args, kwargs))))
        return self._results[-1]

    def _ask(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._asked = func, [*map(id, (*args, *kwargs.values()))]
        if len(types) != 1:  # torch asks none, or several
            self.is_torch = not types
            return self._call(func, *map_tensors(plain, (args, kwargs)))
        TorchFunctionMode.__enter__(self)
        try:
            result = types[0].__torch_function__(func, types, args, kwargs)
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)
        self.is_torch &= len(self._results) == 1 and _are_same(self._results[0], result)
        return result


def _are_same(result: Any, given_back: Any) -> bool:
    """Whether a class has given back a ``result`` of torch's, or the same as plain tensors."""
    if result is given_back:
        return True
    ours, theirs = tensors_in(result), tensors_in(given_back)
    if len(ours) != len(theirs) or not ours or type(result) is not type(given_back) and not isinstance(result, Tensor):
        return False
    return all(a is b or class_of(b) is None and _share_all(a, b) for a, b in zip(ours, theirs, strict=True))


def _share_all(a: Tensor, b: Tensor) -> bool:
    same = memory_reference(a) is not None and memory_reference(a) == memory_reference(b)
    return same and a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
