"""States of random generators in a checkpoint: of tensors and numbers alone, so that reading them runs no code."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from lightning_par.python_state.generators import KINDS, raw_state
from lightning_par.python_state.global_generators import NUMPY, PYTHON

_MOST = {"pos": 624, "buffer_pos": 4}
"""How far numpy's generators may stand in what they have drawn ahead."""


def saved_state(raw: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """The state of the global generators, now or when it was ``raw``; of the CUDA ones only the current device's."""
    of_torch, cuda, (kind, words, *numbers), (version, python, gauss) = raw or raw_state()
    state = {
        "torch": of_torch,
        "numpy": [str(kind), torch.from_numpy(np.asarray(words, dtype=np.int64)), *numbers],
        "python": [version, torch.tensor(python), gauss],
    }
    if cuda is not None:
        state["cuda"] = cuda
    return state


def load_state(state: dict[str, Any]) -> None:
    """Put the global generators where `saved_state` found them, on the same kind of devices or others.

    Raises:
        ValueError: the state is garbled.
    """
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())
    kind, words, *numbers = state["numpy"]
    if not 0 <= numbers[0] <= words.numel():  # numpy would read the memory behind the words
        raise ValueError(f"The state of numpy's generator in the checkpoint is garbled: it stands at {numbers[0]}.")
    NUMPY.set((kind, words.numpy().astype(np.uint32), *numbers))
    version, python, gauss = state["python"]
    PYTHON.set((version, tuple(python.tolist()), gauss))


def saved_states(found: Iterable[Any]) -> list[Any]:
    """The states of generators, as `lightning_par.python_state.generators.find` finds them."""
    return [_saved(generator) for generator in found]


def load_states(found: list[Any], states: list[Any]) -> None:
    """Put generators where `saved_states` found them, if they are as many and of the same kinds."""
    if [_kind(generator) for generator in found] == [kind for kind, _ in states]:
        for generator, (_, state) in zip(found, states):
            _load(generator, state)


def _kind(generator: Any) -> str:
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator).__name__
    return next(kind.__name__ for kind in KINDS if isinstance(generator, kind))


def _saved(generator: Any) -> tuple[str, Any]:
    if isinstance(generator, torch.Generator):
        return _kind(generator), generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return _kind(generator), [version, torch.tensor(words), gauss]
    if isinstance(generator, np.random.RandomState):
        return _kind(generator), _in_tensors(generator.get_state(legacy=False))
    return _kind(generator), _in_tensors(generator.bit_generator.state)


def _load(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.clone())
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_in_arrays(state))
    else:
        generator.bit_generator.state = _in_arrays(state)


def _in_tensors(state: Any) -> Any:
    """numpy's state of a generator, with bytes for its arrays: torch has not all of numpy's types."""
    if isinstance(state, dict):
        return {name: _in_tensors(x) for name, x in state.items()}
    if isinstance(state, np.ndarray):
        return [state.dtype.name, torch.from_numpy(np.frombuffer(state.tobytes(), np.uint8).copy())]
    return state if isinstance(state, str | float) else int(state)


def _in_arrays(state: Any) -> Any:
    """
    Raises:
        ValueError: the state is garbled.
    """
    if isinstance(state, dict):
        for name, most in _MOST.items():
            if not 0 <= state.get(name, 0) <= most:  # numpy would read the memory behind its words
                raise ValueError(f"The state of a generator in the checkpoint is garbled: {name} is {state[name]}.")
        return {name: _in_arrays(x) for name, x in state.items()}
    if isinstance(state, list):
        return np.frombuffer(state[1].numpy().tobytes(), state[0]).copy()
    return state
