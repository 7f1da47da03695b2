"""The gradient of a parameter that lives on some ranks of a pipeline, on every rank.

Functions that write to it run where it is. All others first send it to all ranks, or, where they make one number of it,
send that. See `lightning_par.pipeline.between_steps.remote_reads`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import sharding_of
from lightning_par.absent.list_entries import kept_entries
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.optim.function_facts import Effect, function_of
from lightning_par.pipeline.program.event_functions import is_metadata
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.tensors import make_wrapper_subclass
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.functions import FILLS, MEMORY, REDUCTIONS, SHOWS, name_of, writes, writes_into
from lightning_par.sharded.rules.in_place import targets
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.tensor import ShardedTensor, full, leaf

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients

_CLIP = "torch.nn.utils.clip_grad"


class Gradient(torch.Tensor):
    """``grad`` of ``parameter``, as all ranks see it.

    Args:
        owner: carries it over the ranks.
        of: the parameter's name.
        parameter: has the gradient's shape, dtype and device.
        here: the gradient itself, on ranks that hold it.
    """

    owner: JointGradients
    of: str
    here: Tensor | None
    sharding: tuple[int, Positions, Axis] | None
    parameter: Tensor

    @staticmethod
    def __new__(cls, owner: JointGradients, of: str, parameter: Tensor, here: Tensor | None) -> Gradient:
        self = make_wrapper_subclass(cls, tuple(parameter.shape), dtype=parameter.dtype, device=parameter.device)
        vars(self).update(owner=owner, of=of, here=here, sharding=sharding_of(parameter), parameter=parameter)
        return self

    @property
    def source(self) -> int:
        """The index of the rank that sends it."""
        return self.owner.sources[self.of]

    def whole(self) -> Tensor:
        """Its values: itself where it is, a copy elsewhere. All ranks must call it."""
        self._meet(f"read the gradient of {self.of!r}")
        if self.here is None:
            x = self.empty()
            self.owner.axis.broadcast_(leaf(x), "gradients", self.source)
            return x
        part = leaf(self.here).detach()
        used = self.parameter.as_used_gradient(part) if isinstance(self.parameter, ShardedTensor) else part
        self.owner.axis.broadcast_(used.contiguous(), "gradients", self.source)
        return self.here

    def refuse_in_step(self) -> None:
        """
        Raises:
            NotImplementedError: a step has it from a hook before, and ranks don't come to the same places of a step.
        """
        if self.owner.is_plain:
            raise NotImplementedError(
                f"{user_line()}: a step uses the gradient of {self.of!r} that a hook has kept, `p.grad`, which is on "
                "one stage of the pipeline. Keep a copy, `p.grad.clone()`, or use TensorParallelStrategy."
            )

    def _meet(self, doing: str) -> None:
        self.refuse_in_step()
        self.owner.meet(doing)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Of what holds it, for a trial of a step: that may not use it."""
        return self if self.owner.is_plain else torch.Tensor.__deepcopy__(self, memo)  # type: ignore[no-any-return]

    def beside(self, ranks: set[int]) -> Tensor:
        """What a function needs of it that writes on ``ranks``: its values, where those that hold it are others.

        All ranks must call it.
        """
        if not ranks <= {*self.owner.holders_of(self.of)}:
            return self.whole()
        return torch.empty(self.shape, dtype=self.dtype, device="meta") if self.here is None else self.here

    def empty(self) -> Tensor:
        """Room for its values, sharded as it is over another axis than its owner's."""
        shape = list(self.shape)
        if self.sharding is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        dim, positions, axis = self.sharding
        shape[dim] = positions.count(axis.rank)
        return ShardedTensor(torch.empty(shape, dtype=self.dtype, device=self.device), dim, positions, axis)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if name_of(func) in ("detach", "data"):
            return first
        if is_metadata(func, name) and name not in MEMORY and name not in SHOWS and name != "__set__":
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.startswith("_foreach_") and writes(name):
            return _write_those_here(func, args, kwargs)
        written = targets(func, args, kwargs)
        if isinstance(first, Gradient) and (name == "__set__" or any(x is first for x in written)):
            return _write(func, name, first, args[1:], kwargs)
        if sys._getframe(1).f_globals.get("__name__") == _CLIP and name in ("linalg_vector_norm", "_foreach_norm"):
            return _norms(func, first, args[1:], kwargs)
        if isinstance(first, Gradient) and name in REDUCTIONS and len(tensors_in((args, kwargs))) == 1:
            return first._number(func, name, args[1:], kwargs)
        if isinstance(first, Gradient) and name == "__iter__" and first.ndim:
            return iter(first.unbind())
        if isinstance(first, Gradient) and _views(func, name, first, args[1:], kwargs):
            return first._view(func, args[1:], kwargs)
        return func(*wholes(args), **wholes(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*wholes(args), **wholes(kwargs or {}))

    def _view(self, func: Callable[..., Any], rest: Any, kwargs: Any) -> Any:
        """A view, where the gradient is. No communication: shapes are known everywhere, and what won't do raises."""

        def shaped(x: Tensor) -> Tensor:
            return torch.empty((), dtype=x.dtype, device=self.device).expand(x.shape)

        rest, kwargs = map_tensors(shaped, (rest, kwargs))  # of `view_as`
        shapes = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *rest, **kwargs)
        views = iter(tensors_in(func(self.here, *rest, **kwargs)) if self.here is not None else ())
        return map_tensors(lambda x: Gradient(self.owner, self.of, shaped(x), next(views, None)), shapes)

    def _number(self, func: Callable[..., Any], name: str, rest: Any, kwargs: Any) -> Any:
        """What ``func`` makes of the gradient, computed where it is."""
        self._meet(f"read {name!r} of the gradient of {self.of!r}")
        made: Any = None
        if self.owner.axis.tells(self.source):
            here = self.here
            if here is None:  # in a dry run: what ranks of the source say to one another is no message of this one's
                here = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            try:
                made = map_tensors(lambda x: full(x).cpu(), func(here, *rest, **kwargs))  # to be pickled
            except Exception as error:  # all ranks are to raise it
                made = error
        made = self.owner.axis.broadcast_object(made, "gradients", self.source)
        if isinstance(made, Exception):
            raise made
        return map_tensors(lambda x: x.to(self.device), made)


