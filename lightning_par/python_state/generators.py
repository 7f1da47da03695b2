"""Random number generators: found, and put back to where they stood."""

from __future__ import annotations

import functools
import pickle
import random
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_par.mesh.axis import Axis
from lightning_par.python_state.global_generators import NUMPY, PYTHON, are_same

MAX_OBJECTS = 5000  # that are looked into; datasets can be large
MAX_ITEMS = 100  # of one list, tuple, set or dict

_MOST = {"pos": 624, "buffer_pos": 4}
"""How far numpy's generators may stand in what they have drawn ahead."""

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


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


def saved_state(raw: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """The state of the global generators for a checkpoint, now or when it was ``raw``; of tensors and numbers alone, so
    that no pickle runs code when it is read. Of the CUDA generators only the current device's."""
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
    """The states of generators that `find` found, in the form of `saved_state`."""
    return [_saved(generator) for generator in found]


def load_states(found: list[Any], states: list[Any]) -> None:
    """Put generators where `saved_states` found them, if they are as many and of the same kinds."""
    if [_kind(generator) for generator in found] == [kind for kind, _ in states]:
        for generator, (_, state) in zip(found, states):
            _load(generator, state)


def _kind(generator: Any) -> str:
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator).__name__
    return next(kind.__name__ for kind in _KINDS if isinstance(generator, kind))


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


def share(axis: Axis) -> None:
    """Put the global generators of every rank along ``axis`` where the first rank's stand."""
    if axis.size > 1:
        packed = axis.broadcast_object(packed_state() if axis.tells() else b"", "generators")
        if axis.rank > 0:
            unpack_state(packed)


def find(holders: Iterable[Any], kinds: tuple[type, ...] = _KINDS) -> list[Any]:
    """The generators, or what else is of ``kinds``, that ``holders`` reach through attributes, containers, partials
    and closures."""
    seen: set[int] = set()
    found: list[Any] = []
    waiting = list(holders)
    while waiting and len(seen) < MAX_OBJECTS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            found.append(value)
        else:
            waiting.extend(_inside(value))
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | int | float | type | torch.Tensor | np.ndarray | None):
        return []
    if isinstance(value, list | tuple | set | frozenset):
        return [item for item, _ in zip(value, range(MAX_ITEMS))]
    if isinstance(value, dict):
        return [item for item, _ in zip(value.values(), range(MAX_ITEMS))]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.ModuleType):  # through one all others are reached
        return []
    inner: list[Any] = [_plain(value, "__self__"), _plain(value, "__func__")]
    for cell in _plain(value, "__closure__") or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    inner.extend((_plain(value, "__dict__") or {}).values())
    return inner


def _plain(value: Any, name: str) -> Any:
    """An attribute as Python keeps it: a ``__getattr__`` of a user's object may import, load or answer anything."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


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
