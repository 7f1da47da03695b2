"""Samplers that user code made by the number of processes: ranks that share a model draw the same samples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from lightning_par.mesh.axis import Axis


def share_by_replicas(loader: Any, world: Axis, num_replicas: int, rank: int) -> None:
    """Let a ``DistributedSampler`` of ``loader`` that counts all processes, as it does by default, count replicas.

    Else the samples that it gives to all ranks of a replica but the first would be left out of the run. A subclass has
    arguments of its own, and is left alone.

    Example::

        sampler = DistributedSampler(data, num_replicas=2, rank=1)  # on rank 1 of 2, which share a model
        share_by_replicas(DataLoader(data, sampler=sampler), groups.world, num_replicas=1, rank=0)
        assert (sampler.num_replicas, sampler.rank) == (1, 0)
    """
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if type(sampler) is DistributedSampler and (sampler.num_replicas, sampler.rank) == (world.size, world.rank):
            epoch = sampler.epoch
            sampler.__init__(  # type: ignore[misc]  # what follows from the numbers is worked out there
                sampler.dataset, num_replicas, rank, sampler.shuffle, sampler.seed, sampler.drop_last
            )
            sampler.epoch = epoch
