"""Random streams of sharded draws.

A draw on a replicated tensor takes the shared generator, so it is one device's draw. A draw on a sharded tensor must
differ from rank to rank and must not move the shared generator; it takes a stream of its own, keyed by (seed, step,
event, shard). The same layout and seed repeat bitwise. Outside a step, as in a callback that prunes weights at random,
a draw for a sharded tensor is one device's, cut; and so it is within steps under ``draws="one_device"``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lightning_par.mesh.positions import Positions
from lightning_par.sharded.whole_draws import CutDraw, WholeDraws

Draws = Literal["per_shard", "one_device"]
DRAWS: tuple[Draws, ...] = get_args(Draws)


def check_draws(asked: Any) -> Draws:
    """``asked``, which the user gave as ``draws``.

    Raises:
        ValueError: it is neither of the two.
    """
    if asked not in DRAWS:
        raise ValueError(
            f"draws must be 'per_shard' (each part draws numbers of its own) or 'one_device' (each part has its part "
            f"of what one device draws), got {asked!r}."
        )
    return asked  # type: ignore[no-any-return]


@dataclass
class Streams:
    """Where a run stands in its sharded draws: ``event`` counts them within a step.

    Attributes:
        whole: whether a sharded draw is one device's, cut.
        parts: where somebody listens, of what is drawn for parts: along which dim, by which positions, and the strides
            of the whole where they are known.
        unit: what draws within the module of a pipeline that runs, on a microbatch; None elsewhere.
        drawn_in_unit: how many functions have drawn within it.
        asked: whether somebody has asked where the shared generators stand; see
            `lightning_par.sharded.patches.generator_states`.
    """

    seed: int = 0
    step: int = 0
    event: int = 0
    in_step: bool = False
    whole: bool = False
    parts: list[CutDraw] | None = None
    unit: Any = None
    drawn_in_unit: int = 0
    asked: bool = False

    def begin_step(self, seed: int, step: int) -> None:
        self.seed, self.step, self.event, self.in_step = seed, step, 0, True

    def end_step(self) -> None:
        self.in_step = False

    def next_key(self, shard: int) -> int:
        key = mix(self.seed, self.step, self.event, shard)
        self.event += 1
        return key

    def drawn(
        self,
        dim: int,
        positions: Positions,
        shard: int,
        device: torch.device,
        lies: tuple[torch.Size, tuple[int, ...]] | None = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """Draws within are for a part of a tensor: ``shard``'s, along ``dim`` as ``positions`` say.

        Args:
            dim: of what is drawn.
            positions: who holds which of its indices.
            shard: the rank.
            device: where it is.
            lies: the shape of a part of which the whole's strides are known, and these.
        """
        if device.type == "meta":
            return contextlib.nullcontext()
        if self.parts is not None:
            self.parts.append((dim, positions, None if lies is None else lies[1]))
        return WholeDraws(dim, positions, shard, lies) if self.whole else self.draw(shard, device)

    @contextlib.contextmanager
    def draw(self, shard: int, device: torch.device) -> Iterator[None]:
        """Draws within come from the next stream of ``shard``; the shared generator stays where it was."""
        key = self.next_key(shard)
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        elif device.type == "cpu":
            generator = torch.default_generator
        else:
            yield
            return
        state = generator.get_state()
        generator.manual_seed(key)
        try:
            yield
        finally:
            generator.set_state(state)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is drawn within, afterwards they stand where they stood before."""
        before = vars(self).copy()
        try:
            yield
        finally:
            vars(self).update(before)


def mix(*values: int) -> int:
    """A 63-bit hash of ints, the same in every process (splitmix64's finaliser, folded over the values)."""
    return folded(_BEGIN, *values) >> 1


_BEGIN = 0x9E3779B97F4A7C15


def folded(state: int, *values: int) -> int:
    """``state`` of `mix` after more of its values."""
    mask = (1 << 64) - 1  # 64 bits, in which the arithmetic wraps around
    for value in values:
        state = (state + (value & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


class Mixed:
    """`mix` of values that begin alike.

    Example::

        mixed = Mixed(1, 2)
        assert mixed(3) == mix(1, 2, 3)
    """

    def __init__(self, *values: int) -> None:
        self._state = folded(_BEGIN, *values)

    def __call__(self, value: int) -> int:
        return folded(self._state, value) >> 1
