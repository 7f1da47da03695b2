"""Batches: the same on all ranks of a replica, whatever they are made of."""

from __future__ import annotations

import dataclasses
import pickle
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import broadcast_batch
from lightning_par.mesh.ledger import ledger
from tests.helpers.pool import Pool, RanksFailedError

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Sample:
    x: Tensor
    name: str


class Opaque:
    """No container that a walk over known types would look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def _world() -> Axis:
    dist.init_process_group("gloo")
    return Axis("replica", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def _batch(rank: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 4, dtype=torch.float64, generator=g)
    return {
        "tuple": (x, [x * 2, rank]),
        "named": Pair(x, f"label {rank}"),
        "dataclass": Sample(x.float(), str(rank)),
        "user dict": UserDict(ids=torch.arange(5) + rank),
        "packed": pack_sequence([x[:, 0], x[:2, 1]]),
        "opaque": Opaque(x + 1),
        "numpy": np.arange(3) + rank,
        "bool": x > 0,
        "bfloat16": x.bfloat16(),
        "complex": torch.complex(x, x).conj(),
        "scalar": torch.tensor(rank),
        "empty": torch.empty(rank, 7),
        "transposed": x.t(),
        "channels last": torch.randn(2, 3, 4, 5, generator=g).to(memory_format=torch.channels_last),
        "slice": x[:, ::2],
        "expanded": x[:, :1].expand(3, 6),
        "leaf": x.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(x),
        "sparse": x.to_sparse(),
        "length of this rank": list(range(rank)),
        "none": None,
    }


def _broadcast() -> dict[str, Any]:
    axis = _world()
    got = broadcast_batch(_batch(axis.rank), axis, torch.device("cpu"))
    assert got["tuple"][0] is not got["tuple"][1][0]
    strides = {k: v.stride() for k, v in got.items() if isinstance(v, Tensor) and not v.is_sparse}
    return {"batch": got, "strides": strides}


def _flat(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), value.requires_grad, value.resolve_conj().to_dense().detach().tolist())
    if isinstance(value, PackedSequence | tuple | list):
        return [type(value).__name__, *map(_flat, value)]
    if isinstance(value, dict | UserDict):
        return [type(value).__name__, *((k, _flat(v)) for k, v in value.items())]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Sample | Opaque):
        return [type(value).__name__, _flat(vars(value))]
    return value


def test_every_structure_arrives_as_the_first_rank_has_it(pool: Pool) -> None:
    results = pool.run(3, _broadcast)
    expected = _flat(_batch(0))
    for result in results:
        for got, want in zip(_flat(result["batch"])[1:], expected[1:]):
            assert got == want
        # Strides decide which kernel runs, and so the last bit.
        assert result["strides"] == results[0]["strides"]


def _shared_and_counted() -> tuple[bool, list[tuple[str, int]]]:
    axis = _world()
    x = torch.randn(8, 2)
    with ledger() as moved:
        a, b = broadcast_batch((x, x), axis, torch.device("cpu"))
    return a is b, [(t.verb, t.nbytes) for t in moved.select(purpose="batch")]


def test_a_tensor_that_is_there_twice_is_sent_once(pool: Pool) -> None:
    for shared, moved in pool.run(2, _shared_and_counted):
        assert shared
        assert moved == [("broadcast", 0), ("broadcast", 64)]


def _unpicklable() -> None:
    broadcast_batch({"x": torch.ones(1), "f": lambda: 0}, _world(), torch.device("cpu"))


def test_what_cannot_be_sent_is_refused_on_every_rank(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        pool.run(2, _unpicklable)
    assert all("A batch of type dict can't be sent" in report for report in caught.value.reports.values())
    assert len(caught.value.reports) == 2


def _of_a_trial() -> None:
    broadcast_batch(
        {"a": torch.ones(1), "b": FakeTensorMode().from_tensor(torch.ones(2))}, _world(), torch.device("cpu")
    )


def test_a_value_of_a_trial_is_refused_on_every_rank(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _of_a_trial)
    for rank in range(2):
        assert "A value that stood for another stage's in a trial" in failed.value.reports[rank]


def test_one_rank_keeps_its_batch_as_it_is() -> None:
    batch = {"f": lambda: 0}
    assert broadcast_batch(batch, Axis("replica", (0,), 0, None), torch.device("cpu")) is batch
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(batch)
