"""Of containers with many items each is watched that the code of a step may reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_par.python_state import long_containers
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.spare_tensors import Spares

MANY = 1500


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named: Any = [[0] for _ in range(MANY)]
        self.unnamed = [[0] for _ in range(MANY)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.named[MANY - 1].append(1)
        return x


def _snapshot(holds: Holds) -> Snapshot:
    return Snapshot([("self", holds)], frozenset([__name__.partition(".")[0]]))


def test_items_are_watched_where_code_names_what_holds_them() -> None:
    holds = Holds()
    snapshot = _snapshot(holds)
    holds.named[MANY - 1].append(1)
    holds.named[3].append(2)
    holds.unnamed[MANY - 1].append(3)
    holds.unnamed[3].append(4)
    assert list(snapshot.changes()) == ["self.named[3]", "self.unnamed[3]", f"self.named[{MANY - 1}]"]
    snapshot.restore()
    assert holds.named == [[0]] * MANY


def test_what_items_hold_is_put_back() -> None:
    holds, thing = Holds(), SimpleNamespace(count=0, tensor=torch.zeros(1))
    tensor = thing.tensor
    holds.named = {number: ({"a": [number]}, {number}) for number in range(MANY)} | {MANY: thing}
    snapshot = _snapshot(holds)
    holds.named[MANY - 1][0]["a"].append(1)
    holds.named[MANY - 1][0]["b"] = 1
    holds.named[MANY - 1][1].add(-1)
    thing.count, thing.tensor = 1, torch.ones(1)
    assert len(snapshot.changes()) == 4
    snapshot.restore()
    assert holds.named[MANY - 1] == ({"a": [MANY - 1]}, {MANY - 1})
    assert thing.count == 0 and thing.tensor is tensor


def test_tensors_that_items_hold_are_read_alone() -> None:
    holds = Holds()
    tensors = [torch.zeros(1) for _ in range(MANY)]
    holds.named = [{"x": x} for x in tensors]
    holds.first = tensors[MANY - 1]  # nothing stands in for it, since it is among the others, too
    snapshot = _snapshot(holds)
    snapshot.lend(Spares())
    assert holds.first is tensors[MANY - 1]
    assert snapshot.restore() == []
    holds.named[MANY - 2]["x"].add_(1)
    holds.first.add_(1)
    assert len(snapshot.moves()) == 2
    assert snapshot.restore() == ["self.first", f"self.named[{MANY - 2}]['x']"]
    snapshot.lend(Spares())
    assert snapshot.restore() == []


def test_few_arrays_that_items_hold_are_put_back() -> None:
    holds = Holds()
    holds.named = [{"x": np.zeros(3)} for _ in range(MANY)]
    snapshot = _snapshot(holds)
    snapshot.lend(Spares())
    holds.named[MANY - 1]["x"][0] = 1
    assert list(snapshot.changes()) == [f"self.named[{MANY - 1}]['x']"] and not snapshot.locked()
    snapshot.restore()
    assert not holds.named[MANY - 1]["x"].any()


def test_many_arrays_that_items_hold_are_read_alone() -> None:
    holds, whole = Holds(), np.zeros((MANY, 1000))
    holds.named = [{"x": row} for row in whole]
    views: Any = whole[:1000]
    vars(holds).update(before=views, whole=whole)  # large, too, and a view of what is locked behind it
    snapshot = _snapshot(holds)
    for _ in range(2):
        snapshot.lend(Spares())
        with pytest.raises(ValueError, match="read-only"):
            holds.named[MANY - 1]["x"][0] = 1
        assert f"self.named[{MANY - 1}]['x']" in dict(snapshot.locked())
        snapshot.restore()
        holds.named[MANY - 1]["x"][0] = views[0][0] = 1


@pytest.mark.parametrize("make", [lambda: bytearray(1), lambda: np.random.default_rng(0), lambda: iter([1, 2])])
def test_items_of_other_kinds_are_watched(make: Any) -> None:
    holds = Holds()
    holds.named = [make() for _ in range(MANY)]
    assert f"self.named[{MANY - 1}]" in _snapshot(holds).cells


def test_the_first_that_is_left_out_is_told(monkeypatch: Any) -> None:
    holds = Holds()
    assert _snapshot(holds).long.beyond is None
    monkeypatch.setattr(long_containers, "_MOST_OF_MANY", 100)
    assert _snapshot(holds).long.beyond == "self.named[1100]"
