"""Tensors without values, which torch computes shapes with; their module has no public name.

Tensors on ``meta``, which are public, forget the device on which the real ones are.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import handle_torch_function, has_torch_function

from lightning_par.private import recurrent_kernels

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "WITHOUT_VALUE",
    "UnsupportedOperatorException",
    "fakes_as_tensors",
    "unset_fake_temporarily",
]

log = logging.getLogger(fake_tensor.__name__)
"""Where torch tells of what fakes can't run."""

WITHOUT_VALUE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What a fake raises where its value is asked for."""


_aten = torch.ops.aten
_SETS_STORAGE = _aten.set_.source_Storage_storage_offset
_SHAPED = frozenset(
    {
        *(_aten.addmm.default, _aten.sum.default, _aten.mse_loss.default),
        *(_aten._log_softmax.default, _aten._log_softmax_backward_data.default, _aten._softmax_backward_data.default),
        *(_aten.nll_loss_forward.default, _aten.nll_loss_backward.default),
        *(_aten.gelu_backward.default, _aten.silu_backward.default, _aten.tanh_backward.default),
        *(_aten.sigmoid_backward.default, _aten.threshold_backward.default),
    }
)
"""What a step has much of, and kernels that say themselves what shapes come of it. Torch composes these functions of
others, up to a dozen each, which takes several times as long where shapes are new: as in the first trial of a step."""


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Torch's, in which memory is as on real tensors: a layer of an LSTM on CPUs keeps its workspace for backward,
    which torch has as 0 bytes, and what a tensor is set to lie in is freed, which torch keeps among what it knows."""

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._workspaces: dict[Any, int] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SETS_STORAGE:
            return self._uncached(func, types, args, kwargs)
        result: Any = super().dispatch(func, types, args, kwargs or {})
        if func is recurrent_kernels.layer and torch.is_grad_enabled():
            result = *result[:3], self._workspace(args)
        return result

    def cpp_meta_supports_symint(self, func: Any) -> bool:
        """Of any function torch asks it: sizes are never symbols here."""
        return func in _SHAPED or super().cpp_meta_supports_symint(func)

    def _uncached(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        before, self.cache_enabled = self.cache_enabled, False
        try:
            return super().dispatch(func, types, args, kwargs or {})
        finally:
            self.cache_enabled = before

    def _workspace(self, args: Any) -> torch.Tensor:
        key = args[0].shape, args[0].dtype, args[1].shape[0], *map(str, args[7:])
        if key not in self._workspaces:
            self._workspaces[key] = recurrent_kernels.workspace_bytes(args)
        with self:
            return torch.empty(self._workspaces[key], dtype=torch.uint8, device=args[0].device)


def makes_fakes(frame: types.FrameType) -> bool:
    """Whether what runs there describes a tensor, with its gradient, for a fake of it, as the compiler does with all
    that a graph uses. What the user's code asks for the compiler reads in frames of its own."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch._subclasses.")


def active_fakes() -> FakeTensorMode | None:
    """The mode that makes tensors fake now, if one does."""
    found: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return found


@contextlib.contextmanager
def fakes_as_tensors(forget: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, user code does with fakes what it does with tensors, at which torch's own fail.

    They can be copied deeply, one that knows its value, as ``torch.tensor(0.0)`` does, too: torch copies the real
    tensor that it keeps in a mode that makes no real ones. And ``x.data = y`` takes a real ``y``: ``x`` lies in memory
    that stands for its memory from then on.

    Args:
        forget: called with such a ``y``, whose values are not known any more.
    """

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        if has_torch_function((self,)):  # a mode is on, which is told of torch's own way, too
            return handle_torch_function(copied, (self,), self, memo)
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def get_data(self: Any) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    def set_data(self: Any, value: Any) -> None:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            forget(value)
            value = self.fake_mode.from_tensor(value.detach())
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    copied.__name__ = "__deepcopy__"
    FakeTensor.__deepcopy__ = copied  # type: ignore[method-assign]
    FakeTensor.data = property(get_data, set_data)  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__, FakeTensor.data
