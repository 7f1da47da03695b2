"""Torch functions on fake tensors, also those that fakes can't run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.mask_shares import Share

UNRUN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What fakes raise where a shape depends on values, or is not known without running."""


def is_sharded(x: Any) -> bool:
    """Whether ``x`` is a sharded tensor."""
    return isinstance(x, ShardedTensor)


_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


def is_fake(x: Any) -> bool:
    """Whether ``x`` is a tensor without values, or a shard, of whose values a trial on one rank does not know all."""
    if isinstance(x, ShardedTensor):
        whole = getattr(x, "_whole", None)  # a batch's tensor is whole on every rank
        return whole is None or is_fake(whole)
    return isinstance(x, FakeTensor)


def is_sized(func: Any, args: Any) -> bool:
    """Whether ``func``, which fakes can't run, returns as many values whatever these are: ``x[i]`` at places."""
    if getattr(func, "__name__", "") not in ("__getitem__", "__setitem__"):
        return False
    key = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(_is_whole_place(x) for x in key)


def _is_whole_place(x: Any) -> bool:
    if isinstance(x, slice):
        return not any(isinstance(end, Tensor) for end in (x.start, x.stop, x.step))
    if isinstance(x, Tensor):
        return x.dtype in _WHOLE
    return x is None or x is ... or type(x) is int


class OnOnes:
    """A function that fakes can't run, in its place: rules know it by its name, and it runs on fakes.

    Args:
        func: the function.
        unsized: whether the shape of its result depends on values.
        share: of what its mask lets through; None: all.
    """

    def __init__(self, func: Any, unsized: bool = False, share: Share | None = None) -> None:
        self.in_place_of = func
        self.unsized, self.share = unsized, share
        self.__name__, self.__module__ = getattr(func, "__name__", ""), getattr(func, "__module__", None) or ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode: Any = next(x.fake_mode for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))
        return run_on_ones(mode, self.in_place_of, args, kwargs, self.share)

    def __hash__(self) -> int:
        return hash(self.in_place_of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnOnes) and self.in_place_of == other.in_place_of


def run_on_fakes(
    mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, share: Share | None = None
) -> tuple[Any, Any]:
    """The result of ``func``, or where fakes can't run it what it makes of ones of the same shapes, as fakes.

    Some functions give results whose shapes depend on values, some kernels have no fake version, and some fake versions
    want what the real ones don't. Their results lie where the fakes lie, and are functions of them to autograd.

    Args:
        mode: of the fakes.
        func: a torch function.
        args: its arguments; those that are real keep their values.
        kwargs: its arguments by name.
        share: of what its mask lets through, where that is not known; None: all.

    Returns:
        The result, and what to run in the place of ``func`` on other fakes: itself, or an `OnOnes`.

    Raises:
        Exception: whatever ``func`` raises on fakes, where it raises on ones, too.

    Example::

        with FakeTensorMode() as mode:
            x = torch.empty(3)
        assert run_on_fakes(mode, torch.nonzero, (x,), {})[0].shape == (3, 1)
    """
    try:
        return func(*args, **kwargs), func
    except RuntimeError as error:
        inputs = tree_leaves((args, kwargs))
        if not any(map(is_fake, inputs)) or not (isinstance(error, UNRUN) or _of_kernel(error, inputs)):
            raise
        try:
            return run_on_ones(mode, func, args, kwargs, share), OnOnes(func, isinstance(error, UNRUN), share)
        except Exception:
            raise error from None


def _of_kernel(error: Exception, inputs: list[Any]) -> bool:
    """Whether a kernel raised it, of which the fake version may be to blame, and not this package."""
    return not type(error).__module__.startswith("lightning_par.") and not any(map(is_sharded, inputs))


def run_on_ones(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, share: Share | None = None) -> Any:
    """As `run_on_fakes` where fakes can't run ``func``."""
    chosen = _at_places(mode, func, args, kwargs)
    if chosen is NotImplemented:
        chosen = _chosen(func, args, kwargs)
    if chosen is not NotImplemented:
        return chosen
    fakes = [x for x in tree_leaves((args, kwargs)) if is_fake(x)]
    device = next((x.device for x in fakes if x.device.type != "cpu"), torch.device("cpu"))
    with unset_fake_temporarily():
        masks = {} if share is None else share.masks(getattr(func, "__name__", ""), args)
    result, given = _on_real(func, args, kwargs, fakes, _ones(device), masks)
    if not any(isinstance(x, Tensor) for x in tree_leaves(result)):
        raise TypeError("an address, or what else is no value of a tensor")
    known = _known(result, lambda: _on_real(func, args, kwargs, fakes, _zeros(device))[0])

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in given or id(x) in known:
            return given.get(id(x), known.get(id(x), x))
        with mode:
            made = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=device)
        return linked(made, fakes) if x.requires_grad else made

    return tree_map(fake, result)


def _chosen(func: Any, args: Any, kwargs: Any) -> Any:
    """What known masks choose of a fake, by the places where they let through: ones of its shape may take gigabytes."""
    name = getattr(func, "__name__", "")
    if name not in ("__getitem__", "masked_select") or kwargs or len(args) != 2:
        return NotImplemented
    x, index = args
    if name == "masked_select" and x.shape != index.shape or not isinstance(index, (Tensor, tuple)):
        return NotImplemented
    found = places_of(index if isinstance(index, tuple) else (index,))
    return NotImplemented if found is None else x[found]


