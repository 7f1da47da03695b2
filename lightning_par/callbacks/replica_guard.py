"""Copies that ranks hold of the same weights, compared while training goes on: one hash a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.digest import digest, outline
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.strategies.base import StrategyMixin
from lightning_par.strategies.namespace import Namespace

PURPOSE = "replicas"
_STATE = "the optimizer's state of "


class ReplicaGuardMixin:
    """Asserts while training goes on that ranks which hold the same weights hold them alike, bit by bit.

    Compared are the copies that data and sequence parallelism make, what tensor parallelism leaves whole, parts that
    several replicas hold, and tied weights of several pipeline stages. Buffers are not: BatchNorm's statistics are each
    replica's own. A check hashes the rank's weights once and gathers one int64 a parameter from each rank, in one
    message (purpose ``"replicas"`` in the ledger). Works with this package's strategies and with Lightning's
    ``"ddp"`` and ``ModelParallelStrategy``; on one device it does nothing.

    Kernels that aren't deterministic let copies drift apart by rounding on GPUs where each rank computes the same
    gradient for itself; ``Trainer(deterministic=True)`` prevents it.

    Args:
        every_n_steps: optimizer steps between two checks.
        optimizer_state: whether the optimizer's state is compared, too: twice the numbers, and as much to hash again as
            it is larger.

    Raises:
        ValueError: ``every_n_steps`` is not positive; when training starts, if the strategy is one whose copies are not
            known.
        RuntimeError: while training, on all ranks, if copies differ. The message names the step, the parameter and the
            ranks. A difference spreads to more parameters with each step, by as much as an optimizer moves them: where
            several differ, the one whose copies are farthest apart comes first.

    Example::

        Trainer(strategy="tensor_parallel", devices=4, callbacks=lightning_par.ReplicaGuard(every_n_steps=100))
    """

    namespace: Namespace

    def __init__(self, every_n_steps: int = 100, optimizer_state: bool = False) -> None:
        if every_n_steps < 1:
            raise ValueError(f"ReplicaGuard checks every so many steps, got every_n_steps={every_n_steps}.")
        self.every_n_steps, self.optimizer_state = every_n_steps, optimizer_state
        self._checked = 0
        self._pieces: tuple[_Pieces, ...] = ()  # by rank

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._checked, self._pieces = trainer.global_step, ()
        if trainer.world_size > 1 and not self._knows(trainer.strategy):
            raise ValueError(
                f"ReplicaGuard does not know which ranks hold copies under {type(trainer.strategy).__name__}. It works "
                "with the strategies of lightning_par, DDPStrategy and ModelParallelStrategy; leave it out here."
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if trainer.world_size == 1 or step // self.every_n_steps == self._checked // self.every_n_steps:
            return
        self._checked = step
        found = self._unequal(trainer, pl_module)
        if found:
            raise RuntimeError(
                f"After optimizer step {step} the ranks' copies of {found[0]}. Something changed them on some ranks "
                f"alone: look for code that depends on the rank, or draws random numbers there.{_rest(found)}"
            )

    def _knows(self, strategy: Any) -> bool:
        ddp, deep, parallel = (
            self.namespace.from_pytorch("strategies", name)
            for name in ("DDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
        )
        return isinstance(strategy, StrategyMixin | parallel | ddp) and not isinstance(strategy, deep)

    @torch.no_grad()
    def _unequal(self, trainer: Any, module: nn.Module) -> list[Unequal]:
        """Farthest apart first, parameters before the optimizer's state."""
        world = Axis("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
        held = {name: _held(p) for name, p in module.named_parameters()}
        pieces = _Pieces(tuple(held), tuple(piece for _, piece in held.values()))
        if not self._pieces or self._pieces[world.rank] != pieces:
            self._pieces = tuple(world.all_gather_object(pieces, PURPOSE))
        compared = [[x] for x, _ in held.values()]
        hashes = [_hash(x) for (x,) in compared]
        if self.optimizer_state:
            states = {id(p): state for optimizer in trainer.optimizers for p, state in optimizer.state.items()}
            compared += [[*_tensors_of(states.get(id(p), {}))] for p in module.parameters()]
            hashes += [_hash_of_state(state) for state in compared[len(hashes) :]]
        if not hashes:
            return []
        device = trainer.strategy.root_device
        told = [row.tolist() for row in world.all_gather(torch.stack([x.to(device) for x in hashes]), PURPOSE)]
        found = unequal(self._pieces, told)
        if found[1:]:  # alike on all ranks
            columns = dict(zip(_names(held, len(hashes)), compared))
            outlines = torch.stack([_outline(columns[one.name], device) for one in found])
            found = farthest_first(found, [rows.cpu() for rows in world.all_gather(outlines, f"{PURPOSE} that differ")])
        return found


@dataclass(frozen=True)
class _Pieces:
    """What a rank holds: names of parameters, and of each the piece, "" where it is elsewhere."""

    names: tuple[str, ...]
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Unequal:
    """Copies that differ: of what, and the ranks that agree with one another, those of the most ranks first."""

    name: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        agree, *others = (f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in self.ranks)
        return f"{self.name} differ: {'; '.join(others)} from {agree}"


def unequal(held: Sequence[_Pieces], hashes: Sequence[Sequence[int]]) -> list[Unequal]:
    """Whose copies differ, in the module's order.

    Args:
        held: what each rank holds.
        hashes: each rank's hash of each parameter, and behind them, if there are twice as many, of each one's state.

    Raises:
        RuntimeError: the ranks have parameters of other names.
    """
    for rank, its in enumerate(held):
        if its.names != held[0].names:
            odd = sorted({*its.names} ^ {*held[0].names}) or ["their order"]
            raise RuntimeError(f"Ranks 0 and {rank} have not the same parameters: {odd[0]} is on one of them alone.")
    found = []
    for column, name in enumerate(_names(held[0].names, len(hashes[0]))):
        pieces = [its.pieces[column % len(held[0].names)] for its in held]
        for piece in dict.fromkeys(pieces):
            agree: dict[int, list[int]] = {}
            for rank, row in enumerate(hashes):
                if piece and pieces[rank] == piece:
                    agree.setdefault(row[column], []).append(rank)
            if len(agree) > 1:
                ranks = sorted(map(tuple, agree.values()), key=lambda ranks: (-len(ranks), ranks))
                found.append(Unequal(name, tuple(ranks)))
                break
    return found


def farthest_first(found: Sequence[Unequal], outlines: Sequence[Tensor]) -> list[Unequal]:
    """In the order of how far the copies are apart, an entry on average; all parameters, then all states.

    Args:
        found: whose copies differ.
        outlines: each rank's, a row for each of ``found``: how many entries it has, and their outline.
    """

    def apart(row: int) -> float:
        first, *others = (outlines[ranks[0]][row] for ranks in found[row].ranks)
        squares = [(first - other)[1:].square().mean().item() / max(first[0].item(), 1) for other in others]
        return max(square if square == square else math.inf for square in squares)  # NaN: as far as can be

    order = sorted(range(len(found)), key=lambda row: (found[row].name.startswith(_STATE), -apart(row)))
    return [found[row] for row in order]


def _names(parameters: Iterable[str], columns: int) -> list[str]:
    names = [repr(name) for name in parameters]
    return [*names, *(f"{_STATE}{name}" for name in names)][:columns]


def _rest(found: Sequence[Unequal]) -> str:
    others = [one.name for one in found[1:]]
    if not others:
        return ""
    more = f" and {len(others) - 3} more" if others[3:] else ""
    return (
        f"\nNearer to one another, but not equal, are those of {', '.join(others[:3])}{more}. A difference spreads as "
        "training goes on: with every_n_steps=1 the guard finds it where it begins."
    )


def _held(x: Tensor) -> tuple[Tensor | None, str]:
    """What this rank holds of ``x``, plain, and a name for it that exactly the ranks with copies of it share."""
    if is_elsewhere(x):
        return None, ""
    coordinates = []
    while isinstance(x, ShardedTensor):
        coordinates.append(f"{x.axis.name} {x.axis.rank}")
        x = x.local
    if isinstance(x, DTensor):
        at = x.device_mesh.get_coordinate() or ()
        coordinates += [f"mesh {i} {at[i]}" for i, one in enumerate(x.placements) if not one.is_replicate()]
        x = x.to_local()
    return x, " ".join(coordinates) or "whole"


def _hash(x: Tensor | None) -> Tensor:
    return torch.zeros((), dtype=torch.int64) if x is None else digest(x)


def _hash_of_state(state: Sequence[Tensor | None]) -> Tensor:
    hashes = [_hash(x).cpu() for x in state]
    return digest(torch.stack(hashes)) if hashes else _hash(None)


def _outline(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """How many entries there are, and their outline."""
    there = [x for x in tensors if x is not None]
    count = torch.tensor([float(sum(x.numel() for x in there))], dtype=torch.float64, device=device)
    return torch.cat([count, sum((outline(x).to(device) for x in there), outline(count[:0]))])


def _tensors_of(state: dict[str, Any]) -> Iterator[Tensor | None]:
    for _, value in sorted(state.items()):
        if isinstance(value, Tensor):
            yield _held(value)[0]
