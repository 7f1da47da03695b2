"""Units whose functions need samples together, though they act on each by itself, as experts do that sort their tokens.

Their code is tried with values, whole and on the parts of a batch, as a function without a rule is: see
`lightning_par.sharded.rules.sample_trial`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.trial.fake_step import FakeRun
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.private.module_calls import CALL
from lightning_par.private.module_hooks import has_hooks, hooks_on_all
from lightning_par.private.modules import buffers_of, parameters_of
from lightning_par.private.operators import schema_of
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.sharded.functions import MIXING_OPERATORS, operator_of
from lightning_par.sharded.rules.part_trial import LOUD, MISSING, REPEATED, Refused
from lightning_par.sharded.rules.sample_trial import run_by_sample
from lightning_par.sharded.user_classes import put_on, users_class
from lightning_par.trial.memo import Memo
from lightning_par.trial.module_copy import stand_in

_MOST = 2_000_000_000  # weights in a trial, of 4 bytes or 8; what is free differs from rank to rank, which must agree
_MOST_IN_PLAN = 100_000_000  # where there may be no more than a laptop
_OF_TORCH = {*vars(nn.Module()), CALL} - {"training"}


def by_sample(run: FakeRun, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What the unit ``module`` returns of a microbatch, where it acts by sample; else `NotImplemented`.

    Args:
        run: in which values that are read are counted.
        module: on fakes.
        call: calls it.
        args: with views of a microbatch's samples.
        kwargs: likewise.
    """
    inner, reads = [*module.modules()], run.values_read
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if (
        not given  # in an object of its own, or by the module itself
        or any(map(has_hooks, inner))
        or hooks_on_all()
        or not all(x.is_floating_point() or x.dtype == torch.bool for x in given)  # whole numbers would be 0 and 1
    ):
        return NotImplemented
    size = sum(p.numel() for p in module.parameters())
    if run.untried is not None and _MOST_IN_PLAN < size <= _MOST:
        run.untried.append(f"whether a {type(module).__name__} of {size:,} weights acts on each sample by itself")
        return NotImplemented
    if size > _MOST:
        return NotImplemented
    if run.axis is not None:
        run.axis.tried = True
    code = _known[_described(inner)]
    code.module, code.call, code.device = module, call, given[0].device
    try:
        result = run_by_sample(code, args, kwargs)
    finally:
        code.module = code.call = code.copy = None
    return NotImplemented if run.values_read > reads else result  # other values may lead elsewhere


def _described(inner: list[nn.Module]) -> Any:
    """Equal for modules of the same code and the same content, with tensors of the same shapes."""

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype
        content = getattr(value, "__dict__", value)  # as of a configuration
        return object() if tensors_in(content) else (type(value), repr(content))

    return tuple(
        (type(m), *((name, described(x)) for name, x in parameters_of(m).items()),
         *map(_of_buffer, buffers_of(m).values()),
         *((name, described(x)) for name, x in vars(m).items() if name not in _OF_TORCH))
        for m in inner
    )  # fmt: skip


class _NoReductions(TorchDispatchMode):
    """Refuses code that makes one value of several samples: a trial may not meet the values for which it matters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reduces_first_dim(func, args, kwargs):
            raise Refused
        return func(*args, **kwargs)


def _reduces_first_dim(func: Any, args: Any, kwargs: Any) -> bool:
    name, x = operator_of(func), args[0] if args else None
    if name not in MIXING_OPERATORS or not isinstance(x, Tensor) or not x.ndim or isinstance((*args, None)[1], Tensor):
        return False
    if not x.is_floating_point() and name == "sum" or x.ndim == 1 and name == "cumsum":  # they count
        return False
    values = {a.name: v for a, v in zip(schema_of(func).arguments, args)} | kwargs
    dims = values.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(x.ndim)
    return 0 in [dim % x.ndim for dim in dims] and x.shape[0] > 1


def _of_buffer(x: Tensor | None) -> object:
    return None if x is None else object()  # its values may decide


class Code:
    """The code of a module, which is run with random weights, or on fakes with the module's own.

    Attributes:
        seeds: of trials beside those of functions.
        largest: elements of the arguments in a trial.
        dtype: of the values in a trial.
        device: where it is run.
    """

    seeds = (LOUD, REPEATED, MISSING)

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.module: nn.Module | None = None
        self.call: Callable[..., Any] | None = None
        self.copy: nn.Module | None = None
        self.dtype = torch.float64

    @property
    def largest(self) -> int:
        return 4_000_000 if self.device.type == "cpu" else 1_000_000_000

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.module is not None and self.call is not None
        if any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs))):
            return self.call(*args, **kwargs)
        if self.copy is None:
            self._make(self.module)
        assert self.copy is not None
        before = Snapshot([*self.copy.named_modules()], hooks=False)
        with _NoReductions(), torch.autocast(self.device.type, enabled=False):  # rounding would hide and show too much
            result = self.copy(*self._cast(args), **self._cast(kwargs))
        if any(cell.change_unlent() is not None for cell in before.cells.values() if not cell.fixed):
            raise Refused
        return result

    def _make(self, module: nn.Module) -> None:
        floats = {x.dtype for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()}
        self.dtype = torch.float64 if floats == {torch.float64} else torch.float32
        generator = torch.Generator().manual_seed(0)

        def real(x: Tensor) -> Tensor:
            if not isinstance(x, FakeTensor):
                return x.detach().to(self.device, self.dtype if x.is_floating_point() else x.dtype)
            if not x.is_floating_point():
                raise Refused  # nobody knows its values here
            scale = 0.5 / max(1.0, float(x.shape[-1]) ** 0.5) if x.ndim > 1 else 0.5
            values = scale * torch.randn(x.shape, generator=generator, dtype=self.dtype)
            if not isinstance(x, nn.Parameter):
                return values.abs().to(self.device)  # a scale of roots, or what else is no number below 0
            return put_on(nn.Parameter(values.to(self.device), requires_grad=x.requires_grad), users_class(x))

        self.copy = stand_in(module, real, (), lambda *args, **kwargs: None)

    def _cast(self, value: Any) -> Any:
        return map_tensors(lambda x: x.to(self.device, self.dtype if x.is_floating_point() else x.dtype), value)


_known: Memo[Any, Code] = Memo(lambda _: Code())
