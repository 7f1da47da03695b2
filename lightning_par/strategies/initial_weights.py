"""The weights that training starts from: those of the first rank, on all ranks.

Deferred ones that all ranks would compute alike are left deferred: nothing is computed, nothing moves. What lies in a
mapped file is deferred, too, so that each rank reads its own part; where hosts have different files, the first rank's
weights are sent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.adoption import Adoption
from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.absent.deferred.materialise import make_real
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.digest import digest
from lightning_par.private.storage import is_mapped
from lightning_par.sharded.identity import swappable
from lightning_par.sharded.packed_parameters import constituents, is_packed
from lightning_par.sharded.tensor import leaf


@torch.no_grad()
def equalize(module: nn.Module, world: Axis, device: torch.device) -> None:
    """Give every rank the parameters and buffers of the first one; without a seed, each rank drew its own.

    Some are left deferred, or become so: `lightning_par.absent.deferred.materialise` gives them values.

    Args:
        module: built alike on all ranks, whole or sharded alike.
        world: all ranks.
        device: where the process group's tensors live; tensors elsewhere pass through it one at a time.

    Raises:
        ValueError: a rank built other parameters or buffers; on every rank.
    """
    Adoption().of_module(module)
    if world.size == 1:
        return
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    _check_alike({name: _kind(x) for name, x in tensors.items()}, world)
    alike = _computed_alike(tensors, world) | _mapped_alike(tensors, world)
    with swappable(module.modules()):
        for name, x in tensors.items():
            if name not in alike:
                if isinstance(x, Deferred):
                    make_real([x], name)
                for part in constituents(x) if is_packed(x) else [leaf(x).detach()]:
                    _equalize(part, world, device)


def _computed_alike(tensors: dict[str, Tensor], world: Axis) -> set[str]:
    """The names of tensors that are deferred on all ranks, by the same functions, draws and files."""
    deferred = {name: x for name, x in tensors.items() if isinstance(x, Deferred)}
    files = {name: x.files() for name, x in deferred.items()}
    mine = {name: (x.digest(), [file.identity for file in files[name]]) for name, x in deferred.items()}
    first, *others = world.all_gather_object(mine, "weights")
    alike = {name for name in first if all(name in o and o[name][0] == first[name][0] for o in others)}
    if all(o[name] == first[name] for o in others for name in alike):
        return alike
    samples = {file: file.sample() for name in sorted(alike) for file in files[name]}
    seen = world.all_gather_object({name: [samples[file] for file in files[name]] for name in alike}, "weights")
    return {name for name in alike if all(theirs[name] == seen[0][name] for theirs in seen)}


def _mapped_alike(tensors: dict[str, Tensor], world: Axis) -> set[str]:
    """The names of tensors that are equal on all ranks, of those in mapped files: a write would take memory."""
    mine = {name: int(digest(x)) for name, x in tensors.items() if type(x) in (Tensor, nn.Parameter) and is_mapped(x)}
    first, *others = world.all_gather_object(mine, "weights")
    return {name for name in first if all(theirs.get(name) == first[name] for theirs in others)}


def _kind(x: Tensor) -> str:
    parts = constituents(x) if is_packed(x) else [x]
    return ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)


def _equalize(x: Tensor, world: Axis, device: torch.device) -> None:
    staged = x.to(device).contiguous()
    world.broadcast_(staged, "weights")
    if staged is not x:
        x.copy_(staged)


def _check_alike(mine: dict[str, str], world: Axis) -> None:
    built = world.all_gather_object(mine, "weights")
    for rank, theirs in enumerate(built):
        if theirs == built[0]:
            continue
        name = next(n for n in [*built[0], *theirs] if theirs.get(n) != built[0].get(n))
        raise ValueError(
            f"Rank {rank} built another module than rank 0: {name!r} is {theirs.get(name, 'not there')} on rank {rank} "
            f"and {built[0].get(name, 'not there')} on rank 0. Build the same module on every rank."
        )
