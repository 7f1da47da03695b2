"""How attention over a sharded sequence is computed, chosen by the bytes that it moves.

Pure: tensors and processes appear only in `Grid`, which holds the two axes of a product of schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.strategies.startup_table import bytes_text

Kind = Literal["ring", "ulysses", "all_gather", "product"]
Asked = str | Mapping[str, int]
NAMES = ("auto", "ring", "ulysses", "all_gather")


SMALL = 1 << 16
"""Bytes of a call's keys and values, those of all ranks: where they are no more, they stay for backward. To send so few
takes as long as to send none, and is what such a step's time goes to."""


def stays(nbytes: float) -> bool:
    """Whether keys and values of so many bytes, all ranks' together, stay from forward to backward."""
    return nbytes <= SMALL


@dataclass(frozen=True)
class Scheme:
    """Ulysses over ``ulysses`` ranks that lie next to each other, and over ``ring`` such groups a ring or a gather."""

    kind: Kind
    ulysses: int
    ring: int

    def __str__(self) -> str:
        if self.kind == "product":
            return f"ulysses over {self.ulysses} x ring over {self.ring} ranks"
        return f"{self.kind.replace('_', '-')} over {self.ulysses * self.ring} ranks"


@dataclass(frozen=True)
class Shapes:
    """The sizes of one attention call, over the whole sequence.

    Args:
        batch: sequences.
        heads: of the queries.
        kv_heads: of the keys and values; 1 where one head serves all.
        queries: tokens.
        keys: tokens.
        features: of a query's and a key's head.
        value_features: of a value's head; None where they are as many.
        spread: whether keys and values are sharded along the sequence; else every rank has them all.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    features: int
    value_features: int | None = None
    spread: bool = True

    def feasible(self, degree: int) -> bool:
        """Whether that many ranks can share the heads out evenly."""
        return self.heads % degree == 0 and self.kv_heads % degree == 0


@dataclass(frozen=True)
class Grid:
    """The sequence axis as ring x ulysses: its rank is ring.rank * ulysses.size + ulysses.rank; None for a size of 1.

    Example::

        grid = Grid(None, axis)  # a ring alone
    """

    ulysses: Axis | None
    ring: Axis | None

    def part(self, positions: Positions) -> tuple[Positions, Positions]:
        """Who holds what of the tokens of this rank's group, along ulysses, and which group holds what, along the ring.

        A group's tokens in zigzag order over all ranks are in zigzag order over the ring.
        """
        ulysses = 1 if self.ulysses is None else self.ulysses.size
        return _part(positions, ulysses, 0 if self.ring is None else self.ring.rank)


@dataclass(frozen=True)
class AttentionSettings:
    """What a sequence axis carries as ``attention``: what the user asked for, and the axes of a product."""

    asked: Asked = "auto"
    grid: Grid | None = None


def check_asked(asked: Any) -> Asked:
    """The user's ``attention`` argument, if it can be one.

    Raises:
        TypeError: it is neither a string nor a dict of ints.
        ValueError: it names no scheme, or no two positive sizes.

    Example::

        assert check_asked({"ulysses": 2, "ring": 4}) == {"ulysses": 2, "ring": 4}
    """
    known = ", ".join(map(repr, NAMES)) + ' or a dict as {"ulysses": 2, "ring": 2}'
    if isinstance(asked, str):
        if asked not in NAMES:
            raise ValueError(f"`attention` must be {known}, got {asked!r}.")
        return asked
    if not isinstance(asked, Mapping) or not all(type(size) is int for size in asked.values()):
        raise TypeError(f"`attention` must be {known}, got {asked!r}.")
    if set(asked) != {"ulysses", "ring"} or min(asked.values()) < 1:
        raise ValueError(f"`attention` as a dict needs the positive sizes 'ulysses' and 'ring', got {asked!r}.")
    return dict(asked)


def ulysses_size(asked: Asked, size: int) -> int:
    """How many ranks share heads out in the `Grid` that ``asked`` needs; 1 where it needs none.

    Raises:
        ValueError: the sizes asked for don't multiply to the axis' ``size``.

    Example::

        assert ulysses_size({"ulysses": 2, "ring": 4}, 8) == 2 and ulysses_size("auto", 8) == 1
    """
    if isinstance(asked, str):
        return 1
    u, r = asked["ulysses"], asked["ring"]
    if u * r != size:
        raise ValueError(
            f"attention={asked!r} is for {u} * {r} = {u * r} ranks, but the sequence is spread over {size}. "
            f"Write sizes whose product is {size}."
        )
    return u


def grid_lines(ranks: tuple[int, ...], ulysses: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The global ranks of the ulysses groups and of the rings, of which process groups are made in this order.

    Args:
        ranks: the global ranks along the sequence axis.
        ulysses: how many of them share heads out.

    Example::

        assert grid_lines((0, 1, 2, 3), 2) == ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """
    groups = [ranks[i : i + ulysses] for i in range(0, len(ranks), ulysses)]
    return groups, [ranks[i::ulysses] for i in range(ulysses)]


