"""How a deferred tensor is made from parts of files and of real tensors, entry by entry: a plan, and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_par.absent.deferred.fetches import Fetches, Wanted
from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.region import Region
from lightning_par.private.pytree import tree_map


class Recipe(Protocol):
    """What makes the values of a tensor of this shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """What it is made of in turn."""

    def into(self, target: Tensor, fetches: Fetches) -> None:
        """Write the values into ``target``, of the same shape and dtype, plain and on the CPU."""


@dataclass(frozen=True, eq=False)
class Read:
    """Entries of a mapped file."""

    region: Region
    geometry: Geometry
    inputs: tuple[Recipe, ...] = field(default=(), init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.geometry.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.geometry.dtype

    def into(self, target: Tensor, fetches: Fetches) -> None:
        self.region.read(self.geometry, target)


@dataclass(frozen=True, eq=False)
class Fetched:
    """Entries of a tensor of a checkpoint that is not read yet."""

    wanted: Wanted
    inputs: tuple[Recipe, ...] = field(default=(), init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.wanted.geometry.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.wanted.geometry.dtype

    def into(self, target: Tensor, fetches: Fetches) -> None:
        fetches.into(target, self.wanted)


@dataclass(frozen=True, eq=False)
class Held:
    """Entries of a real tensor."""

    value: Tensor
    inputs: tuple[Recipe, ...] = field(default=(), init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def into(self, target: Tensor, fetches: Fetches) -> None:
        target.copy_(self.value)


@dataclass(frozen=True, eq=False)
class Cast:
    """The same entries in another dtype."""

    of: Recipe
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.of,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def into(self, target: Tensor, fetches: Fetches) -> None:
        target.copy_(_made(self.of, fetches))


@dataclass(frozen=True, eq=False)
class Shaped:
    """The same entries in another shape."""

    of: Recipe
    shape: tuple[int, ...]

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.of,)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def into(self, target: Tensor, fetches: Fetches) -> None:
        if target.is_contiguous():
            self.of.into(target.view(self.of.shape), fetches)
        else:
            target.copy_(_made(self.of, fetches).view(self.shape))


@dataclass(frozen=True, eq=False)
class Joined:
    """Several in a row along ``dim``."""

    parts: tuple[Recipe, ...]
    dim: int

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return self.parts

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def into(self, target: Tensor, fetches: Fetches) -> None:
        done = 0
        for part in self.parts:
            part.into(target.narrow(self.dim, done, part.shape[self.dim]), fetches)
            done += part.shape[self.dim]


@dataclass(frozen=True, eq=False)
class Computed:
    """What a function makes of the same entries of its arguments, tensors among which are recipes."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return tuple(x for x in self.args if hasattr(x, "into"))

    def into(self, target: Tensor, fetches: Fetches) -> None:
        args = tree_map(lambda x: _made(x, fetches) if hasattr(x, "into") else x, self.args)
        target.copy_(self.func(*args, **self.kwargs))


def made(recipe: Recipe, like: Geometry | None = None) -> Tensor:
    """The values, plain and on the CPU, in memory of their own.

    Args:
        recipe: what makes them.
        like: dense, of the same shape and dtype: how they are to lie there; contiguous by default.
    """
    return _made(recipe, Fetches(_wanted(recipe)), like)


def _made(recipe: Recipe, fetches: Fetches, like: Geometry | None = None) -> Tensor:
    if like is None:
        target = torch.empty(recipe.shape, dtype=recipe.dtype)
    else:
        target = torch.empty_strided(like.shape, like.stride, dtype=like.dtype)
    recipe.into(target, fetches)
    return target


def _wanted(recipe: Recipe) -> Iterator[Wanted]:
    if isinstance(recipe, Fetched):
        yield recipe.wanted
    for x in recipe.inputs:
        yield from _wanted(x)
