"""The state of a run at its end: made whole when it ended well, left alone where ranks failed apart."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.host_files import LEAST, HostFiles
from lightning_par.optim.stand_ins import with_inner
from lightning_par.optim.value_places import unmark
from lightning_par.pipeline.between_steps.optim.gather_states import collect
from lightning_par.private.process_groups import default_store
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.strategies.host_memory import Room, shortest_room
from lightning_par.tensor.kept_tensors import make_held_whole


@contextmanager
def room_for_the_whole(
    module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device, world: Axis
) -> Iterator[Room]:
    """Within, the whole of ``module`` goes to files that a host's ranks share, where these have room. All ranks must
    enter it, and leave what does not suffice as it is.

    Args:
        module: of which this rank may hold parts.
        optimizers: of its parameters.
        device: where its parameters are.
        world: all ranks.
    """
    room, state = shortest_room(module, optimizers, device, world), RunState.current
    if room.needed < LEAST:
        yield room
        return
    files, failed = HostFiles(world), True
    try:
        if files.folder is not None:
            filed = shortest_room(module, optimizers, device, world, files.folder)
            if filed.suffices:
                room, state.files = filed, files
        yield room
        failed = False
    finally:
        state.files = None
        files.close(failed)


@torch.no_grad()
def unshard_optimizer_state(optimizer: Optimizer, stages: Axis | None = None) -> None:
    """Make the state of every parameter whole on every rank, on the CPU, and what ``optimizer`` keeps in attributes.

    All ranks must call it.

    Args:
        optimizer: its parameters may still be sharded or elsewhere.
        stages: the pipeline axis, where the parameters are spread over it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state.values():
        for name, x in state.items() if isinstance(state, dict) else ():
            state[name] = map_tensors(_whole, x)
    make_held_whole(with_inner(optimizer), but=parameters)
    if stages is not None and stages.size > 1:
        for x in tensors_in([*optimizer.state.values()]):
            unmark(x)
        ids = {id(p): i for i, p in enumerate(parameters)}
        states = {ids.get(id(p), p): state for p, state in optimizer.state.items()}
        found = collect(states, stages, keep=True, everywhere=True)
        optimizer.state.clear()  # and filled again, since the order of its keys is that in checkpoints
        optimizer.state.update({parameters[key] if isinstance(key, int) else key: x for key, x in found.items()})


def _whole(x: Tensor) -> Tensor:
    while isinstance(x, ShardedTensor):
        x = x.kept_whole("unshard", to_cpu=True)
    return x


PATIENCE = timedelta(seconds=10)


def meet_after_exception(world: Axis, run: str, progress: str, patience: float = 0.0) -> None:
    """Wait a little for the other ranks, which may have failed like this one, or may wait for it in vain.

    Callbacks that save a checkpoint after an exception need every rank's part of it, all of the same step.

    Args:
        world: all ranks.
        run: a name for the run, the same on all ranks.
        progress: how far this rank came.
        patience: seconds that the others are waited for, at least; by an agreement to stop they will come.

    Raises:
        BaseException: the one that is being handled, if a rank does not come or was elsewhere; a warning says so.
    """
    if world.size == 1:
        return
    store, patience = default_store(), max(patience, PATIENCE.total_seconds())
    keys = [f"lightning_par/exception/{run}/{rank}" for rank in world.ranks]
    try:
        store.set(keys[world.rank], progress)
        store.wait(keys, timedelta(seconds=patience))
        found = [store.get(key).decode() for key in keys]
    except RuntimeError:  # torch's errors of a store that timed out or is gone
        why = f"not all of the {world.size} ranks came within {patience:.0f} s"
    else:
        if all(other == progress for other in found):
            return
        why = f"the {world.size} ranks stopped at different batches"
    message = f"No checkpoint is saved after the exception, since every rank holds a part of it and {why}."
    warnings.warn(f"{message} Files saved before are as they were.", stacklevel=2)
    raise sys.exc_info()[1] or RuntimeError(message)
