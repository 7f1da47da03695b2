"""The parts of a strategy, in order: which of them a layout has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_par.fsdp.part import StoragePart
from lightning_par.mesh.layout import Groups
from lightning_par.mesh.subgroups import attend_along
from lightning_par.pipeline.part import StagesPart
from lightning_par.pipeline.placement.settings import PlacementSettings
from lightning_par.pipeline.placement.stages import PlacementSpread
from lightning_par.pipeline.plan.row_stages import RowSpread
from lightning_par.pipeline.plan.settings import Settings
from lightning_par.pipeline.stages import Spread
from lightning_par.private.compiler import Compiler
from lightning_par.sequence.part import TokensPart
from lightning_par.sequence.plan import SequenceDim
from lightning_par.sequence.scheme import Asked
from lightning_par.sharded.random_streams import Draws
from lightning_par.sharded.rules.several_axes import Mix
from lightning_par.strategies.compiled_layers import CompiledPart
from lightning_par.strategies.part import Part
from lightning_par.strategies.peers import PeersPart
from lightning_par.tensor.part import TensorPart
from lightning_par.tensor.residual_stream import shard_residual

if TYPE_CHECKING:
    from lightning_par.strategies.namespace import Namespace

P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Wanted:
    """What the user asked of a strategy, beside the sizes of its axes.

    Attributes:
        settings: a pipeline's or a placement's.
        plan: for the tensor axis, FQN globs to styles.
        shard_residual: whether the tokens of the residual stream are shared out over the tensor axis.
        attention: for the sequence axis.
        sequence_dim: for the sequence axis.
        data_parallel: "ddp" or "fsdp".
        reshard_after_forward: what "fsdp" gathered.
        verify: whether the first batch is run cut and whole.
        draws: what random numbers of a step are.
        timeout: how long a rank waits for another.
        asker: the strategy's name, for messages.
        namespace: whose Lightning it is.
    """

    settings: Settings | PlacementSettings
    plan: dict[str, str] | None
    shard_residual: bool
    attention: Asked
    sequence_dim: SequenceDim
    data_parallel: str
    reshard_after_forward: bool | Literal["auto"]
    verify: bool
    draws: Draws
    timeout: timedelta | None
    asker: str
    namespace: Namespace

    @property
    def group_timeout(self) -> timedelta:
        """That of process groups."""
        return self.timeout or timedelta(minutes=30)


class Parts:
    """A strategy's parts in the order in which they are applied; none before a run.

    Example::

        tokens = trainer.strategy.parts.of(TokensPart)
        plan = None if tokens is None else tokens.plan
    """

    def __init__(self, parts: tuple[Part, ...] = ()) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __reversed__(self) -> Iterator[Part]:
        return reversed(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def of(self, kind: type[P]) -> P | None:
        """The part of this class, if there is one."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        return self  # of the run, which is not copied with a trainer


def make_parts(groups: Groups, wanted: Wanted, compiler: Compiler | None = None) -> Parts:
    """The parts of a run with these axes. All ranks must call it, since process groups may be made.

    Args:
        groups: the mesh axes.
        wanted: what the user asked for.
        compiler: what the LightningModule was compiled by, if it was.
    """
    split = groups.split
    if len(split) > 1 or (split and groups.pipeline.size > 1):
        Mix(split if len(split) > 1 else [groups.pipeline, *split])
    tokens, tensor, storage = _tokens(groups, wanted), TensorPart(groups, wanted.plan), _storage(groups, wanted)
    laid_out = [part for part in (tokens, tensor, storage) if part is not None]
    # `residual` is an axis of its own only while its tokens are shared out, which `_tokens` settles.
    talking = {id(axis): axis for part in laid_out for axis in part.axes()}
    peers = PeersPart(groups, [*talking.values()], storage is not None, wanted.timeout)
    stages = _stages(groups, wanted, tokens, storage)
    compiled = None if compiler is None else CompiledPart(compiler, wanted.namespace, stages is not None)
    return Parts(tuple(part for part in (tokens, tensor, peers, stages, storage, compiled) if part is not None))


def _tokens(groups: Groups, wanted: Wanted) -> TokensPart | None:
    if groups.sequence.size > 1:
        attend_along(groups, wanted.attention, wanted.group_timeout)
        return TokensPart(groups, wanted.sequence_dim, wanted.attention)
    if wanted.shard_residual and groups.tensor.size > 1:
        return TokensPart(groups, None, "all_gather", shard_residual(groups.tensor))
    return None


def _storage(groups: Groups, wanted: Wanted) -> StoragePart | None:
    if wanted.data_parallel != "fsdp":
        return None
    if groups.gradients.size == 1:
        if groups.world.rank == 0:
            warnings.warn(
                f"data_parallel='fsdp' shares out nothing: no two of the {groups.world.size} ranks use the same weights"
                " (data 1, sequence 1). Give it more devices, or smaller sizes of the other axes.",
                stacklevel=1,
            )
        return None
    reshard = wanted.reshard_after_forward
    return StoragePart(groups, groups.pipeline.size == 1 if reshard == "auto" else reshard)


def _stages(
    groups: Groups, wanted: Wanted, tokens: TokensPart | None, storage: StoragePart | None
) -> StagesPart | None:
    placed = isinstance(wanted.settings, PlacementSettings)
    if groups.pipeline.size == 1 and not placed:
        return None
    groups.pipeline.name = "placement" if placed else "pipeline"  # in messages and in the ledger
    spread: Spread
    if isinstance(wanted.settings, PlacementSettings):
        spread = PlacementSpread(groups, wanted.settings, wanted.group_timeout)
    else:
        spread = RowSpread(groups, wanted.settings, wanted.group_timeout)
    return StagesPart(groups, spread, wanted, tokens, storage)
