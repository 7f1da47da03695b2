"""An optimizer's step, followed function by function: it sees the tensors of one device, whatever it does.

Functions that treat every element by itself run on the parts; reductions run by their rules; what may hand out views or
addresses is given whole tensors, which are cut again when the step ends. Nothing is believed of the optimizer: a habit
that begins at its thousandth step, or at a size that no trial had, is followed when it begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.optim import lost_writes
from lightning_par.optim.function_facts import Effect, Function, function_of
from lightning_par.optim.gathered_parts import Wholes
from lightning_par.private.compiler import uncompiled
from lightning_par.private.modes import DisableTorchFunctionSubclass, innermost_mode
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.tensors import set_data
from lightning_par.sharded.rules import lookup
from lightning_par.sharded.rules.gather_report import on_gather
from lightning_par.sharded.tensor import ShardedTensor, moves

_LISTS = (list, tuple)
_BY_RULE = (Effect.BY_ELEMENT, Effect.LISTS, Effect.NEW)
"""Kinds whose rules need no communication."""

_entered: ContextVar[Following | None] = ContextVar("following", default=None)  # of a thread, as torch's modes are


class Following(TorchFunctionMode):
    """While it is entered, functions of sharded tensors do what they do on one device.

    Example::

        with Following():
            p.add_(p.grad, alpha=-0.1)  # on parts
            if p.grad.norm() > 20:  # with one all-reduce
                p.view(-1)[0] = 0  # on a whole, which is cut at the end
    """

    def __init__(self) -> None:
        super().__init__()
        self.wholes = Wholes()
        self._paused = False

    @staticmethod
    def current() -> Following | None:
        """The one that is entered, and not suspended."""
        return _entered.get()

    def __enter__(self) -> Any:
        self._before = _entered.set(self)
        self._eager = uncompiled()  # or functions would not come by
        self._eager.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._eager.__exit__(*exception)
        _entered.reset(self._before)
        self.wholes.cut()

    def away(self, closure: Callable[[], Any]) -> Any:
        """Run the user's ``closure`` out of the step."""
        with self.suspended():
            return closure()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, tensors are what they are between steps."""
        self.wholes.cut()
        alone = innermost_mode() is self  # under another mode it can't be left, and is paused
        outer, paused = _entered.set(None), self._paused
        if alone:
            super().__exit__(None, None, None)
        self._eager.__exit__(None, None, None)
        self._paused = True
        try:
            yield
        finally:
            _entered.reset(outer)
            self._paused = paused
            self._eager = uncompiled()
            self._eager.__enter__()
            if alone:
                super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not _has_parts(args) and not (kwargs and _has_parts(kwargs.values())):
            return func(*args, **kwargs)
        return self.on_parts(func, function_of(func), args, kwargs)

    def on_parts(self, func: Any, function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``func``, of which some arguments are sharded."""
        if function.name == "data":
            return lookup.dispatch(func, args, kwargs)
        if func == set_data and isinstance(args[0], ShardedTensor):
            return self._set_data(*args)
        if function.kind is Effect.METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lost_writes.refuse(func, args, kwargs)
        if torch.is_grad_enabled() and _wants_gradient((args, kwargs)):
            self.wholes.cut()
            return lookup.dispatch(func, args, kwargs)  # as in the user's own step, whose gradients reach the parts
        if self.wholes:
            return self._beside_wholes(func, function, args, kwargs)
        return self._run(func, function, args, kwargs)

    def _set_data(self, x: ShardedTensor, value: Tensor) -> None:
        """``x.data = value``: from now on it has other memory than the whole that may stand for it."""
        whole = self.wholes.of(value) if isinstance(value, ShardedTensor) else None
        x.set_own_data(value if whole is None else whole)

    def _run(self, func: Any, function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = function.kind
        result = NotImplemented
        if kind is Effect.BY_ELEMENT:
            result = _by_element(func, function, args, kwargs)
        elif function.name.startswith("_fused_"):
            result = _fused(func, args, kwargs)
        if result is NotImplemented and (kind in _BY_RULE or kind is Effect.READS and not _is_stored(args)):
            result = lookup.on_parts(func, args, dict(kwargs))
        if result is not NotImplemented:
            return result
        if (
            kind in (Effect.READS, Effect.NUMBER)
            or kind is Effect.BY_ELEMENT
            and not _writes_to_parts(function, args, kwargs)
        ):
            return lookup.run_whole(func, args, kwargs)
        return self._on_wholes(func, function, args, kwargs)

    def _beside_wholes(self, func: Any, function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        """Some tensors may stand whole, whose parts are out of date."""
        given: dict[int, tuple[Tensor, ShardedTensor]] = {}

        def standing(x: Any) -> Any:
            whole = self.wholes.of(x) if isinstance(x, ShardedTensor) else None
            if whole is None:
                return x
            given[id(whole)] = whole, x
            return whole

        new_args, new_kwargs = tree_map(standing, (args, kwargs))
        if not given:
            return self._run(func, function, args, kwargs)
        if _has_parts(new_args) or _has_parts(new_kwargs.values()):
            result = self._run(func, function, new_args, new_kwargs)
        else:
            result = func(*new_args, **new_kwargs)
        return self._returned(function, result, given)

    def _on_wholes(self, func: Any, function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with tensors that stand whole from now on."""
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor)]
        if any(moves(x) and x.axis.size > 1 for x in found):
            on_gather(func, found)
        wholes = {id(x): self.wholes.make(x) for x in found}
        args, kwargs = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
        result = func(*args, **kwargs)
        return self._returned(function, result, {id(wholes[id(x)]): (wholes[id(x)], x) for x in found})

    def _returned(self, function: Function, result: Any, given: dict[int, tuple[Tensor, ShardedTensor]]) -> Any:
        """The tensor that was given where a function has returned its whole."""
        if function.kind is Effect.OTHER:
            self.wholes.expose(whole for whole, _ in given.values())
        result = tree_map(lambda x: given[id(x)][1] if id(x) in given else x, result)
        if function.kind in (Effect.VIEWS, Effect.OTHER):
            plain = (x for x in tree_leaves(result) if isinstance(x, Tensor) and not isinstance(x, ShardedTensor))
            self.wholes.note_views(function.name, plain)
        return result


def _has_parts(values: Any) -> bool:
    for x in values:
        if isinstance(x, ShardedTensor):
            return True
        if isinstance(x, _LISTS) and _has_parts(x) or isinstance(x, dict) and _has_parts(x.values()):
            return True
    return False


def _wants_gradient(values: Any) -> bool:
    return any(isinstance(x, ShardedTensor) and x.requires_grad for x in tree_leaves(values))


def _by_element(func: Callable[..., Any], function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the parts of arguments that lie alike, or are single numbers: the usual case, without a rule's cost."""
    for x in kwargs.values():
        if isinstance(x, Tensor):
            return NotImplemented
    lead = args[0] if args else None
    if not isinstance(lead, ShardedTensor):
        if function.writes:
            return NotImplemented
        lead = next((x for x in args if isinstance(x, ShardedTensor)), None)
    parts = None if lead is None else _parts_like(lead, args)
    if lead is None or parts is None:
        return NotImplemented
    result = func(*parts, **kwargs)
    if function.writes or result is lead._local:
        return lead
    if not isinstance(result, Tensor) or result.shape != lead._local.shape:  # `x.to(lead)`
        return NotImplemented
    return ShardedTensor(result, lead._dim, lead._positions, lead._axis)


def _parts_like(lead: ShardedTensor, values: Any) -> list[Any] | None:
    parts = []
    for x in values:
        if isinstance(x, Tensor):
            if isinstance(x, ShardedTensor):
                if x is not lead and not _lies_like(x, lead):
                    return None
                x = x._local
            elif x.ndim:  # a whole one has to be cut first; a number fits as it is
                return None
        parts.append(x)
    return parts


def _lies_like(x: ShardedTensor, lead: ShardedTensor) -> bool:
    return (
        x._positions is lead._positions
        and x._dim == lead._dim
        and x._axis is lead._axis
        and x._local.shape == lead._local.shape
    )


def _is_stored(args: Any) -> bool:
    """Whether weights are meant that are stored in parts: rules that talk are for those that are split."""
    return any(isinstance(x, ShardedTensor) and x.axis.stores for x in tree_leaves(args))


def _writes_to_parts(function: Function, args: Any, kwargs: dict[str, Any]) -> bool:
    into = [kwargs.get("out"), args[0] if function.writes and args else None]
    return any(isinstance(x, ShardedTensor) for x in tree_leaves(into))


def _fused(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A whole step for lists of tensors, which writes into several of them."""
    for together in zip(*(x for x in args if isinstance(x, _LISTS) and x)):
        lead = next((x for x in together if isinstance(x, ShardedTensor)), None)
        if lead is not None and _parts_like(lead, together) is None:
            return NotImplemented
    return func(*tree_map(lambda x: x.local if isinstance(x, ShardedTensor) else x, args), **kwargs)
