"""Pieces of the parts that ranks hold put a tensor together again, whatever is held by whom."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_par.checkpoint.owners import Place, runs
from lightning_par.mesh.positions import Positions

OWNERS = {
    "even": [0, 0, 0, 1, 1, 1],
    "uneven": [0, 1, 1, 1, 1, 1],
    "fused": [0, 1, 0, 1, 0, 1],
    "chunks": [0, 0, 1, 0, 0, 1],
    "backwards": [1, 1, 1, 0, 0, 0],
    "nothing on the first": [1, 1, 1, 1, 1, 1],
}
SHAPES = [((6,), 0), ((6, 5), 0), ((5, 6), 1), ((2, 6, 3), 1), ((1, 6, 4), 1), ((2, 3, 6), 2), ((0, 6), 1), ((6, 0), 0)]


@pytest.mark.parametrize("limit", [1, 24, 100, 10_000])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("owners", OWNERS)
def test_pieces_make_the_whole(owners: str, shape: tuple[int, ...], dim: int, limit: int) -> None:
    place = Place(torch.Size(shape), torch.float32, (4, 9), dim, Positions.of(OWNERS[owners]))
    want = torch.randn(shape)
    whole = torch.full(shape, float("nan"))
    for index in (0, 1):
        part = want.index_select(dim, torch.as_tensor(place.indices(index).copy())).contiguous()
        assert part.shape == place.part_shape(index)
        for piece in place.pieces(index, limit):
            values = place.folded(part)[piece]
            assert values.numel() and (values.nbytes <= max(limit, place.folded(part).shape[2] * 4))
            target = place.target(place.folded(whole), index, piece)
            if target is not None:
                assert target.is_contiguous()
                target.copy_(values)
            else:
                place.put(place.folded(whole), index, piece, values)
    assert torch.equal(whole, want)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (0,)])
def test_what_one_rank_holds_travels_straight_to_its_place(shape: tuple[int, ...]) -> None:
    place = Place(torch.Size(shape), torch.float64, (2,))
    want, whole = torch.randn(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    assert place.part_shape(0) == torch.Size(shape)
    for piece in place.pieces(0, 24):
        target = place.target(place.folded(whole), 0, piece)
        assert target is not None
        target.copy_(place.folded(want)[piece])
    assert torch.equal(whole, want)


def test_runs_have_no_gap() -> None:
    draw = random.Random(0)
    for _ in range(50):
        chosen = sorted(draw.sample(range(30), draw.randrange(30)))
        found = runs(torch.tensor(chosen, dtype=torch.int64).numpy())
        assert [i for start, stop in found for i in range(start, stop)] == chosen
        assert all(a[1] < b[0] for a, b in zip(found, found[1:]))
