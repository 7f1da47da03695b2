"""Which weight a tensor is, by the memory that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.checkpoint import weight_reads
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.standing import Standing


def _elsewhere(origin: Origin) -> Elsewhere:
    return Elsewhere((2,), torch.float64, torch.device("cpu"), origin)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    channel = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(weight_reads, "SideChannel", lambda *_: channel)
    module = nn.Module()
    module.register_buffer("x", _elsewhere(Origin("x", (1,), Axis("pipeline", (0, 1), 0, None))))
    found = weight_reads.WeightReads(module, 0, "run", Standing())
    yield found
    found.close()


def test_what_has_the_id_of_memory_that_is_gone_is_no_weight(reads: Any) -> None:
    """Code between two steps has given the weight other memory, as pruning does."""
    x = reads._module.x
    assert reads.knows(x) and reads.knows(x.detach())
    axis, gone = x.origin.axis, id(x.origin)
    x._facts = Origin("x", (1,), axis)
    tries = [Origin("mask", (1,), axis) for _ in range(10_000)]
    same = [origin for origin in tries if id(origin) == gone]
    assert same, "no object has got the id"
    other = _elsewhere(same[0])
    assert not reads.knows(other) and not reads.is_of_weight(other) and reads.of(other) is None


def test_memory_that_was_asked_for_is_not_that_after_a_write(reads: Any) -> None:
    x = reads._module.x
    asked = reads.of(x)
    assert reads.of(x) is asked
    reads.standing.wrote()
    assert reads.of(x) is not asked