def _views(func: Any, name: str, x: Gradient, rest: Any, kwargs: Any) -> bool:
    """Whether ``func`` gives views of ``x``, each of which is written into and read as the gradient is."""
    if x.of in x.owner.in_parts or function_of(func).kind is not Effect.VIEWS:
        return False
    return name.endswith("_as") or not tensors_in((rest, kwargs))


class _Norm(torch.Tensor):
    """The norm of one gradient, which its source knows; stacked with others it becomes known to all ranks."""

    owner: JointGradients
    value: Tensor

    @staticmethod
    def __new__(cls, owner: JointGradients, value: Tensor) -> _Norm:
        self = make_wrapper_subclass(cls, (), dtype=value.dtype, device=value.device)
        vars(self).update(owner=owner, value=value)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "to":
            return _Norm(args[0].owner, args[0].value.to(*args[1:], **kwargs))
        if is_metadata(func, name):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "stack":
            return _joined(args[0])
        args, kwargs = map_tensors(_known, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = map_tensors(_known, (args, kwargs or {}))
        return func(*args, **kwargs)


def _known(x: Tensor) -> Tensor:
    return _joined([x])[0] if isinstance(x, _Norm) else x


def _joined(norms: Any) -> Tensor:
    """All ``norms`` in one tensor, on all ranks."""
    owner = next(x.owner for x in norms if isinstance(x, _Norm))
    counts = owner.axis.rank == 0  # what is no `_Norm` is the same everywhere
    values = [x.value if isinstance(x, _Norm) else x if counts else torch.zeros_like(x) for x in norms]
    owner.meet(f"took the norm of {len(values)} gradients")
    return owner.axis.all_reduce_(torch.stack(values), "clip")


def _norms(func: Any, given: Any, rest: Any, kwargs: Any) -> Any:
    """Norms of single gradients, as `torch.nn.utils.get_total_norm` takes them."""
    if isinstance(given, Gradient):
        return _Norm(given.owner, func(_counted(given), *rest, **kwargs))
    norms = func([_counted(x) if isinstance(x, Gradient) else x for x in given], *rest, **kwargs)
    return [_Norm(x.owner, norm) if isinstance(x, Gradient) else norm for x, norm in zip(given, norms, strict=True)]


def _counted(x: Gradient) -> Tensor:
    if x.here is not None and x.source == x.owner.axis.rank:
        return x.here
    return torch.zeros((), dtype=x.dtype, device=x.device)  # the sum over the ranks has it from its source


def _write(func: Any, name: str, x: Gradient, rest: Any, kwargs: Any) -> Any:
    x.refuse_in_step()
    given = rest[0] if name == "__set__" else None
    lies = None if x.owner.is_weight(given) else x.owner.replicas.lying(given)  # before it has the gradient's values
    rest, kwargs = x.owner.present(name, (rest, kwargs), x.of)
    if x.here is not None:
        with x.owner.unseen():  # what is written on some ranks alone
            if name == "__set__" and getattr(func.__self__, "__name__", "") == "data":
                x.here.data = rest[0]  # in its own class' way
            else:
                func(x.here, *rest, **kwargs)
    elif name in FILLS or not writes_into(name):  # the generators of all ranks stay equal
        func(x.empty(), *rest, **kwargs)
    if name != "__set__":
        x.owner.replicas.refresh()
    else:
        x.owner.replicas.set_gradient(x.of, given, lies)
    return None if name in ("__setitem__", "__set__") else x


def _write_those_here(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an in-place function of lists for the gradients that are here; returns them all, as torch does."""
    written = args[0]
    there = [not isinstance(x, Gradient) or x.here is not None for x in args[0]]
    first = [x.here if isinstance(x, Gradient) else x for x in args[0]]
    owner = next(x.owner for x in tensors_in((args, kwargs)) if isinstance(x, Gradient))
    args, kwargs = (first, *wholes(args[1:])), wholes(kwargs)
    if any(there):
        args, kwargs = kept_entries(there, args, kwargs)
        with owner.unseen():
            func(*args, **kwargs)
    owner.replicas.refresh()
    return written


def wholes(value: Any) -> Any:
    """``value`` with the values of the gradients in it. All ranks must call it."""
    return map_tensors(lambda x: x.whole() if isinstance(x, Gradient) else x, value)
