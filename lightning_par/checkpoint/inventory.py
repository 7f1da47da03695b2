"""What the ranks hold of the tensors of one checkpoint, numbered alike on all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.elsewhere import Elsewhere, is_elsewhere
from lightning_par.absent.unread import Unread, mapped
from lightning_par.checkpoint.buffers import Scratch
from lightning_par.checkpoint.courier import Courier
from lightning_par.checkpoint.disk_space import Failure
from lightning_par.checkpoint.owners import Place
from lightning_par.mesh.broadcast import SMALL, Pickled
from lightning_par.mesh.layout import Groups
from lightning_par.private.storage import lies_as
from lightning_par.private.tensors import write_count
from lightning_par.sharded.tensor import ShardedTensor, leaf

Told = dict[Any, Place | Pickled]
"""What a rank tells of what it holds, by a key that means the same on all ranks."""


@dataclass(frozen=True)
class Item:
    """One tensor.

    Args:
        number: what all ranks know it by.
        place: where it lies.
        part: what this rank holds of it, plain; None for nothing.
        version: of the part, which tells whether something was written to it since.
    """

    number: int
    place: Place
    part: Tensor | None
    version: int


class Inventory:
    """The tensors of one checkpoint. What is done to it is done on all ranks, in the same order.

    Args:
        groups: the mesh axes.
        everywhere: whether other copies of the model hold parts of the one that is saved.

    Example::

        inventory = Inventory(groups)
        weights = inventory.take(module.state_dict())
        with inventory.open():
            if groups.world.rank == 0:
                torch.save(weights, "file")
    """

    def __init__(self, groups: Groups, everywhere: bool = False) -> None:
        self.groups = groups
        self.items: list[Item] = []
        among = groups.world if everywhere else groups.replica
        self.serves = among.ranks[0] == 0
        """Whether this rank is in the copy of the model that is saved."""
        self._courier = Courier(groups.world, among.ranks) if self.serves else None
        self.scratch = Scratch()
        self._known: dict[int, tuple[Tensor, Item]] = {}
        self._closed = False

    @property
    def is_first(self) -> bool:
        """Whether this rank has the whole checkpoint before it; in a dry run each stands for the first."""
        return self.groups.world.tells()

    @property
    def waiting(self) -> tuple[int, ...]:
        """The global ranks that wait to be asked for what they hold, in the eyes of one that is in that copy."""
        return () if self._courier is None else self._courier.waiting

    # ---------------------------------------------------------------------------------------------------- what there is

    def take(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """What stands in this rank's checkpoint for each of ``values``, and for those that only others have.

        The first rank gets all: the tensors that it holds whole, `Unread` ones for others. Other ranks have a tensor on
        ``meta`` for what they don't hold whole. All ranks must call it.

        Args:
            values: by a key that means the same on all ranks; anything but a tensor is this rank's own.
        """
        mine = {key: entry(x, self.groups) for key, x in values.items() if not is_elsewhere(x)}
        told = self._exchanged(mine, values)
        out = dict(values)
        tied: list[tuple[Tensor, Any]] = []
        for key in dict.fromkeys(key for theirs in told for key in theirs):
            first = next(theirs[key] for theirs in told if key in theirs)
            value = values.get(key)
            if isinstance(first, Place):
                first = replace(first, everywhere=all(_is_whole(theirs.get(key)) for theirs in told))
                out[key] = self._standing(self._add(first, value), value, tied)
            elif key not in values or is_elsewhere(value):
                out[key] = _once(value, lambda: first.value, tied)  # noqa: B023  (is called at once)
        return out

    def _exchanged(self, mine: Told, values: Mapping[Any, Any]) -> list[Told]:
        """What each rank along the pipeline tells of what it holds; this one tells ``mine`` of its ``values``."""
        told: list[Told] = self.groups.pipeline.all_gather_object(mine, "state")
        return told

    def _add(self, place: Place, value: Any) -> Item:
        held = place.positions is None or self.groups.world.rank in place.ranks
        part = leaf(value) if isinstance(value, Tensor) and held and not is_elsewhere(value) else None
        item = Item(len(self.items), place, part, 0 if part is None else write_count(part))
        self.items.append(item)
        # room for the largest serves one after another
        self.scratch.nbytes = max(self.scratch.nbytes, place.shape.numel() * place.dtype.itemsize)
        return item

    def _standing(self, item: Item, value: Any, tied: list[tuple[Tensor, Any]]) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, ShardedTensor | Elsewhere):
            stand_in = value
        elif not self.is_first:
            return torch.empty(item.place.shape, dtype=item.place.dtype, device="meta")
        else:
            stand_in = _once(value, lambda: Unread(_Held(self, item)), tied)
        self._known[_identity(stand_in)] = (stand_in, item)
        return stand_in

    def complete(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """``checkpoint`` with what callbacks put into it that lies in parts: nothing is left that can't be written."""
        found: dict[str, Tensor] = {}
        holders: dict[int, Any] = {}
        _in_parts(checkpoint, "", found, holders)
        taken = self.take(found)
        new = {id(x): taken[path] for path, x in found.items()}
        given = dict(checkpoint)
        if holders:
            given["optimizer_states"] = _with_copies(given["optimizer_states"], new, holders)
        completed: dict[str, Any] = mapped(lambda x: new.get(id(x), x), given)
        return completed

    def item_of(self, x: Tensor) -> Item | None:
        """What ``x``, which `take` gave to this rank, is; None where it is another or was written to."""
        _, item = self._known.get(_identity(x), (None, None))
        if item is None or (x.is_kept if isinstance(x, Unread) else write_count(x) != item.version):
            return None
        return item

    # ------------------------------------------------------------------------------------------------------ where it is

    def fetch(self, item: Item, out: Tensor) -> None:
        """Write the whole tensor into ``out``; on the first rank, while the others are in `open` or about to be."""
        if self._courier is None or self._closed:
            raise RuntimeError(
                "A tensor of a checkpoint is read after the checkpoint was saved; the ranks that hold it have gone on. "
                "Clone it in on_save_checkpoint, or in the CheckpointIO's save_checkpoint."
            )
        self._courier.fetch(item.number, item.place, item.part, out)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, the first rank reads what it needs; the others wait until it has. All ranks must enter.

        Raises:
            RuntimeError: on the others, if the first rank raised; `OSError` if its disk is full.
        """
        failure: Failure | None = None
        if not self.is_first:
            if self._courier is not None:
                self._courier.serve(self._held)
            yield
        else:
            try:
                yield
            except BaseException as error:
                failure = Failure.of(error)
                with suppress(RuntimeError):  # that the others are gone may be why it failed
                    self._close(failure)
                raise
        if (failure := self._close(failure)) is not None:
            raise failure.error("Rank 0 could not save the checkpoint: ")

    def _close(self, failure: Failure | None) -> Failure | None:
        """Let the others go on; what went wrong on the first rank, on all."""
        self._closed = True
        if self.is_first and self._courier is not None:
            self._courier.dismiss()
        outcome: Failure | None = self.groups.world.broadcast_object(failure, "state")
        return outcome

    def _held(self, number: int) -> tuple[Place, Tensor]:
        item = self.items[number]
        assert item.part is not None
        return item.place, item.part


def entry(x: Any, groups: Groups) -> Place | Pickled:
    """What a rank tells of ``x``, which it holds: where it lies, or all of what is small."""
    small = not isinstance(x, Tensor) or not isinstance(x, ShardedTensor) and x.numel() <= SMALL
    if small and groups.pipeline.size > 1:
        return Pickled.of(x)
    return Place.of(x, groups.world.rank) if isinstance(x, Tensor) else Pickled(None)


@dataclass
class _Held:
    """The source of one tensor of an inventory."""

    inventory: Inventory
    item: Item

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.item.place.shape, self.item.place.dtype
        self.scratch = self.inventory.scratch

    def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
        whole = target if indices is None else torch.empty(self.shape, dtype=self.dtype)
        self.inventory.fetch(self.item, whole)
        if indices is not None:
            target.copy_(whole.index_select(dim, torch.as_tensor(indices)))


def _once(value: Any, make: Callable[[], Any], tied: list[tuple[Tensor, Any]]) -> Any:
    """What `make` makes for ``value``, as another view of the same memory where ``value`` is tied to one before."""
    like = next((other for x, other in tied if _are_tied(x, value)), None)
    if like is not None:
        return like.detach() if isinstance(like, Tensor) else like
    made = make()
    if isinstance(value, Tensor):
        tied.append((value, made))
    return made


def _identity(x: Tensor) -> int:
    """Of the tensor; of its memory where that may not be here."""
    return id(x.memory) if isinstance(x, Unread) else id(x)


def _is_whole(entry: Any) -> bool:
    return isinstance(entry, Place) and entry.positions is None


def _are_tied(a: Tensor, b: Any) -> bool:
    if isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor):
        return lies_as(a.local, b.local)
    return isinstance(a, Elsewhere) and isinstance(b, Elsewhere) and a.origin is b.origin


def _in_parts(value: Any, path: str, found: dict[str, Tensor], holders: dict[int, Any]) -> None:
    """Note what lies in parts, by its path, and the objects of an optimizer's that hold some, by id."""
    if isinstance(value, ShardedTensor | Elsewhere):
        found[path] = value
    elif isinstance(value, (dict, list, tuple, deque)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _in_parts(item, f"{path}/{key}", found, holders)
    elif path.startswith("/optimizer_states/") and _holds_something(value) and id(value) not in holders:
        before, holders[id(value)] = len(found), value
        _in_parts(vars(value), path, found, holders)
        if len(found) == before:
            del holders[id(value)]


def _holds_something(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (type, Tensor, nn.Module))


def _with_copies(value: Any, new: Mapping[int, Any], holders: Mapping[int, Any]) -> Any:
    """``value`` with copies of the ``holders``, which hold what is ``new``, by the id of what it stands for."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if type(value) is dict:
        return {key: _with_copies(x, new, holders) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_with_copies(x, new, holders) for x in value])
    if type(value) is deque:
        return deque((_with_copies(x, new, holders) for x in value), value.maxlen)
    if id(value) not in holders:
        return value
    twin = copy(value)
    vars(twin).update({key: _with_copies(x, new, holders) for key, x in vars(value).items()})
    return twin
