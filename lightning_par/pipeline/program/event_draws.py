"""The random numbers that events of a step draw on one device, so that ranks which don't run them can do without.

A trial notes the operations that draw, on the whole batch. Before a step runs, its dry run draws them again, of nothing
but shapes: so it knows where the generators stand before each event and behind the step, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.modes import TorchDispatchMode
from lightning_par.private.pytree import tree_map
from lightning_par.sharded.functions import DRAWS, DRAWS_ANEW, DRAWS_BY_VALUE, operator_of
from lightning_par.sharded.whole_draws import attends_without_draws, draws

DRAWING = DRAWS | DRAWS_ANEW
"""Functions that draw, by name."""

_BY_ENTRIES = DRAWS_BY_VALUE | {"rrelu_with_noise", "rrelu_with_noise_functional"}
_CHUNK = 1 << 15  # numbers that are drawn at once where these are thrown away

States = tuple[Tensor, Tensor | None]
"""Where torch's generators stand: the CPU's, and the current device's where there is one."""


@dataclass(frozen=True)
class _Like:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def ones(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).fill_(1)


class Drawn(NamedTuple):
    """An operation that draws from the global generators.

    Attributes:
        op: the operation.
        args: its arguments, with what stands for tensors.
        kwargs: likewise.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self) -> None:
        """The generator moves on as by the operation."""
        first = self.args[0] if self.args else None
        of_tensor = any(isinstance(arg, _Like) for arg in self.args[1:])
        if isinstance(first, _Like) and first.device.type == "cpu" and not of_tensor and _takes_64_bits(self.op):
            _throw_away(torch.Size(first.shape).numel())
            return
        args, kwargs = tree_map(lambda x: x.ones() if isinstance(x, _Like) else x, (self.args, self.kwargs))
        self.op(*args, **kwargs)

    @property
    def goes_by_entries(self) -> bool:
        """Whether how many numbers it draws follows from more than shapes."""
        return operator_of(self.op).removesuffix("_") in _BY_ENTRIES


@lru_cache
def _takes_64_bits(op: Any) -> bool:
    """Whether a fill takes 64 bits of the generator for each entry, as by trial with some numbers of entries."""
    if operator_of(op) != "bernoulli_":
        return False

    def moved(draw: Callable[[int, torch.Generator], Any], count: int) -> Tensor:
        own = torch.Generator().manual_seed(count)
        draw(count, own)
        return own.get_state()

    return all(
        torch.equal(
            moved(lambda n, own: torch.empty(n).bernoulli_(0.3, generator=own), count), moved(_throw_away, count)
        )
        for count in (1, 15, 16, 700, _CHUNK + 3)
    )


def _throw_away(count: int, generator: torch.Generator | None = None) -> None:
    """Draw ``count`` times 64 bits."""
    scratch = torch.empty(min(count, _CHUNK), dtype=torch.int64)
    for start in range(0, count, _CHUNK):
        scratch[: min(_CHUNK, count - start)].random_(-(1 << 63), None, generator=generator)  # type: ignore[call-overload]


class DrawLog(TorchDispatchMode):
    """Notes the operations inside that draw from the global generators.

    Args:
        found: they are added to it.

    Attributes:
        others: whether any draws from another generator.

    Example::

        found: list[Drawn] = []
        with DrawLog(found):
            torch.rand(3)
        assert [one.op for one in found] == [torch.ops.aten.rand.default]
    """

    def __init__(self, found: list[Drawn]) -> None:
        super().__init__()
        self.found = found
        self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func) or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self.others = True
        else:
            self.found.append(Drawn(func, *tree_map(_told, (tuple(args), kwargs))))
        return func(*args, **kwargs)


def _told(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    device = x.fake_device if isinstance(x, FakeTensor) else x.device
    return _Like(tuple(x.shape), tuple(x.stride()), x.dtype, device)


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    return operator_of(func) == "_fused_sdp_choice" or attends_without_draws(func, args, kwargs)


class PartDrawn(NamedTuple):
    """What a function within a unit draws, of which a microbatch has a part.

    Attributes:
        name: the function.
        dim: along which it is a part, None where all microbatches have the same numbers.
        positions: of the microbatches.
        strides: of the batch's tensor, in whose memory numbers are drawn in order; None where they are not known.
    """

    name: str
    dim: int | None
    positions: Positions | None
    strides: tuple[int, ...] | None


@dataclass
class OfBatch:
    """What a function within a unit has drawn for the batch.

    Attributes:
        stood: where generators stood before.
        parts: of what each operation drew, what microbatches have of it that are still to run.
        whole: whether these are all that it drew.
    """

    stood: States
    parts: list[dict[int, Tensor]] = field(default_factory=list)
    whole: bool = True

    def take(self, rank: int) -> list[Tensor] | None:
        """What a microbatch has of it, once; None where it must be drawn again."""
        if not self.whole or not all(rank in parts for parts in self.parts):
            return None
        return [parts.pop(rank) for parts in self.parts]


def standing() -> States:
    """Where torch's generators stand; `torch.get_rng_state` would note that it was asked."""
    cuda = torch.cuda.is_initialized() and torch.cuda.is_available()
    return torch.default_generator.get_state(), torch.cuda.get_rng_state() if cuda else None


def stand_at(states: States) -> None:
    """Put torch's generators there."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


def are_equal(some: States, others: States) -> bool:
    """Whether generators that stand there draw the same."""
    (cpu, device), (other_cpu, other_device) = some, others
    if device is None or other_device is None:
        return device is other_device and torch.equal(cpu, other_cpu)
    return torch.equal(cpu, other_cpu) and torch.equal(device, other_device)


def draw_again(drawn: Sequence[Drawn]) -> None:
    """The generators move on as by these operations."""
    with torch.no_grad():
        for one in drawn:
            one.again()
