"""Weights over stages: what a rank does not hold is `Elsewhere`, and comes back at the end of the run.

A parameter keeps its identity on the way out and back: the object that the module, a param group or the user holds is
changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.elsewhere import Elsewhere, sharding_of
from lightning_par.absent.origin import Origin
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.broadcast import kind_of, kinds_at, wanted_of
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.program import Program
from lightning_par.private.modules import buffers_of, derived_weights, is_persistent
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.identity import become, swappable
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, leaf


@dataclass(frozen=True)
class Placement:
    """Which ranks of the pipeline axis hold each tensor of the module.

    Args:
        holders: first name of a parameter or buffer, as in ``named_parameters()`` and ``named_buffers()``, to ascending
            indices along the pipeline axis. Tensors that are not named are held by all.
        parameters: that the module had when `follow` saw it last, by id, each with the name that it was placed by.

    Example::

        placement = Placement({"embedding.weight": (0, 1), "head.bias": (1,)})
        assert placement.first("head.bias") == 1 and placement.first("norm.weight") == 0
    """

    holders: Mapping[str, tuple[int, ...]]
    parameters: dict[int, tuple[Tensor, str]] = field(default_factory=dict, compare=False, repr=False)
    _renamed: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def follow(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """The parameters have these names now: one that a run registers anew, as pruning does, stays where it is."""
        found = {}
        for name, x in named:
            _, first = self.parameters.get(id(x), (x, name))
            found[id(x)] = x, first
            if name not in self.holders and first in self.holders:
                self._renamed[name] = first
        self.parameters.clear()
        self.parameters.update(found)

    def knows(self, name: str) -> bool:
        """Whether some ranks are known to hold ``name``."""
        return name in self.holders or name in self._renamed

    def first(self, name: str) -> int:
        """The index of the first rank that holds ``name``."""
        return self.of(name, 1)[0]

    def of(self, name: str, size: int) -> tuple[int, ...]:
        """The indices of the ranks that hold ``name``, of ``size`` ranks."""
        return self.holders.get(self._renamed.get(name, name), tuple(range(size)))


def place(module: nn.Module, stages: Stages, program: Program | None) -> Placement:
    """Which ranks hold which tensors: those of the stages that use them, and what no stage uses the last."""
    ranks: dict[int, set[int]] = {}
    for path in stages.homes:
        unit = module.get_submodule(path)
        for x in (*unit.parameters(), *unit.buffers()):
            ranks.setdefault(id(x), set()).update(stages.holders(path))
    for name, used in (program.uses if program is not None else {}).items():
        if program is not None and name not in stages.homes:
            ranks.setdefault(id(module.get_parameter(name)), set()).update(program.at[stage] for stage in used)
    last = {stages.last}
    holders = {name: tuple(sorted(ranks.get(id(p), last))) for name, p in module.named_parameters()}
    holders |= {name: tuple(sorted(ranks[id(b)])) for name, b in module.named_buffers() if id(b) in ranks}
    return Placement(holders, {id(p): (p, name) for name, p in module.named_parameters()})


class Once:
    """Which parameters count on this rank, so that each counts once along the pipeline axis: at its first holder.

    Args:
        module: the module that is spread.
        placement: who holds what.
        axis: the pipeline axis.

    Example::

        once = Once(module, placement, groups.pipeline)
        mine = [p for p in module.parameters() if once.counts(p)]
    """

    def __init__(self, module: nn.Module, placement: Placement, axis: Axis) -> None:
        self.axis = axis
        self._first = {id(p): placement.first(name) for name, p in module.named_parameters()}

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank is the one that counts ``parameter``; one that is not the module's counts on the first."""
        return self._first.get(id(parameter), 0) == self.axis.rank


def copies_of(module: nn.Module, holders: Iterable[Any]) -> Iterator[nn.Module]:
    """The copies of ``module`` that the ``holders`` have in attributes, as callbacks do that average weights."""
    for value in [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]:
        for found in value.modules() if isinstance(value, nn.Module) else ():
            if type(found) is type(module) and found is not module:
                yield found


def send_away(module: nn.Module, placement: Placement, axis: Axis) -> None:
    """Give up the memory of every parameter and buffer that this rank does not hold. No communication.

    To be called once the module is equal on all ranks and sharded, before optimizers are made or adopted.

    Args:
        module: whole, or sharded over another axis.
        placement: who holds what.
        axis: the pipeline axis.

    Raises:
        RuntimeError: something else still holds a parameter's memory, as an autograd graph does.
    """
    tensors = [(name, x) for name, x in _named(module) if axis.rank not in placement.of(name, axis.size)]
    with swappable([*module.modules()]):
        for name, x in tensors:
            if not isinstance(x, Elsewhere):
                origin = Origin(name, placement.holders[name], axis, sharding_of(x))
                become(x, away_of(x, origin), name)
    for m in module.modules():
        for weight in derived_weights(m):
            if any(isinstance(getattr(m, name), Elsewhere) for name in weight.of):  # nor what was computed of it
                setattr(m, weight.name, torch.empty_like(getattr(m, weight.name), device="meta"))


