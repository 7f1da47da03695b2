"""Generators stand where they stood when their states went into a checkpoint, and no state leads them astray."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_par.checkpoint import generator_states


def made() -> list[Any]:
    bits = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    of_numpy = [np.random.Generator(kind(5)) for kind in bits]
    return [torch.Generator().manual_seed(1), random.Random(2), np.random.RandomState(3), *of_numpy]


def drawn(found: list[Any]) -> list[float]:
    of_torch, of_python, *of_numpy = found
    first = [torch.rand((), generator=of_torch).item(), of_python.random(), of_python.gauss(0, 1)]
    return [*first, *(float(each.random()) for each in of_numpy), *(float(each.normal()) for each in of_numpy)]


def test_states_go_through_a_file_that_runs_no_code(tmp_path: Path) -> None:
    own, other = made(), made()
    drawn(own)
    torch.save([generator_states.saved_states(own), generator_states.saved_state()], tmp_path / "states")
    expected = [drawn(own), drawn(own), torch.rand(3).tolist(), np.random.rand(), random.random()]
    states, everywhere = torch.load(tmp_path / "states", weights_only=True)
    generator_states.load_states(other, states)
    generator_states.load_state(everywhere)
    assert [drawn(other), drawn(other), torch.rand(3).tolist(), np.random.rand(), random.random()] == expected
    before = drawn(made())
    fewer = made()
    generator_states.load_states(fewer[:-1], states)  # of other loaders than those that were saved
    assert drawn(fewer) == before


@pytest.mark.parametrize(("which", "name"), [(2, "pos"), (4, "pos"), (5, "buffer_pos")])
def test_no_state_lets_numpy_read_what_is_not_its_own(which: int, name: str) -> None:
    found = [made()[which]]
    ((kind, state),) = generator_states.saved_states(found)
    inner = state["state"] if name == "pos" else state
    for wrong in (-1, 10**6):
        inner[name] = wrong
        with pytest.raises(ValueError, match=f"garbled: {name} is {wrong}"):
            generator_states.load_states(found, [(kind, state)])
