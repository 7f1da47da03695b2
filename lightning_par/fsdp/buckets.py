"""Many weights gathered at once, and their gradients summed, in few messages; the next travels as one is laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.fsdp.flat import Flat
from lightning_par.fsdp.stored_block import entries_in_message, fits, flat_of
from lightning_par.fsdp.stored_parameter import PURPOSE, Stored
from lightning_par.mesh.waits import wait_for

BUCKET_BYTES = 25 * 2**20  # of whole weights: large enough for bandwidth, small beside them all
Started = tuple[Tensor, Tensor, "dist.Work | None"]  # what was sent, what will arrive


@torch.no_grad()
def gather_all(weights: Sequence[Stored]) -> list[Tensor]:
    """What all peers hold of each of ``weights``, in memory of its own; all of them must call it."""
    found: dict[int, Tensor] = {}

    def start(bucket: list[Stored], flat: Flat) -> Started:
        message = flat.message([x._local.detach() for x in bucket])
        return message, *bucket[0]._peers.start_all_gather(message, PURPOSE)

    for bucket, flat, gathered in _one_ahead(_buckets(weights), start):
        found.update(zip(map(id, bucket), flat.wholes(gathered), strict=True))
    return [found[id(x)] if id(x) in found else x.held(x._local.dtype) for x in weights]


@torch.no_grad()
def sum_all(gradients: Sequence[tuple[Stored, Tensor]]) -> list[Tensor]:
    """This rank's parts of the means over replicas of ``gradients``; all peers must call it."""
    of = {id(x): g for x, g in gradients}
    found: dict[int, Tensor] = {}

    def start(bucket: list[Stored], flat: Flat) -> Started:
        rows = flat.messages([of[id(x)].to(x._local.dtype) for x in bucket])
        return rows, *bucket[0]._peers.start_reduce_scatter(rows, PURPOSE)

    for bucket, flat, message in _one_ahead(_buckets([x for x, _ in gradients]), start):
        message.div_(bucket[0]._peers.copies)
        found.update(zip(map(id, bucket), flat.split(message), strict=True))
    return [found[id(x)] if id(x) in found else x.part_of_sum(g) for x, g in gradients]


def _buckets(weights: Iterable[Stored]) -> list[list[Stored]]:
    filling: dict[tuple[int, torch.dtype, torch.device], list[Stored]] = {}
    found: list[list[Stored]] = []
    for x in weights:
        if not fits(x):
            continue
        key = id(x._peers), x._local.dtype, x._local.device
        if key not in filling or _bytes([*filling[key], x]) > BUCKET_BYTES:
            filling[key] = []
            found.append(filling[key])
        filling[key].append(x)
    return found


def _bytes(weights: list[Stored]) -> int:
    return sum(entries_in_message(x) * x._local.element_size() for x in weights) * weights[0]._peers.size


def _one_ahead(
    buckets: list[list[Stored]], start: Callable[[list[Stored], Flat], Started]
) -> Iterator[tuple[list[Stored], Flat, Tensor]]:
    """What has arrived of each bucket, while the next one travels."""
    before: tuple[list[Stored], Flat, Started] | None = None
    for bucket in [*buckets, None]:
        now = None
        if bucket is not None:
            flat = flat_of(bucket)
            now = bucket, flat, start(bucket, flat)
        if before is not None:
            weights, flat, (_, arrived, work) = before
            if work is not None:
                wait_for(work)
            yield weights, flat, arrived
        before = now
