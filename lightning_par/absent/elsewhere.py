"""The tensor that another rank holds: all that is known of it without its values.

It has the shape, dtype and device that it would have here, and no memory. Moving, copying, casting it and functions of
single entries give another one; writing to it does nothing here, since the ranks that hold it write the same; reading
its values raises.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_par.absent.base import AbsentTensor
from lightning_par.absent.list_entries import kept_entries
from lightning_par.absent.origin import ElsewhereError, Origin
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.run.located import Run
from lightning_par.private.graph import in_backward
from lightning_par.private.modes import innermost_mode
from lightning_par.private.operators import schema_of, written_arguments
from lightning_par.private.tensors import GRADIENT
from lightning_par.sharded.functions import COPY_OPERATORS, SAME_MEMORY_OPERATORS, operator_of
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor


class Elsewhere(AbsentTensor):
    """A tensor of ``shape`` whose values other ranks hold.

    Args:
        shape: its shape.
        dtype: its dtype.
        device: where it would be on this rank.
        origin: who holds it.
        requires_grad: as of any tensor.
        stride: as of any tensor; without it, that of a contiguous one.

    Example::

        origin = Origin("blocks.3.weight", (1,), axis)
        weight = Elsewhere((4, 4), torch.float32, torch.device("cpu"), origin)
        assert weight.double().dtype == torch.float64 and weight.data_ptr() == 0
    """

    _facts: Origin
    is_whole = True
    """Whether it has all entries of the tensor that its origin names, in their order: a view may not."""

    @staticmethod
    def __new__(
        cls,
        shape: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
        origin: Origin,
        requires_grad: bool = False,
        stride: tuple[int, ...] | None = None,
    ) -> Elsewhere:
        return cls._standing(origin, shape, dtype, device, strides=stride, requires_grad=requires_grad)

    @property
    def origin(self) -> Origin:
        """Who holds it."""
        return self._facts

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, operator_of(func)
        x = args[0] if args else None
        if isinstance(x, Elsewhere) and name in SAME_MEMORY_OPERATORS:
            same = Elsewhere(x.shape, x.dtype, x.device, x.origin, stride=x.stride())
            same.is_whole = x.is_whole
            return same
        if isinstance(x, Elsewhere) and name in COPY_OPERATORS:
            dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device
            origin = replace(x.origin)  # another one: no memory is shared
            return Elsewhere(x.shape, dtype, device, origin, stride=_copy_stride(x, kwargs))
        if name.startswith("_foreach_") and name.endswith("_"):
            return _write_those_here(func, args, kwargs)
        if isinstance(x, Elsewhere) and _writes_to_first_alone(func):
            return _write(func, x, args, kwargs)
        those = [y for y in _flat((args, kwargs)) if isinstance(y, Elsewhere)]
        if name == "equal" and args[0].shape != args[1].shape:
            return False
        if name == "equal" and len(those) == 2 and those[0].origin is those[1].origin:
            return True  # another one may hold the same values, of which this rank knows nothing
        if _is_by_entry(func) and len({y.origin.holders for y in those}) == 1:
            return _computed(func, args, kwargs, those[0].origin)
        if not written_arguments(func) and (given := _brought((args, kwargs))) is not None:
            return func(*given[0], **given[1])
        raise ElsewhereError(_message(those[0], name))

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        asks = Run.current is not None and not Run.current.depth  # a run of a step knows values by their identity
        known = asks or isinstance(value, Elsewhere) or _is_followed()
        like = value if known else Elsewhere(value.shape, value.dtype, value.device, self.origin)
        torch.Tensor.data.__set__(self, like)  # type: ignore[attr-defined]

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        grad: Tensor | None = GRADIENT.__get__(self)
        if grad is None and self.requires_grad:
            if in_backward():
                refuse_in_hooks(self, sys._getframe(1))
            elif Run.current is not None and RunState.current.any_gradient():
                # where earlier batches may have left one
                _refuse_gradient(self, sys._getframe(1), "a step", "on_train_batch_start")
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        GRADIENT.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        GRADIENT.__delete__(self)

    def lend_data(self, x: Tensor) -> bool:
        """``x.data = self`` of a plain ``x``, which torch would let refer to no memory."""
        raise ElsewhereError(_message(self, "data"))

    # Methods that torch's modes would see, were they not defined here.

    def data_ptr(self) -> int:
        asked = None if _is_followed() else RunState.current.memory_of(self)
        if asked is not None:
            return asked.data_ptr()
        if not self.is_whole:
            self._refuse("data_ptr")
        return torch.Tensor.data_ptr(self) if _is_followed() else 0

    def untyped_storage(self) -> Any:
        asked = None if _is_followed() else RunState.current.memory_of(self)
        return torch.Tensor.untyped_storage(self) if asked is None else asked.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        return torch.Tensor.numpy(self, force=force) if _is_followed() else self._refuse("numpy")

    def tolist(self) -> Any:
        return torch.Tensor.tolist(self) if _is_followed() else self._refuse("tolist")

    def _refuse(self, function: str) -> NoReturn:
        raise ElsewhereError(_message(self, function))

    def _made_anew(self, memo: dict[int, Any]) -> Elsewhere:
        return Elsewhere(self.shape, self.dtype, self.device, replace(self.origin), self.requires_grad, self.stride())

    def __reduce_ex__(self, protocol: Any) -> Any:
        asked = RunState.current.memory_of(self)
        if asked is not None:
            return asked.reduced(self, protocol)
        raise TypeError(
            f"{self.origin}, so rank {self.origin.axis.rank} can't pickle it. Save with "
            "`trainer.save_checkpoint(path)`, called on all ranks."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{super().__repr__()[:-1]}, {self.origin})"


def refuse_in_hooks(x: Elsewhere, frame: types.FrameType) -> None:
    """Raises NotImplementedError where a hook of the user's, in ``frame``, looks at the gradient of ``x``."""
    _refuse_gradient(x, frame, "a hook that runs within backward", "on_after_backward or on_before_optimizer_step")


