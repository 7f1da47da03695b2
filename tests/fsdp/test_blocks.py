"""The plan of blocks, and what lies where in their messages. No processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_par.fsdp.blocks import Block, plan_blocks
from lightning_par.fsdp.flat import Flat, Mixed, Place
from lightning_par.fsdp.stored_parameter import dim_of_shape
from lightning_par.mesh.positions import Positions
from lightning_par.private.storage import memory_of


def _plan(module: nn.Module) -> list[tuple[str, ...]]:
    return [x.paths for x in plan_blocks(module, {name: x.numel() for name, x in module.named_parameters()})]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class Model(nn.Module):
    def __init__(self, words: int, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 8)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, words, bias=False)


LAYERS = [(f"body.layers.{i}",) for i in range(4)]


def test_elements_of_a_container_are_blocks_and_the_rest_is_one_where_it_is_small() -> None:
    assert _plan(Model(words=10)) == [("words", "head"), *LAYERS]
    assert _plan(Model(words=1000)) == [("words",), *LAYERS, ("head",)]


def test_a_weight_that_two_blocks_use_is_in_none() -> None:
    model = Model(words=1000)
    model.head.weight = model.words.weight
    assert _plan(model) == LAYERS
    small = Model(words=10)
    small.head.weight = small.words.weight
    assert _plan(small) == [("words", "head"), *LAYERS]  # both are of one block


def test_a_large_element_that_is_made_of_blocks_is_taken_apart() -> None:
    stages = nn.Sequential(*(nn.Sequential(Layer(), Layer()) for _ in range(2)))
    assert _plan(stages) == [("0.0",), ("0.1",), ("1.0",), ("1.1",)]


def test_a_module_that_is_called_again_and_again_is_one_block() -> None:
    layer = Layer()
    assert _plan(nn.Sequential(layer, layer, layer)) == [("0",)]


def test_only_what_can_be_gathered_together_is_in_a_block() -> None:
    layers = nn.Sequential(Layer(), Layer())
    assert plan_blocks(layers, {"0.norm.weight": 8, "1.norm.weight": 8}) == (
        Block(("0",), ("0.norm.weight",), True),
        Block(("1",), ("1.norm.weight",), True),
    )


SHAPES = [
    [((4, 3), 0), ((6,), 0)],
    [((4, 3), 0), ((2, 4, 3), 1)],
    [((7, 3), 0), ((3,), 0)],
    [((5, 2), 0)],
    [((1, 6), 1)],
]


def _parts(x: Tensor, dim: int, ranks: int) -> list[Tensor]:
    positions = Positions.even(x.shape[dim], ranks)
    return [x.index_select(dim, positions.index(rank, x.device)) for rank in range(ranks)]


@pytest.mark.parametrize("shapes", SHAPES)
def test_messages_hold_what_the_ranks_have(shapes: list[tuple[tuple[int, ...], int]]) -> None:
    ranks = 2
    wholes = [torch.randn(shape) for shape, _ in shapes]
    flats = []
    for rank in range(ranks):
        places = [Place.of(s, dim, Positions.even(s[dim], ranks), ranks, rank) for s, dim in shapes]
        assert None not in places
        flats.append(Flat(places, ranks))  # type: ignore[arg-type]
    parts = [_parts(x, dim, ranks) for x, (_, dim) in zip(wholes, shapes)]
    sent = [flat.message([p[rank] for p in parts]) for rank, flat in enumerate(flats)]
    given = flats[0].wholes(torch.cat(sent))
    for found, x in zip(given, wholes, strict=True):
        assert torch.equal(found, x) and not found._is_view()
    assert len({memory_of(x) for x in given}) == len(shapes)  # each can be let go by itself
    rows = flats[0].messages(wholes, torch.ones(1, 2))
    for rank, flat in enumerate(flats):
        assert rows[rank, -2:].tolist() == [1, 1]
        for found, p in zip(flat.split(rows[rank]), parts, strict=True):
            assert torch.equal(found, p[rank])


@pytest.mark.parametrize("shapes", SHAPES)
def test_messages_hold_weights_of_several_precisions(shapes: list[tuple[tuple[int, ...], int]]) -> None:
    dtypes = [torch.bfloat16 if i == 0 else torch.float32 for i in range(len(shapes))]
    wholes = [torch.randn(shape) for shape, _ in shapes]
    parts = [_parts(x, dim, 2) for x, (_, dim) in zip(wholes, shapes)]
    sent, mixed = [], []
    for rank in range(2):
        places = [Place.of(s, dim, Positions.even(s[dim], 2), 2, rank) for s, dim in shapes]
        mixed.append(Mixed(places, dtypes, 2))  # type: ignore[arg-type]
        sent.append(mixed[-1].message([p[rank] for p in parts]))
    assert sent[0].dtype is (torch.bfloat16 if len(shapes) == 1 else torch.uint8)
    for found, x, dtype in zip(mixed[0].wholes(torch.cat(sent)), wholes, dtypes, strict=True):
        assert torch.equal(found, x.to(dtype))


def test_parts_that_leave_gaps_are_not_gathered_together() -> None:
    assert Place.of((5,), 0, Positions.even(5, 4), 4, 0) is None  # 2, 1, 1, 1
    assert Place.of((2, 5), 1, Positions.even(5, 2), 2, 0) is None
    assert Place.of((4,), 0, Positions.of([0, 1, 1, 0]), 2, 0) is None


def test_what_has_no_entries_is_not_stored_in_parts() -> None:
    assert dim_of_shape((0, 6), 2) is None and dim_of_shape((6, 0), 2) is None
    assert dim_of_shape((4, 0, 6), 2, split=0, held=[2, 2]) is None
