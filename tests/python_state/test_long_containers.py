"""Of containers with many items each is watched that the code of a step may reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_par.python_state import long_containers
from lightning_par.python_state.snapshot import Snapshot

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


def test_the_first_that_is_left_out_is_told(monkeypatch: Any) -> None:
    holds = Holds()
    assert _snapshot(holds).long.beyond is None
    monkeypatch.setattr(long_containers, "_MOST_OF_MANY", 100)
    assert _snapshot(holds).long.beyond == "self.named[1100]"
