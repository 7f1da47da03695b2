"""How parameters lie on the ranks that use the same of them: whole, or in parts, which messages gather by blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from torch import nn

from lightning_par.fsdp.blocks import Block, plan_blocks, plan_units
from lightning_par.fsdp.flat import ALIGNED
from lightning_par.pipeline.plan.units import ancestors
from lightning_par.planner.recording.profile import Parameter, Stages


@dataclass(frozen=True)
class StoredPart:
    """What one rank stores of a parameter.

    Attributes:
        parameter: of which.
        numel: elements that it stores.
        message: elements of its part in a message, padded; 0: every rank stores all that it uses.
        blocked: whether messages of several parameters can have it.
    """

    parameter: Parameter
    numel: int
    message: int = 0
    blocked: bool = False


def stored_part(parameter: Parameter, tensor: int, ranks: int, rank: int, stored: bool) -> StoredPart:
    """What index ``rank`` of ``ranks`` that use the same of ``parameter`` stores of it.

    Args:
        parameter: any.
        tensor: the index along the tensor axis.
        ranks: with the same weights.
        rank: the index among these.
        stored: whether they store a part each.

    Example::

        weight = Parameter("weight", (5, 4), None, (), True, 4)
        assert stored_part(weight, 0, ranks=2, rank=1, stored=True).numel == 8
    """
    shape = parameter.part(tensor)
    dim = parameter.stored_dim(ranks) if stored else None
    if dim is None:
        return StoredPart(parameter, prod(shape))
    size = shape[dim]
    most, own = -(-size // ranks), size // ranks + (rank < size % ranks)
    rest = prod(shape) // size if size else 0
    # As `lightning_par.fsdp.flat.Place.of` has it: the last part alone may be shorter, and then be padded at its end.
    even, padded = size % ranks == 0, size % ranks == ranks - 1
    return StoredPart(parameter, own * rest, most * rest, even or padded and prod(shape[:dim]) == 1)


@dataclass(frozen=True)
class StoredSum:
    """Of what a rank stores: elements, those that get gradients, and the number of parameters that do."""

    numel: int
    trained: int
    count: int


@lru_cache(maxsize=2**14)
def stored_sum(stages: Stages, own: tuple[int, ...], tensor: int, ranks: int, rank: int, stored: bool) -> StoredSum:
    """The sum over the parameters of the stages ``own``; see `stored_part`."""
    parts = [stored_part(x, tensor, ranks, rank, stored) for x in stages.held(own)]
    trained = [part.numel for part in parts if part.parameter.graded]
    return StoredSum(sum(part.numel for part in parts), sum(trained), len(trained))


@lru_cache(maxsize=1024)
def stored_rests(stages: Stages, own: tuple[int, ...], tensor: int, ranks: int) -> frozenset[int]:
    """From which of ``ranks`` on parts of a parameter of the stages ``own`` are smaller than those of ranks before."""
    held = ((x.part(tensor), x.stored_dim(ranks)) for x in stages.held(own))
    return frozenset(shape[dim] % ranks for shape, dim in held if dim is not None)


@dataclass(frozen=True)
class BlockMessage:
    """The message by which a block's weights are gathered, and their gradients summed.

    Attributes:
        paths: of the block's modules.
        names: of its weights.
        numel: elements of a rank's part.
        low: elements of those that nothing uses in single precision.
    """

    paths: tuple[str, ...]
    names: tuple[str, ...]
    numel: int
    low: int

    def gathered(self, low: int, other: int) -> int:
        """Bytes of a rank's part, where elements of those take ``low`` bytes, and of the others ``other``."""
        size = self.low * low + (self.numel - self.low) * other
        mixed = low != other and 0 < self.low < self.numel
        return size + -size % ALIGNED * mixed

    def has(self, path: str) -> bool:
        """Whether the module ``path`` is in it."""
        return not {path, *ancestors(path)}.isdisjoint(self.paths)

    @property
    def stays(self) -> bool:
        """Whether it stays whole from the first of its calls to the end of backward."""
        return len(self.paths) > 1


def block_messages(
    module: nn.Module, parts: Iterable[StoredPart], units: Collection[str] = ()
) -> tuple[list[BlockMessage], list[StoredPart]]:
    """The messages of a rank's parts, and the parts that are gathered where they are used.

    Args:
        module: whose parameters they are.
        parts: that a rank stores.
        units: modules that a pipeline calls as a whole; without one, none.
    """
    known = {part.parameter.name: part for part in parts if part.message}
    hidden = {
        f"{path}.{name}"
        for path, m in module.named_modules()
        if isinstance(m, nn.RNNBase)
        for name, _ in m.named_parameters(recurse=False)
    }
    sizes = {name: part.message for name, part in known.items() if part.blocked and name not in hidden}
    blocks: Sequence[Block] = plan_units(module, units, sizes) if units else plan_blocks(module, sizes)
    found = [_message(block, known) for block in blocks]
    inside = {name for block in blocks for name in block.weights}
    return found, [part for name, part in known.items() if name not in inside]


def _message(block: Block, known: Mapping[str, StoredPart]) -> BlockMessage:
    parts = [known[name] for name in block.weights]
    low = sum(p.message for p in parts if p.parameter.low)
    return BlockMessage(block.paths, block.weights, sum(p.message for p in parts), low)
