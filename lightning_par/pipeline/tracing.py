"""A run of a step on fake tensors, which notes what the modules in it cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map

from lightning_par.pipeline.costs import Frame, flops_of, nbytes_of
from lightning_par.pipeline.located import Run
from lightning_par.pipeline.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.rules.table import writes

_UNRUNNABLE = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException)


class FakeRun(Run):
    """Runs torch functions on fakes, within units too.

    Args:
        mode: of the fakes.
        axis: a microbatch axis, or None where the batch is not cut.
    """

    def __init__(self, mode: FakeTensorMode, axis: MicrobatchAxis | None) -> None:
        super().__init__()
        self.mode, self.axis = mode, axis
        self.frames = [Frame("", 0)]
        self.buffers: dict[int, str] = {}  # ids of buffers -> their names
        self.training, self.samples = False, 1
        self.unsized = 0  # functions so far whose result's shape depends on values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            return self._run(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On fakes; where the shape of the result depends on data, on ones."""
        self._note_state(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except _UNRUNNABLE:
            self.unsized += 1
            self.close_modules("the shape of a value in it depends on values")
            result = self._run_on_ones(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:  # some kernels' fake versions want what real ones don't
            inputs = tree_leaves((args, kwargs))
            if isinstance(error, SamplesMixError) or not any(isinstance(x, FakeTensor) for x in inputs):
                raise
            try:
                result = self._run_on_ones(func, args, kwargs)
            except Exception:
                raise error from None
        self.frames[-1].flops += flops_of(func, args, kwargs, result)
        if self.axis is None:
            self.frames[-1].nbytes += nbytes_of(args, kwargs, result)
        return result

    def _run_on_ones(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(x: Any) -> Any:
            return torch.ones(x.shape, dtype=x.dtype) if isinstance(x, FakeTensor) else x

        with unset_fake_temporarily():
            result = func(*tree_map(real, args), **tree_map(real, kwargs))
        return tree_map(lambda x: self.mode.from_tensor(x) if isinstance(x, Tensor) else x, result)

    def _note_state(self, func: Any, args: Any, kwargs: Any) -> None:
        """A buffer that training updates at each call must not be updated once a microbatch."""
        if self.axis is None:
            return
        into = kwargs.get("out")
        if into is None and args and writes(getattr(func, "__name__", "")):
            into = args[0]
        if id(into) in self.buffers and self.training:
            raise SamplesMixError(f"the buffer {self.buffers[id(into)]!r} is updated at each call")

    def enter_module(self, path: str, numel: int) -> None:
        self.frames.append(Frame(path, numel))

    def leave_module(self) -> None:
        frame = self.frames.pop()
        call = frame.call()
        self.frames[-1].flops += call.flops
        self.frames[-1].nbytes += call.nbytes
        self.frames[-1].children.append(call)

    def close_modules(self, why: str) -> None:
        """The module whose own code is running can't be taken apart."""
        for frame in reversed(self.frames[1:]):
            frame.closing = frame.closing or (why, len(frame.children))
            if frame.numel:  # one without parameters is no unit: its code is that of the module around it
                return