@torch.no_grad()
def bring_back(module: nn.Module, axis: Axis, also: Iterable[Any] = ()) -> None:
    """Make every parameter and buffer real again on every rank, one at a time. All ranks must call it.

    One that is sharded over another axis comes back sharded like it.

    Args:
        module: as `send_away` left it, or as it was trained since.
        axis: the pipeline axis.
        also: other modules, callbacks and what else may hold copies in attributes, lists, dicts and tuples.
    """
    if axis.size == 1:
        return
    found: dict[str, Tensor] = {}
    modules: list[nn.Module] = []
    seen: set[int] = set()
    for index, holder in enumerate((module, *also)):
        held = holder if isinstance(holder, nn.Module) else getattr(holder, "__dict__", {})
        _find(held, f"{index}", found, modules, seen)
    asked = [(path, x.origin.holders[0]) for path, x in found.items() if isinstance(x, Elsewhere)]
    wanted = wanted_of(asked, axis, "unshard")
    parts = {path: leaf(x) for path, x in found.items() if path in wanted}
    kinds = kinds_at(wanted, parts, axis, "unshard")
    sharded = _shardings({path: found[path] for path in parts if path in kinds}, axis)
    with swappable(modules):
        for path in sorted(kinds):  # in one order on all ranks
            part = RunState.current.handed_on(parts.get(path), kinds[path], wanted[path], axis, "unshard")
            x = found.get(path)
            if isinstance(x, Elsewhere):
                become(x, _here(x, part, sharded[path] if path in sharded else x.origin.sharding), x.origin.name)


def _shardings(found: dict[str, Tensor], axis: Axis) -> dict[str, Any]:
    """How tensors are sharded where they are that may be so otherwise than the weight that they were made of, by their
    path. All ranks must call it.

    Args:
        found: tensors of this rank.
        axis: the pipeline axis.
    """
    here = {path: x for path, x in found.items() if not isinstance(x, Elsewhere)}
    made = {path: x for path, x in here.items() if not (isinstance(x, nn.Parameter) and isinstance(x, ShardedTensor))}
    mine = {path: (x._dim, x._positions) if isinstance(x, ShardedTensor) else None for path, x in made.items()}
    told: list[dict[str, Any]] = axis.all_gather_object(mine, "unshard")
    return {path: how for theirs in told for path, how in theirs.items()}


def agree_on_buffers(module: nn.Module, axis: Axis) -> None:
    """Buffers that layers made or dropped come or go on the ranks that don't run them, too. All ranks must call it.

    In a dry run none of those that others run is taken to have made or dropped any.
    """
    here = dict(module.named_buffers(remove_duplicate=False))
    told: list[dict[str, tuple[Any, ...]]] = axis.all_gather_object(
        {name: _described(module, name, x) for name, x in here.items() if not isinstance(x, Elsewhere)}, "unshard"
    )
    if axis.dry:
        return
    for name, x in here.items():
        if isinstance(x, Elsewhere) and name not in told[x.origin.holders[0]]:
            owner, _, own = name.rpartition(".")
            buffers_of(module.get_submodule(owner))[own] = None
    inner, near = dict(module.named_modules()), next((p.device for p in module.parameters()), torch.device("cpu"))
    for source, theirs in enumerate(told):
        for name, (kind, device, persistent) in theirs.items():
            owner, _, own = name.rpartition(".")
            if name not in here and kind is not None and owner in inner:
                shape, dtype = kind
                place = near if near.type == device else torch.device(device)
                away = Elsewhere(shape, dtype, place, Origin(name, (source,), axis))
                inner[owner].register_buffer(own, away, persistent)


def _described(module: nn.Module, name: str, x: Tensor) -> tuple[Any, ...]:
    owner, _, own = name.rpartition(".")
    kind = None if isinstance(x, ShardedTensor) else kind_of(x)
    return kind, x.device.type, is_persistent(module.get_submodule(owner), own)


def away_of(x: Tensor, origin: Origin, like: Tensor | None = None) -> Elsewhere:
    """What ``x`` is on ranks that don't hold it; ``like`` has its shape, dtype and device, if not ``x``."""
    like = x if like is None else like
    stride = like.stride() if like.layout is torch.strided else None
    away = Elsewhere(like.shape, like.dtype, like.device, origin, x.requires_grad, stride)
    if isinstance(x, nn.Parameter):
        mark_parameter(away)  # what `isinstance(x, nn.Parameter)` asks of a tensor subclass
    return away


def _here(x: Elsewhere, part: Tensor, sharding: Any) -> Tensor:
    """``x`` with the values of ``part``: dim and positions, and the axis, if it is not that of the weight."""
    local = part.to(x.device).requires_grad_(x.requires_grad)
    if isinstance(x, nn.Parameter):
        local = nn.Parameter(local, requires_grad=x.requires_grad)
    if sharding is None or x.origin.sharding is None:
        return local
    dim, positions = sharding[:2]
    sharded = ShardedTensor(local, dim, positions, x.origin.sharding[2])
    if isinstance(x, nn.Parameter):
        mark_parameter(sharded)
    return sharded


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from list(module.named_parameters())
    yield from list(module.named_buffers())


def _find(value: Any, path: str, found: dict[str, Tensor], modules: list[nn.Module], seen: set[int]) -> None:
    """Every tensor and module that ``value`` holds; tensors by a path that is the same on all ranks."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[path] = value
    elif isinstance(value, nn.Module):
        modules.append(value)
        _find(vars(value), path, found, modules, seen)
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _find(item, f"{path}.{key}", found, modules, seen)