def make_grid(axis: Axis, ulysses: int, make_axis: Callable[[str, tuple[int, ...], int], Axis]) -> Grid:
    """The two axes through this rank.

    Args:
        axis: the sequence axis.
        ulysses: how many neighbours share heads out; divides the axis' size.
        make_axis: makes an axis with ``gradient_shares`` of (name, global ranks along it, this rank's index in them).

    Example::

        grid = make_grid(axis, 2, lambda name, ranks, rank: SequenceAxis(name, ranks, rank, groups[ranks]))
    """
    group, place = divmod(axis.rank, ulysses)
    groups, rings = grid_lines(axis.ranks, ulysses)
    return Grid(make_axis(axis.name, groups[group], place), make_axis(axis.name, rings[place], group))


def choose(asked: Asked, size: int, shapes: Shapes, degrees: tuple[int, ...] = ()) -> Scheme:
    """The scheme for one attention call.

    Args:
        asked: as `check_asked` returned it; "auto" takes what moves the fewest bytes, of equals the ring.
        size: of the sequence axis.
        shapes: of the call.
        degrees: ulysses sizes of products that have a `Grid`.

    Raises:
        ValueError: what was asked for by name can't be; the message has the numbers and another choice.

    Example::

        call = Shapes(batch=2, heads=8, kv_heads=2, queries=64, keys=64, features=16)
        assert choose("auto", 2, call) == Scheme("ring", 1, 2)
    """
    if asked == "auto":
        schemes = [_scheme(u, size) for u in sorted({1, *degrees, size}) if shapes.feasible(u)]
        return min(schemes, key=lambda scheme: elements(scheme, shapes))
    if asked in ("ring", "all_gather"):
        return Scheme("ring" if asked == "ring" else "all_gather", 1, size)
    degree = size if isinstance(asked, str) else ulysses_size(asked, size)
    for heads, name in ((shapes.heads, "query"), (shapes.kv_heads, "key/value")):
        if heads % degree:
            raise ValueError(
                f"{heads} {name} head{'s' * (heads != 1)} can't be spread over {degree} ranks evenly, which "
                f"attention={asked!r} asks for; write attention='ring' or attention='auto'."
            )
    return _scheme(degree, size)


def elements(scheme: Scheme, shapes: Shapes, itemsize: int | None = None) -> float:
    """Elements that leave one rank in forward and backward under ``scheme``, counted as ring algorithms send them.

    Args:
        scheme: as chosen.
        shapes: of the call.
        itemsize: bytes an element; without it, they are taken to be many.

    Example::

        call = Shapes(batch=1, heads=4, kv_heads=4, queries=64, keys=64, features=8)
        assert elements(Scheme("ring", 1, 2), call) == 6 * 64 * 32 / 2
    """
    u, r = scheme.ulysses, scheme.ring
    features = shapes.features + (shapes.value_features or shapes.features)
    keys = shapes.batch * shapes.kv_heads * shapes.keys * features if shapes.spread else 0
    queries = shapes.batch * shapes.heads * shapes.queries * features
    turned = 2 * (queries + keys)  # there and, for the output, back; and the same in backward
    # blocks go round in forward and, unless they stay, in backward, and their gradients go home
    rounds = 2 if itemsize is not None and stays(keys / u * itemsize) else 3
    return turned * (u - 1) / (u * u * r) + rounds * (keys / u) * (r - 1) / r


def describe(scheme: Scheme, shapes: Shapes, itemsize: int, count: int = 1) -> str:
    """A line for the start-up table.

    Args:
        scheme: as chosen.
        shapes: of each call.
        itemsize: bytes an element.
        count: how many such calls there are in a step.

    Example::

        call = Shapes(batch=1, heads=4, kv_heads=4, queries=64, keys=64, features=8)
        assert describe(Scheme("ring", 1, 2), call, 4) == "attention: ring over 2 ranks, 16.4 KB sent by a rank a step"
    """
    sent = bytes_text(elements(scheme, shapes, itemsize) * itemsize * count)
    calls = f" ({count} calls)" if count > 1 else ""
    return f"attention{calls}: {scheme}, {sent} sent by a rank a step"


def _scheme(ulysses: int, size: int) -> Scheme:
    if ulysses in (1, size):
        return Scheme("ring" if ulysses == 1 else "ulysses", ulysses, size // ulysses)
    return Scheme("product", ulysses, size // ulysses)


@lru_cache(maxsize=4096)
def _part(positions: Positions, ulysses: int, group: int) -> tuple[Positions, Positions]:
    groups = positions.owner // ulysses  # ulysses ranks are neighbours
    return Positions.of(positions.owner[groups == group] % ulysses), Positions.of(groups)
