"""Objects between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_par.mesh.objects import broadcast_object
from tests.helpers.pool import Pool

SIZES = (0, 1, 4000, 4050, 4060, 4070, 4080, 4088, 4096, 100_000)


def _sent(source: int, ranks: list[int] | None) -> list[Any]:
    dist.init_process_group("gloo")
    group = None if ranks is None else dist.new_group(ranks)
    values = [{"bytes": b"x" * size, "rank": dist.get_rank()} for size in SIZES]
    if ranks is not None and dist.get_rank() not in ranks:
        return values
    return [broadcast_object(value, source, group) for value in values]


def test_every_rank_has_the_sources_object_whatever_its_size(pool: Pool) -> None:
    for found in pool.run(2, _sent, 1, None):
        assert found == [{"bytes": b"x" * size, "rank": 1} for size in SIZES]


def test_the_source_is_a_rank_of_the_world_within_a_group(pool: Pool) -> None:
    other, *found = pool.run(3, _sent, 2, [1, 2])
    assert [one["rank"] for one in other] == [0] * len(SIZES)
    assert all(one == [{"bytes": b"x" * size, "rank": 2} for size in SIZES] for one in found)
