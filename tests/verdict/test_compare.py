"""What optimizers of packages keep beside tensors by parameter: more keys, other containers, objects of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par.verdict.compare import compare, flat
from lightning_par.verdict.result import Result


class Projector:
    """Holds a tensor and itself, and equals nothing else."""

    def __init__(self, matrix: Tensor) -> None:
        self.rank, self.matrix, self.own = 2, matrix, self


def _named() -> dict[Any, Any]:
    return {"steps": 3, "shadow": torch.ones(2), "sums": {"all": torch.ones(1)}}


STATES: dict[str, Callable[[Tensor], dict[Any, Any]]] = {
    "past gradients": lambda x: {0: {"past": deque([torch.zeros(3), x], maxlen=4)}},
    "names beside numbers": lambda x: {**_named(), 0: {"momentum": x}, 1: {"momentum": x}},
    "a tensor under a name": lambda x: {**_named(), "shadow": x},
    "an object": lambda x: {0: {"projector": Projector(x)}},
    "objects in a list": lambda x: {0: {"projectors": [Projector(torch.zeros(3)), Projector(x)]}},
}


def _result(state: dict[Any, Any]) -> Result:
    optimizer = {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    common = dict(epoch=0, global_step=1, lr_schedulers=[], state_dict={})
    return Result(checkpoint={**common, "optimizer_states": [optimizer]})


@pytest.mark.parametrize("what", STATES)
def test_any_optimizer_state_is_compared_by_what_it_holds(what: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    reference, same, near, other = (_result(STATES[what](x + d)) for d in (0.0, 0.0, 1e-12, 1e-3))
    assert not compare(reference, same) and not compare(reference, near)
    (found,) = {finding.text for finding in compare(reference, other)}
    assert found.startswith("error 1.00e-03")


def test_objects_of_two_kinds_differ() -> None:
    class Other(Projector):
        pass

    x = torch.ones(3)
    one, other = (_result({0: {"projector": kind(x)}}) for kind in (Projector, Other))
    (found,) = compare(one, other)
    assert "Projector" in str(found) and "Other" in str(found)


def test_functions_are_what_they_are() -> None:
    assert flat({"schedule": flat, "kind": Result}) == {"schedule": flat, "kind": Result}
    assert compare(_result({0: {"f": flat}}), _result({0: {"f": compare}}))