def _refuse_gradient(x: Elsewhere, frame: types.FrameType, who: str, where: str) -> None:
    module = frame.f_globals.get("__name__", "")
    if module.startswith("torch.nn.utils") or not module.startswith(("lightning_par.", "torch.")):
        raise NotImplementedError(
            f"{user_line()}: {who} looks at the gradient of {x.origin.name!r}, which is on another stage of the "
            f"pipeline. Do it in {where}, or use TensorParallelStrategy."
        )


def sharding_of(x: Tensor) -> tuple[int, Positions, Axis] | None:
    """Dim, positions and axis of the shards that ``x``, wherever it is, is used in; None where that is whole."""
    if isinstance(x, Elsewhere):
        return x.origin.sharding
    return x.used_sharding if isinstance(x, ShardedTensor) else None


def is_elsewhere(x: Any) -> bool:
    """Whether ``x`` is a tensor whose values other ranks hold."""
    return isinstance(x, Elsewhere)


def _is_followed() -> bool:
    """Whether a mode is on that brings what is read."""
    return getattr(innermost_mode(), "brings_what_is_elsewhere", False)


def _message(x: Elsewhere, function: str) -> str:
    origin = x.origin
    return (
        f"{origin}; `{function}` can't read it on {origin.axis.name} rank {origin.axis.rank}. Read it in the forward "
        "of the module that it belongs to, or after the Trainer's call, when every rank holds all weights again."
    )


def _brought(value: Any) -> Any:
    """``value`` with what stands for the memory of tensors that are elsewhere, between steps; None where it can't."""

    def asked(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(map(asked, x))
        if isinstance(x, dict):
            return {key: asked(y) for key, y in x.items()}
        found = RunState.current.memory_of(x) if isinstance(x, Elsewhere) else x
        missing.append(found is None and x is not None)
        return found

    missing: list[bool] = []
    given = asked(value)
    return None if any(missing) else given


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


def _copy_stride(x: Tensor, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """How a copy of ``x`` lies."""
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    return like.clone(memory_format=memory_format).stride()


def _is_by_entry(func: Any) -> bool:
    """Whether a function makes each entry of a new tensor of the same entries of its arguments."""
    returns = [str(value.type) for value in schema_of(func).returns]
    return torch.Tag.pointwise in func.tags and not schema_of(func).is_mutable and returns == ["Tensor"]


def _computed(func: Any, args: Any, kwargs: Any, origin: Origin) -> Any:
    """What a function of single entries returns where its arguments are."""

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return type(value)(map(meta, value)) if type(value) in (list, tuple) else value

    result = func(*map(meta, args), **{key: meta(value) for key, value in kwargs.items()})
    device = next(y.device for y in _flat((args, kwargs)) if isinstance(y, Elsewhere))
    return Elsewhere(result.shape, result.dtype, device, replace(origin), stride=result.stride())


def _writes_to_first_alone(func: Any) -> bool:
    return [place for place, _ in written_arguments(func)] == [0]


def _write(func: Any, x: Elsewhere, args: Any, kwargs: Any) -> Elsewhere:
    """Nothing, if the holders can do it; random values are drawn all the same, so that generators stay equal."""
    for other in _flat((args[1:], kwargs)):
        if isinstance(other, Elsewhere) and not set(x.origin.holders) <= set(other.origin.holders):
            raise ElsewhereError(_message(other, operator_of(func)))
    if torch.Tag.nondeterministic_seeded in func.tags:
        func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args[1:], **kwargs)
    return x


def _write_those_here(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an in-place function of lists for the tensors that are here."""
    here = [not isinstance(x, Elsewhere) for x in args[0]]
    if all(here):
        held = next(y for y in _flat((args, kwargs)) if isinstance(y, Elsewhere))
        raise ElsewhereError(_message(held, operator_of(func)))
    if any(here):
        args, kwargs = kept_entries(here, args, kwargs)
        func(*args, **kwargs)
    return None
