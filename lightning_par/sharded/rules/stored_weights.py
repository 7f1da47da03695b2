"""Functions of weights that are stored in parts: what computes with them gets them whole, what writes does in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded import aliases
from lightning_par.sharded.aliases.frames import axes_of
from lightning_par.sharded.functions import LOWERED, PRECISIONS, name_of
from lightning_par.sharded.rules.gathered import written
from lightning_par.sharded.rules.in_place import targets as targets_of
from lightning_par.sharded.tensor import ShardedTensor, full

_SEE_NO_VALUE = ("detach", "_has_compatible_shallow_copy_type", "is_contiguous")


class Gathering:
    """Makes the stored weights of one run whole; the ``gathering`` of the axes that they are stored over.

    Attributes:
        count: how many there are in this process; where there are none, no argument is looked at.
    """

    count = 0

    def __init__(self) -> None:
        Gathering.count += 1

    def __del__(self) -> None:
        Gathering.count -= 1

    def __deepcopy__(self, memo: dict[int, object]) -> Gathering:
        """The same, as axes are: a copy of a module uses the weights of the same run."""
        return self

    def gathered(self, x: ShardedTensor, dtype: torch.dtype | None = None) -> Tensor:
        """The whole weight, in its own precision or the one that is given."""
        raise NotImplementedError

    def about_to_write(self, targets: Sequence[ShardedTensor], given: Sequence[Any]) -> None:
        """Told of weights, or aliases of them, that are about to be written to in parts, and of what the function is
        ``given``: plain tensors, and what prints alike on all ranks."""
        raise NotImplementedError

    def has_written(self, targets: Sequence[ShardedTensor]) -> None:
        """Told that they were."""
        raise NotImplementedError

    def about_to_use(self, used: Sequence[ShardedTensor]) -> None:
        """Told of weights, or aliases of them, whose values are about to be used."""
        raise NotImplementedError

    def has_moved(self, x: ShardedTensor) -> None:
        """Told that the weight ``x`` lies in other memory."""
        raise NotImplementedError

    def begin_optimizer_step(self, weights: Sequence[ShardedTensor]) -> None:
        """Told that an optimizer is about to write to parts of ``weights``."""
        raise NotImplementedError

    def end_optimizer_step(self, written: Sequence[ShardedTensor]) -> None:
        """Told that it has, and to which weights."""
        raise NotImplementedError

    def let_go(self, weights: Iterable[Tensor] | None = None) -> None:
        """Forget what was gathered of ``weights``, or of all."""
        raise NotImplementedError

    def views_of(self, x: ShardedTensor, whole: Tensor) -> None:
        """Let views of what was gathered of ``x`` be of ``whole``: it is no longer stored in parts."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoredCall:
    """A function that is called with whole weights in place of stored ones.

    Attributes:
        func: the function.
        args: its arguments, and those by name.
        wholes: the stored weights, each with what takes its place.
    """

    func: Any
    args: tuple[Any, dict[str, Any]]
    wholes: list[tuple[ShardedTensor, Tensor]]

    def run(self) -> Any:
        """Its result; what is a view of a weight is noted as a copy of what is stored."""
        result = self.func(*self.args[0], **self.args[1])
        for out in tree_leaves(result):
            if isinstance(out, Tensor):
                for x, whole in self.wholes:
                    if aliases.lies_in(out, whole):
                        self._note(x, whole, out.requires_grad)
        return result

    def _note(self, x: ShardedTensor, whole: Tensor, wants_gradient: bool) -> None:
        def put(x: ShardedTensor, whole: Tensor) -> None:
            x._local.copy_(x.own_part(whole))

        aliases.note(
            name_of(self.func), x.twin(), whole, lambda x: x.as_gathered(), put, axes_of(x),
            root=aliases.innermost(whole), renewable=not wants_gradient,  # nor does anybody write into views of it
        )  # fmt: skip


_PRINTED = (Tensor, float, int, complex, str, type(None), np.generic, torch.dtype)


def run(func: Any, args: Any, kwargs: Any, otherwise: Callable[[Any, Any, Any], Any]) -> Any:
    """Run ``func`` with stored weights whole; what is to run on parts, or has none, is left to ``otherwise``."""
    found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor) and x._axis.stores]
    name = getattr(func, "__name__", "")
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in found)
    on_parts = name in PRECISIONS or name == "contiguous"
    if not found or name in _SEE_NO_VALUE:
        return otherwise(func, args, kwargs)
    gathering_of(found[0]).about_to_use(found)
    if on_parts and not wants_gradient:
        return otherwise(func, args, kwargs)
    targets = [x for x in written(func, args, kwargs) if x._axis.stores]
    if not targets:
        return _with_whole(func, args, kwargs, found).run()
    gathering = gathering_of(targets[0])
    own = {*map(id, targets_of(func, args, kwargs))}  # of several tensors each is written by itself
    gathering.about_to_write(targets, [name, *(x for x in _given((args, kwargs)) if id(x) not in own)])
    stays = [x for x in found if any(x is target or _lies_as(x, target) for target in targets)]
    if len(stays) == len(found):
        result = otherwise(func, args, kwargs)
    else:
        result = _with_whole(func, args, kwargs, [x for x in found if not any(x is y for y in stays)]).run()
    gathering.has_written(targets)
    return result


def _with_whole(func: Any, args: Any, kwargs: Any, used: Sequence[ShardedTensor]) -> StoredCall:
    name = getattr(func, "__name__", "")
    wholes = {id(x): (x, gathering_of(x).gathered(x, _low(name, x))) for x in used}
    made: tuple[Any, Any] = tree_map(lambda x: wholes[id(x)][1] if id(x) in wholes else x, (args, kwargs))
    return StoredCall(func, made, list(wholes.values()))


def whole(x: ShardedTensor) -> Tensor:
    """All of ``x``, plain, for a function that torch tells nothing of; of a stored weight what others use, too.

    All ranks along its axis must call it.
    """
    if not x._axis.stores:
        return full(x)
    gathering_of(x).about_to_use([x])
    return full(gathering_of(x).gathered(x))


def gathering_of(x: ShardedTensor) -> Gathering:
    """What makes the stored weight ``x`` whole, or what lies as it does."""
    found: Gathering = x._axis.gathering  # type: ignore[attr-defined]  # of an axis that stores
    return found


def _low(name: str, x: Tensor) -> torch.dtype | None:
    """The precision that autocast would cast ``x`` to: gathered in it, fewer bytes move, and no cast copy is kept."""
    kind = x.device.type
    if name not in LOWERED or not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(kind)


def _given(args: Any) -> Iterator[Any]:
    """What decides, beside what weights hold, what a function writes: of weights that is which they are."""
    for x in tree_leaves(args):
        if isinstance(x, slice):
            yield from _given((x.start, x.stop, x.step))
        elif isinstance(x, torch.Generator):
            yield x.get_state()
        elif isinstance(x, ShardedTensor):
            yield x._name
        elif isinstance(x, _PRINTED):
            yield x


def _lies_as(x: ShardedTensor, target: ShardedTensor) -> bool:
    return (
        x._axis is target._axis and x._dim - x.ndim == target._dim - target.ndim and x._positions is target._positions
    )
