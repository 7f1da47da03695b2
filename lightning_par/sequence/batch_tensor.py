"""What the batch alone determines: whole on every rank, and cut along the sequence where it meets a shard.

All ranks along the sequence axis get the same batch. Masks, positions, shifted labels and the like, made of it, are
computed whole, with no communication, by whatever function. Where such a tensor meets a parameter or a sharded
activation it is sharded, along the dim that is known to be the sequence.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh import collectives
from lightning_par.mesh.positions import Positions
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.modes import DisableTorchFunction
from lightning_par.private.pytree import leaves_given, tree_leaves, tree_map
from lightning_par.private.tensors import make_wrapper_subclass, write_count
from lightning_par.private.transforms import in_functorch
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sequence.sequence_axis import SequenceAxis
from lightning_par.sequence.sequence_dim import places_of
from lightning_par.sharded import aliases
from lightning_par.sharded.graph_node import as_asked
from lightning_par.sharded.rules.alias import kept
from lightning_par.sharded.rules.in_place import targets
from lightning_par.sharded.rules.lookup import dispatch, run_whole
from lightning_par.sharded.tensor import ShardedTensor, full
from lightning_par.sharded.wrapped_tensors import is_wrapped


class BatchTensor(ShardedTensor):
    """A whole tensor that knows which dim is the sequence; to rules it is a shard, whose local part is cut on demand.

    Args:
        whole: plain, the same on all ranks.
        dim: the sequence, from 0.
        positions: who holds which index of the dim.
        axis: the sequence axis.

    Example::

        axis = SequenceAxis("sequence", ranks=(0,), rank=0, group=None)
        ids = BatchTensor(torch.tensor([[1, 2], [3, 4]]), 1, Positions.of([0, 0]), axis)
        assert (ids != 2).sum().item() == 3
    """

    _whole: Tensor
    _cut: tuple[Any, Tensor] | None

    @staticmethod
    def __new__(cls, whole: Tensor, dim: int, positions: Positions, axis: Any) -> BatchTensor:
        with DisableTorchFunction():  # nor do modes look
            self = make_wrapper_subclass(cls, whole.shape, whole.stride(), dtype=whole.dtype, device=whole.device)
        self._whole, self._dim, self._positions, self._axis = whole, dim, positions, axis
        self._cut = None
        return self

    @property
    def _local(self) -> Tensor:  # type: ignore[override]
        whole = self._whole
        if whole.requires_grad:
            return self._kept(collectives.scatter(whole, self._dim, self._positions, self._axis))
        # A write makes the cut stale. Inference tensors count none themselves, so those are counted in `aliases`.
        version = None if whole.is_inference() else write_count(whole), aliases.writes_into(whole)
        if self._cut is None or self._cut[0] != version:
            self._cut = version, self._kept(self._part(whole))
        return self._cut[1]

    @property
    def _part(self) -> Callable[[Tensor], Tensor]:
        """What a whole is cut by. It doesn't lead to this tensor: the memory of the whole holds it, see `_kept`."""
        return partial(collectives.own_part, dim=self._dim, positions=self._positions, axis=self._axis)

    def _kept(self, part: Tensor) -> Tensor:
        aliases.keep_cut(self._whole, part, self._part)
        return part

    @property
    def _innermost(self) -> Tensor:
        return self._whole

    def twin(self, local: Tensor | None = None) -> BatchTensor:
        return BatchTensor(self._whole, self._dim, self._positions, self._axis)

    @property
    def data(self) -> Tensor:
        return BatchTensor(self._whole.data, self._dim, self._positions, self._axis)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._whole.data = full(value).detach()
        if self._cut is not None:  # what saved it for backward has the new memory, as what saves the whole has
            with DisableTorchFunction():
                self._cut[1].data = self._part(self._whole.data)
            self._kept(self._cut[1])

    def full_tensor(self, purpose: str = "gather") -> Tensor:
        """The whole tensor; no communication."""
        return self._whole

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._whole.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._whole.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> BatchTensor:  # type: ignore[override]
        self._whole.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self._whole.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._whole.grad = value

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._whole.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return as_asked(self._whole.grad_fn, self._whole, sys._getframe(1))

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._whole.retains_grad

    def retain_grad(self) -> None:
        self._whole.retain_grad()

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """As `torch.Tensor.register_hook`; the hook meets a whole gradient."""
        return self._whole.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        return self._whole.register_post_accumulate_grad_hook(lambda _: hook(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchTensor:
        import copy

        return BatchTensor(copy.deepcopy(self._whole, memo), self._dim, self._positions, self._axis)

    def __reduce_ex__(self, protocol: Any) -> Any:  # type: ignore[override]
        return self._whole.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_wrapped(types):
            return NotImplemented
        if aliases.is_any():
            return kept(_run, func, args, kwargs or {})
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    leaves = leaves_given(args, kwargs)
    if name != "grad" and all(map(_of_batch, leaves)):
        into = targets(func, args, kwargs)
        aliases.count_write(into)
        result = _computed_whole(func, args, kwargs, leaves)
        for x in into:
            aliases.renew_cuts(x)
        return result
    into = [x for x in targets(func, args, kwargs) if isinstance(x, BatchTensor)]
    if into:
        aliases.count_write(into)
        result = run_whole(func, args, kwargs)  # a rule would write into a part that was cut for it
        for x in into:
            aliases.renew_cuts(x)
        return result
    return dispatch(func, args, kwargs)


def _of_batch(x: Any) -> bool:
    """Whether an argument is no shard and no weight."""
    if not isinstance(x, Tensor) or isinstance(x, BatchTensor):
        return True
    return not isinstance(x, ShardedTensor | nn.Parameter) and not x.requires_grad


def _computed_whole(func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
    given = [x for x in leaves if isinstance(x, BatchTensor)]
    if len(leaves) == len(args) and all(map(operator.is_, leaves, args)):
        result = func(*map(_whole_of, args))
    else:
        whole_args, whole_kwargs = tree_map(_whole_of, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
    if not isinstance(result, Tensor | tuple | list) or isinstance(result, torch.Size) or in_functorch():
        return result
    outputs = [result] if isinstance(result, Tensor) else [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    known = {id(x._whole): x for x in given}
    if all(id(x) in known for x in outputs):  # written in place, or handed through
        return tree_map(lambda x: known[id(x)] if isinstance(x, Tensor) else x, result)
    places = iter(places_of(func, args, kwargs, leaves, outputs, given[0]))

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        place = next(places)
        return x if place is None else BatchTensor(x, *place, given[0]._axis)

    return wrapped(result) if isinstance(result, Tensor) else tree_map(wrapped, result)


def _whole_of(x: Any) -> Any:
    return x._whole if isinstance(x, BatchTensor) else x


def mark(batch: Any, dims: Callable[[int, Tensor], int | None], axis: SequenceAxis) -> Any:
    """``batch`` with the tensors of it that have a sequence as `BatchTensor`.

    Args:
        batch: of any structure.
        dims: given the number of a tensor in the batch, and it, the dim that is the sequence, or None.
        axis: the sequence axis.
    """
    number = -1

    def marked(x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        dim = dims(number, x)
        positions = None if dim is None or type(x) not in (Tensor, FakeTensor) else axis.spread(x.shape[dim])
        return x if positions is None or dim is None else BatchTensor(x, dim, positions, axis)

    return map_tensors(marked, batch)
