"""A run of a step on fake tensors, which notes what the modules in it cost."""

from __future__ import annotations

from collections.abc import Sequence
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

from lightning_par.pipeline.calls import Trace, tracing
from lightning_par.pipeline.costs import Frame, flops_of, nbytes_of
from lightning_par.pipeline.located import Run, is_metadata
from lightning_par.pipeline.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.values import of_microbatch
from lightning_par.rules.table import user_line, writes
from lightning_par.view import ShardedTensor

_HOOKED = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
_UNRUNNABLE = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException)


class _Linked(torch.autograd.Function):
    """A tensor whose gradient leads to the tensors that it was made of, by no function that could run on fakes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def linked(x: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """``x``, whose gradient leads to those of the ``sources`` that want one."""
    wanting = [source for source in sources if source.requires_grad]
    return _Linked.apply(x, *wanting) if wanting else x


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
        self.trace: Trace | None = None
        self.unsized = 0  # functions so far whose result's shape depends on values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            kwargs = kwargs or {}
            result = self._run(func, args, kwargs)
            if self.trace is not None and not is_metadata(func, getattr(func, "__name__", "")):
                self.trace.note(func, args, kwargs, result)
            return result
        return super().__torch_function__(func, types, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On fakes; where the shape of the result depends on data, on ones."""
        self._note_state(func, args, kwargs)
        if self.axis is not None and self.training and getattr(func, "__name__", "") in _HOOKED:
            self._try_hook(self.axis, args[0], kwargs["hook"] if "hook" in kwargs else args[1])
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

    def _try_hook(self, axis: MicrobatchAxis, x: Tensor, hook: Any) -> None:
        """A hook meets the gradients of a microbatch's samples: all that it may do is to change each by itself.

        Raises:
            SamplesMixError: it does something else, such as to note what it sees, which counts microbatches.
        """
        what = f"a hook on a gradient, registered at {user_line()},"
        if not isinstance(x, ShardedTensor):
            raise SamplesMixError(f"{what} meets a microbatch's share of it")
        sums, own = axis.sums, x.positions.count(axis.rank)
        local = of_microbatch(x).detach().clone()
        view = x.with_local(local)
        with self.within(), torch.no_grad():
            with tracing(self, [view]) as viewed:
                result = hook(view)
            with tracing(self, [local]) as plain:
                hook(local)
        if result is None or axis.sums > sums or not viewed.agrees(plain, x.positions.size, own):
            raise SamplesMixError(f"{what} needs the gradient of the whole batch")

    def _run_on_ones(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result's gradient leads where that of ones leads, and it lies where the values would."""
        leaves = tree_leaves((args, kwargs))
        if self.axis is not None and any(isinstance(x, ShardedTensor) for x in leaves):
            name = getattr(func, "__name__", func)
            raise SamplesMixError(f"how many values `{name}` returns at {user_line()} depends on values of the samples")
        fakes = [x for x in leaves if isinstance(x, FakeTensor)]
        ones = {id(x): torch.ones(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad) for x in fakes}

        def real(x: Any) -> Any:
            return ones.get(id(x), x)

        with unset_fake_temporarily():
            result = func(*tree_map(real, args), **tree_map(real, kwargs))
        return tree_map(lambda x: self._faked(x, fakes) if isinstance(x, Tensor) else x, result)

    def _faked(self, x: Tensor, sources: list[FakeTensor]) -> Tensor:
        device = sources[0].device if sources else x.device
        with self.mode:
            fake = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=device)
        return linked(fake, sources) if x.requires_grad else fake

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
