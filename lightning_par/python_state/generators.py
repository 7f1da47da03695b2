"""Random number generators: where they stand, and put back there."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_par.mesh.axis import Axis
from lightning_par.python_state.find_objects import find_objects
from lightning_par.python_state.global_generators import NUMPY, PYTHON, are_same

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@contextmanager
def kept(holders: Iterable[Any] = ()) -> Generator[Callable[[], bool], None, None]:
    """Whatever is drawn inside, afterwards the generators stand where they stood before.

    Gives a function that tells whether anything was drawn yet.

    Args:
        holders: objects that may hold generators of their own, beside the global ones of torch, numpy and ``random``.
    """
    own = find(holders)
    put_back = snapshot(holders)
    before, globally = [_state(x) for x in own], global_state()
    try:
        yield lambda: before != [_state(x) for x in own] or not same_global_state(globally)
    finally:
        put_back()


@contextmanager
def put_back_on_error(holders: Iterable[Any] = ()) -> Generator[None, None, None]:
    """As `kept`, where what runs inside raises; else the generators stand where it left them."""
    put_back = snapshot(holders)
    try:
        yield
    except BaseException:
        put_back()
        raise


def snapshot(holders: Iterable[Any]) -> Callable[[], None]:
    """What puts the generators back to where they stand now; ``holders`` as in `kept`."""
    restore = [_restorer(generator) for generator in find(holders)]
    state = global_state()

    def put_back() -> None:
        set_global_state(state)
        for one in restore:
            one()

    return put_back


class Standing:
    """Where generators stand now: the global ones, and those that ``holders`` reach.

    Example::

        before = Standing([dataset])
        item = next(items)
        before.put_back()
        assert before.is_met()
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        self._own = find(holders)
        self._states, self._global = [_state(x) for x in self._own], global_state()
        self.put_back = snapshot(self._own)
        """Put them there again."""

    def is_met(self) -> bool:
        """Whether they stand there."""
        return self._states == [_state(x) for x in self._own] and same_global_state(self._global)


def global_state() -> tuple[Any, ...]:
    """The state of every global generator."""
    # to ask for its state would start CUDA
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, NUMPY.get(), PYTHON.get()


def same_global_state(before: tuple[Any, ...]) -> bool:
    """Whether no global generator was drawn from since ``before``."""
    now = global_state()
    tensors = zip([before[0], *before[1]], [now[0], *now[1]])
    return all(torch.equal(a, b) for a, b in tensors) and are_same(before[2:], now[2:])


def set_global_state(state: tuple[Any, ...]) -> None:
    """Put every global generator where `global_state` found it."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    NUMPY.set(state[2])
    PYTHON.set(state[3])


def default(device: torch.device) -> torch.Generator | None:
    """The global generator from which functions of tensors on ``device`` draw, where it has one."""
    if device.type == "cpu":
        return torch.default_generator
    of_kind = getattr(getattr(torch, device.type, None), "default_generators", ())
    index = device.index or 0
    return of_kind[index] if index < len(of_kind) else None


def states_of(generators: Iterable[torch.Generator]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Where generators stand."""
    return [(generator, generator.get_state()) for generator in generators]


def set_states(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Undo what was drawn since `states_of`."""
    for generator, state in states:
        generator.set_state(state)


def packed_state() -> bytes:
    """`global_state`, pickled; of the CUDA generators only the current device's."""
    cuda = torch.cuda.get_rng_state().numpy() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return pickle.dumps((torch.get_rng_state().numpy(), cuda, NUMPY.get(), PYTHON.get()))


def unpack_state(packed: bytes) -> None:
    """Put the global generators where `packed_state` found them."""
    cpu, cuda, numpy, python = pickle.loads(packed)
    torch.set_rng_state(torch.from_numpy(cpu))
    if cuda is not None:
        torch.cuda.set_rng_state(torch.from_numpy(cuda))
    NUMPY.set(numpy)
    PYTHON.set(python)


def raw_state() -> tuple[Any, ...]:
    """The state of the global generators, of the CUDA ones only the current device's: as each keeps it, which takes
    no time to speak of."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, NUMPY.get(), PYTHON.get()


def share(axis: Axis) -> None:
    """Put the global generators of every rank along ``axis`` where the first rank's stand."""
    if axis.size > 1:
        packed = axis.broadcast_object(packed_state() if axis.tells() else b"", "generators")
        if axis.rank > 0:
            unpack_state(packed)


def find(holders: Iterable[Any]) -> list[Any]:
    """The generators that ``holders`` reach, as `find_objects` does."""
    return find_objects(holders, KINDS)


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else None
    return pickle.dumps(generator.__getstate__() if state is None else state)


def _restorer(generator: Any) -> Callable[[], Any]:
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
