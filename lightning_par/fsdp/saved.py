"""What backward needs, as the graph keeps it. Each can tell whether it was written to since, as on one device: torch
itself doesn't look where hooks of saved tensors are.

What is kept is detached: with the version of the user's tensor, which itself may become the stored weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_par.private.tensors import write_count

if TYPE_CHECKING:
    from lightning_par.fsdp.block_use import Kept, Use
    from lightning_par.fsdp.regathered import Again
    from lightning_par.fsdp.stored_parameter import Stored

Counted = tuple[Tensor, int]  # a tensor of no weight, and how often it was written to


class Later:
    """A gathered weight, or a view of it, that is let go, and gathered again when backward comes to it."""

    __slots__ = ("kept", "offset", "size", "stride", "use", "writes")

    def __init__(self, use: Use, kept: Kept, x: Tensor) -> None:
        self.use, self.kept, self.size, self.stride = use, kept, x.size(), x.stride()
        self.offset, self.writes = int(x.storage_offset()), write_count(x)

    def get(self) -> Tensor:
        return self.use.for_backward(self.kept, self.writes).as_strided(self.size, self.stride, self.offset)


class Held:
    """The same, where what was gathered stays."""

    __slots__ = ("number", "use", "writes", "x")

    def __init__(self, use: Use, number: int, x: Tensor) -> None:
        self.use, self.number, self.x, self.writes = use, number, x.detach(), write_count(x)

    def get(self) -> Tensor:
        if write_count(self.x) != self.writes:
            raise weight_written(self.use.block.weights[self.number])
        self.use.refuse_written(self.number)
        return self.x


class Viewed:
    """A gathered weight, or a view of it, that user code has beyond the call."""

    __slots__ = ("version", "weight", "writes", "x")

    def __init__(self, x: Tensor, weight: Stored, version: int | None = None) -> None:
        self.x, self.weight, self.writes = x.detach(), weight, write_count(x)
        self.version = write_count(weight._local) if version is None else version

    def get(self) -> Tensor:
        if (write_count(self.weight._local), write_count(self.x)) != (self.version, self.writes):
            raise weight_written(self.weight)
        return self.x


Packed = Later | Held | Viewed | Counted


def unpacked(saved: Packed | Again | Tensor) -> Tensor:
    """What backward is given for ``saved``.

    Raises:
        RuntimeError: it was written to in place since.
    """
    if isinstance(saved, Tensor):
        return saved
    if type(saved) is not tuple:
        return saved.get()  # type: ignore[union-attr]
    x, writes = saved
    if write_count(x) != writes:
        raise RuntimeError(
            f"A tensor of shape {tuple(x.shape)} that backward needs was written to in place (modified by an inplace "
            f"operation): it is at version {write_count(x)}, expected was {writes}. Write `x = x * 2` in place of "
            "`x *= 2`, or do it after backward."
        )
    return x


def weight_written(weight: Stored) -> RuntimeError:
    """The error of a backward that needs a weight as it was."""
    return RuntimeError(
        f"The weight {weight._name or ''!r} was written to in place (modified by an inplace operation) between the "
        "step and its backward, which needs it as it was. Call backward before the write, or the step anew after it."
    )
