"""Whether tensors that ranks gather are alike."""

from __future__ import annotations

import pytest
import torch

from lightning_par.mesh.like_tensors import Told, refuse_unlike, told_of

TWO, THREE = Told((2, 4), "float32", (8, 8)), Told((3, 4), "float32", (12, 12))
UNEVEN = [TWO._replace(takes=(8, 12)), THREE._replace(takes=(8, 12))]


def test_what_is_told() -> None:
    assert told_of(torch.ones(2, 4), [8, 8]) == TWO


@pytest.mark.parametrize("told", [[TWO, TWO], [TWO, TWO._replace(shape=(8,))], [TWO._replace(takes=(5,)), TWO], UNEVEN])
def test_like_tensors_pass(told: list[Told]) -> None:
    """So do those for which each has the room, and a list of one rank's own mistake, which the back end names."""
    refuse_unlike(told[0], [0, 2], lambda _: told)


@pytest.mark.parametrize("told", [[TWO, THREE], [TWO, TWO._replace(dtype="int64")], [UNEVEN[0], THREE]])
def test_unlike_ones_are_refused(told: list[Told]) -> None:
    with pytest.raises(ValueError, match=r"test_like_tensors.py:\d+: .* rank [02] has one of shape \([23], 4\)"):
        refuse_unlike(told[0], [0, 2], lambda _: told)