def _at_places(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What is at places that are not known, as in ``x[i]``, in the memory of a fake of ``x``; or what it becomes."""
    if getattr(func, "__name__", "") not in ("__getitem__", "__setitem__") or kwargs:
        return NotImplemented
    x, index, *value = args
    index = index if isinstance(index, tuple) else (index,)
    if isinstance(x, ShardedTensor) or not any(map(_is_place, index)):
        return NotImplemented
    x = x if is_fake(x) else mode.from_tensor(x)
    return func(x, tuple(0 if _is_place(i) else i for i in index), *value)


def _is_place(x: Any) -> bool:
    """Whether an index is one number without a value: as with any number, what it picks is a view."""
    return is_fake(x) and not isinstance(x, ShardedTensor) and not x.ndim and x.dtype in _WHOLE


def places_of(index: Sequence[Any]) -> tuple[Any, ...] | None:
    """``index`` with places in the place of masks; None where it has no masks, or one without values.

    Example::

        (rows,) = places_of([torch.tensor([True, False, True])])
        assert rows.tolist() == [0, 2]
    """
    masks = [x for x in tree_leaves(index) if isinstance(x, Tensor) and x.dtype is torch.bool]
    if not masks or not all(type(x) is Tensor and x.ndim for x in masks):
        return None

    def places(x: Any) -> Sequence[Any]:
        return x.nonzero().unbind(1) if isinstance(x, Tensor) and x.dtype is torch.bool else (x,)

    with unset_fake_temporarily():
        return tuple(place for x in index for place in places(x))


def all_fake(mode: FakeTensorMode, args: Any, kwargs: Any, result: Any) -> Any:
    """``result``, of a function of fakes, with fakes for values that it made for itself and wrote the fakes' into.

    Such a value is real, though it depends on the fakes: ``pad_packed_sequence`` fills a tensor, then copies into it.

    Example::

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = torch.empty(3)
        assert is_fake(all_fake(mode, (x,), {}, torch.zeros(3)))
    """
    if isinstance(result, FakeTensor) or in_functorch():  # what is seen within a transform wraps a fake
        return result
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and not is_fake(x) and not is_sharded(x)]
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)] if made else []
    fakes, ids = [x for x in given if is_fake(x)], {id(x) for x in given}
    if not fakes or any(map(is_sharded, given)):
        return result

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_fake(x) or id(x) in ids or not (x.is_floating_point() or x.is_complex()):
            return x
        return linked(mode.from_tensor(x.detach()), fakes) if x.requires_grad else mode.from_tensor(x)

    return tree_map(fake, result)


def _known(result: Any, again: Callable[[], Any]) -> dict[int, Tensor]:
    """By the ids of those in ``result``: integers that ones and zeros agree on, as the sizes of a packed batch."""
    integers = _integers(result)
    if not integers or isinstance(result, Tensor):
        return {}
    pairs = zip(integers, _integers(again()))
    with unset_fake_temporarily():  # a mode may be on
        return {id(x): other for x, other in pairs if x.shape == other.shape and torch.equal(x, other.to(x.device))}


def _integers(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)]


def _on_real(
    func: Any,
    args: Any,
    kwargs: Any,
    fakes: list[Tensor],
    ways: Iterable[Callable[[Tensor], Tensor]],
    known: Mapping[int, Tensor] = MappingProxyType({}),
) -> tuple[Any, dict[int, Tensor]]:
    """The result on real tensors in place of ``fakes``, those that are ``known`` by their ids; and the fake of each of
    them, by its id."""
    failure: Exception = RuntimeError("nothing was tried")
    with unset_fake_temporarily():
        for way in ways:
            real = {id(x): known[id(x)] if id(x) in known else way(x) for x in fakes}

            def given(x: Any, real: dict[int, Tensor] = real) -> Any:
                return real.get(id(x), x)

            try:
                return func(*tree_map(given, args), **tree_map(given, kwargs)), {id(real[id(x)]): x for x in fakes}
            except Exception as error:  # whatever kernels raise
                failure = error
        raise failure


def _ones(device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """Ones on the CPU, in one place of memory if that will do; then zeros: an index of 1 may be too large."""
    yield lambda x: _filled(x, 1, torch.device("cpu"))
    yield lambda x: _filled(x, 1, torch.device("cpu")).clone(memory_format=torch.contiguous_format)
    yield from _zeros(device)


def _zeros(device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """Zeros where the fakes lie, then on the CPU. On other devices a wrong index would end the process."""
    for place in dict.fromkeys((device, torch.device("cpu"))):
        yield lambda x, place=place: _filled(x, 0, place).clone(memory_format=torch.contiguous_format)  # type: ignore[misc]


def _filled(x: Tensor, value: int, device: torch.device) -> Tensor:
    filled = torch.full((), value, dtype=x.dtype, device=device).expand(tuple(x.shape))
    return filled.requires_grad_(x.requires_grad)


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*sources)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def linked(x: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """``x``, whose gradient leads to those of the ``sources`` that want one, by no function that could run on fakes."""
    wanting = [source for source in sources if source.requires_grad]
    return _Linked.apply(x, *wanting) if wanting else x
