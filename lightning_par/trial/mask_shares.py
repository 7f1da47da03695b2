"""How many places a router's masks let through, of which a plan has no values: it is taken to be balanced.

A step that sends each token to some of its experts asks for the tokens of one by ``where(chosen == i)``. How many these
are goes by values; ones in place of them would send all tokens to each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.pytree import tree_leaves
from lightning_par.sharded.functions import COPIES, PRECISIONS, RESHAPES

_INDICES = {"topk": -1, "argmax": 0, "multinomial": 0, "max": -1}  # which of what they return are places along a dim
_DIMS = {"topk": 2, "argmax": 1, "max": 1}  # which argument is that dim
_SAME = frozenset(RESHAPES | PRECISIONS | COPIES | {"detach", "expand", "unbind", "__iter__"})
_SOME = frozenset(("__gt__", "gt", "greater", "__ne__", "ne", "not_equal"))
_CHOOSE_BY_FIRST = frozenset(("where", "nonzero", "argwhere", "nonzero_static"))


@dataclass(frozen=True)
class Share:
    """What a mask lets through: one after the other of ``of`` shares of the places, as many in each.

    Attributes:
        turn: of the mask.
        of: how many experts there are.
        each: of them that each place has, as where a token goes to two.
    """

    turn: int
    of: int
    each: int = 1

    def count(self, places: int) -> int:
        """Of so many.

        Example::

            assert [Share(turn, 4).count(10) for turn in range(4)] == [2, 3, 2, 3]
        """
        all_ = places * min(self.each, self.of)
        return all_ * (self.turn + 1) // self.of - all_ * self.turn // self.of

    def masks(self, name: str, args: Any) -> dict[int, Tensor]:
        """What stands for each mask that the function of that name goes by, by its id: the first places let through."""
        found = {}
        for x in masks_in(name, args):
            mask = torch.zeros(x.numel(), dtype=x.dtype)
            mask[: self.count(x.numel())] = 1
            found[id(x)] = mask.view(tuple(x.shape))
        return found


@dataclass(eq=False)
class _Router:
    """So many choices, each of one of ``of`` experts, of which ``asked`` were asked for."""

    of: int
    choices: int
    asked: int = 0


@dataclass(eq=False)
class _Mask:
    router: _Router
    each: int = 1
    classes: int = 0  # of all choices, by `one_hot`
    share: Share | None = None

    def asked_for(self) -> Share:
        """Its share, from the first time that it is asked for."""
        if self.share is None:
            self.share = Share(self.router.asked % self.router.of, self.router.of, self.each)
            self.router.asked += 1
        return self.share


@dataclass(eq=False)
class _Counts:
    """How many choices fell on each of ``classes``, of which a router knows some."""

    router: _Router
    classes: int

    def chosen(self) -> _Mask:
        """Which have some, as far as there are enough choices; no other is asked for then."""
        self.router.of = min(self.router.of, self.router.choices)
        return _Mask(_Router(self.classes, self.classes), self.router.of)


_Known = _Router | _Mask | _Counts


@dataclass
class MaskShares:
    """Follows choices among experts through a trial to the masks that are made of them."""

    _known: dict[int, tuple[Tensor, _Known]] = field(default_factory=dict)  # by id, and what keeps it

    def asked(self, name: str, args: Any) -> Share | None:
        """What the mask of a function lets through that returns as many values as that does, if it is a router's."""
        mask = self._of(next(masks_in(name, args), None))
        return mask.asked_for() if isinstance(mask, _Mask) else None

    def note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """What a function makes of choices, or that it makes some."""
        if name in _INDICES and args and isinstance(args[0], Tensor):
            self._choices(name, args, kwargs, result)
            return
        known = self._of(args[0]) if args else None
        if known is None:
            return
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and id(x) not in self._known and (made := _made(name, known, args, x)) is not None:
                self._known[id(x)] = x, made

    def _choices(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)][_INDICES[name] :]
        given, place = args[0], _DIMS.get(name, 9)
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        if made and isinstance(dim, int) and given.ndim and not made[0].is_floating_point():
            self._known[id(made[0])] = made[0], _Router(given.shape[dim], made[0].numel())

    def _of(self, x: Any) -> _Known | None:
        return self._known[id(x)][1] if id(x) in self._known else None


def _made(name: str, known: _Known, args: Any, x: Tensor) -> _Known | None:
    """What ``x`` is, which the function of that name makes of what is ``known``; None: nothing that goes on."""
    if name in _SAME:
        return _Mask(known.router, known.each, known.classes) if isinstance(known, _Mask) else known
    if isinstance(known, _Router):
        one = name in ("__eq__", "eq") and not (isinstance(args[1], Tensor) and args[1].ndim)
        all_ = x.shape[-1] if name == "one_hot" else 0
        return _Mask(known, classes=all_) if one or all_ >= known.of else None
    if isinstance(known, _Counts):
        return known.chosen() if name in _SOME and len(args) == 2 and args[1] == 0 else None
    if name == "sum" and known.router.choices * known.classes == args[0].numel() and tuple(x.shape) == (known.classes,):
        return _Counts(known.router, known.classes)
    return _Mask(known.router, known.each * args[0].numel() // x.numel()) if name == "any" and x.numel() else None


def masks_in(name: str, args: Any) -> Iterator[Tensor]:
    """What the function of that name goes by, where it returns as many values as a mask lets through."""
    if name in _CHOOSE_BY_FIRST:
        yield from (x for x in args[:1] if isinstance(x, Tensor) and (name != "where" or len(args) == 1))
    elif name in ("masked_select", "__getitem__"):
        yield from (x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and x.dtype is torch.bool)
