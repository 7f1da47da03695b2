"""Sums over samples, followed: is a value, computed from one microbatch, a share of what the whole batch gives?"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_par.private.fake_tensors import unset_fake_temporarily
from lightning_par.private.modes import DisableTorchFunction
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.functions import ADDS, ASKS, DIVIDES, LINEAR, SCALES, STACKS, SUMS, name_of
from lightning_par.sharded.tensor import ShardedTensor


@dataclass(frozen=True)
class Share:
    """What is known of an event's result: ``tag`` is None where it has nothing to do with sums over samples."""

    tag: str | None = None
    scaled: tuple[int, ...] = ()  # arguments that must be scaled to a share before they are added

    SHARE: ClassVar[str] = "share"
    MIXED: ClassVar[str] = "mixed"  # a function of the whole sum that is not linear: no share of anything

    @classmethod
    def after(cls, func: Any, args: Any, kwargs: Any, tags: dict[int, str], reduced: bool) -> Share:
        """What the function ``func`` makes of arguments with ``tags``; ``reduced`` if it summed over samples."""
        name = name_of(func)
        given = {i: tag_of_all(tags, x) for i, x in enumerate(args)}
        others = tag_of_all(tags, kwargs)
        found = {*given.values(), others} - {None}
        adds = name in ADDS and not kwargs  # what is no share is scaled to one
        if found == {cls.SHARE} and not (reduced or adds or name in ASKS or is_additive(func, args, kwargs, tags)):
            return cls(cls.MIXED)
        if reduced:
            return cls(cls.SHARE if not found and name in SUMS else cls.MIXED)
        if not found:
            return cls()
        if cls.MIXED in found or others is not None:
            return cls(cls.MIXED)
        with_share = [i for i, tag in given.items() if tag == cls.SHARE]
        if (name in LINEAR or name in ASKS) and with_share == [0]:
            return cls(cls.SHARE)
        if name in SCALES and len(with_share) == 1:
            return cls(cls.SHARE)
        if name in DIVIDES and with_share == [0]:
            return cls(cls.SHARE)
        if adds:
            return cls(cls.SHARE, tuple(i for i in (0, 1) if i < len(args) and given[i] is None))
        if name in STACKS and with_share == [0]:
            parts = [tag_of_all(tags, x) for x in args[0]] if isinstance(args[0], (list, tuple)) else []
            return cls(cls.SHARE if parts and all(tag == cls.SHARE for tag in parts) else cls.MIXED)
        return cls(cls.MIXED)


def tag_result(tags: dict[int, str], func: Any, args: Any, kwargs: Any, result: Any, reduced: bool) -> tuple[int, ...]:
    """Note in ``tags`` what ``func`` has made; returns which of its arguments must be scaled to a share."""
    shares = Share.after(func, args, kwargs, tags, reduced)
    for x in tensors_in(result):
        if not isinstance(x, ShardedTensor) and shares.tag is not None:
            tags[id(x)] = shares.tag
        elif isinstance(x, ShardedTensor) and shares.tag is not None and not reduced:
            tags[id(x)] = Share.MIXED
    return shares.scaled


def tag_of(tags: dict[int, Any], x: Tensor) -> str | None:
    """What ``x`` is said to be in ``tags``; None where nothing is."""
    return tags.get(id(x))


def tag_of_all(tags: dict[int, Any], value: Any) -> str | None:
    """The tag of the tensors in ``value``; mixed where one of them is."""
    found = {tags.get(id(x)) for x in tensors_in(value)} - {None}
    return None if not found else found.pop() if len(found) == 1 else Share.MIXED


_LARGEST = 1 << 20  # elements of a trial's arguments


def is_additive(func: Any, args: Any, kwargs: Any, tags: dict[int, Any]) -> bool:
    """Whether what ``func`` makes of a sum is the sum of what it makes of shares; tried, small, large and in between.

    Example::

        x = torch.ones(2)
        assert is_additive(torch.neg, (x,), {}, {id(x): Share.SHARE})
        assert not is_additive(torch.round, (x,), {}, {id(x): Share.SHARE})
    """
    tensors = tensors_in((args, kwargs))
    if sum(x.numel() for x in tensors) > _LARGEST:
        return True
    generator = torch.Generator().manual_seed(0)
    with unset_fake_temporarily(), torch.no_grad(), DisableTorchFunction():
        return any(  # integers may be divisors, or indices of the only entry
            all(_adds(func, args, kwargs, tags, scale, fill, generator) for scale in (1e-6, 1.0, 1e6))
            for fill in (1, 0)
        )


def _adds(
    func: Any, args: Any, kwargs: Any, tags: dict[int, Any], scale: float, fill: int, generator: torch.Generator
) -> bool:
    wholes: dict[int, Tensor] = {}
    shares: dict[int, Tensor] = {}
    for x in tensors_in((args, kwargs)):
        drawn = torch.randn((2, *x.shape), generator=generator, dtype=torch.float64)
        if tags.get(id(x)) == Share.SHARE:
            drawn = drawn.to(x.dtype) * scale
            wholes[id(x)], shares[id(x)] = drawn.sum(0), drawn
        elif not x.is_floating_point():
            wholes[id(x)] = torch.full(x.shape, fill).to(x.dtype)
        else:
            wholes[id(x)] = drawn[0].abs().to(x.dtype) + 0.5

    def run(part: int | None) -> Any:
        def real(x: Tensor) -> Tensor:
            share = shares.get(id(x)) if part is not None else None
            return (wholes[id(x)] if share is None else share[part]).clone()

        given = map_tensors(real, (args, kwargs))
        return func(*given[0], **given[1])

    try:
        whole, *parts = (tensors_in(run(part)) for part in (None, 0, 1))
    except Exception:  # nothing is known of it then
        return False
    return all(_is_sum(x, a, b) for x, a, b in zip(whole, *parts)) if whole else True


def _is_sum(whole: Tensor, a: Tensor, b: Tensor) -> bool:
    if not (whole.is_floating_point() or whole.is_complex()) or a.shape != whole.shape:
        return False
    tolerance = 64 * torch.finfo(whole.dtype).eps * float(max(a.abs().max(), b.abs().max())) if whole.numel() else 0.0
    if not isfinite(tolerance):  # a number that it is given is not finite: it tells nothing
        return bool(torch.equal(torch.isfinite(a), torch.isfinite(whole)))
    return bool(torch.allclose(a + b, whole, rtol=0, atol=tolerance))
