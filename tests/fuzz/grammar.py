"""The program of a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from tests.fuzz.glue import GLUE
from tests.fuzz.habits import EXTRAS, INNER, OUTER
from tests.fuzz.layers import HEADS, LAYERS, STEMS
from tests.fuzz.losses import LOSSES
from tests.fuzz.optimizers import OPTIMIZERS
from tests.fuzz.piece import Piece
from tests.fuzz.program import Group, Placed, Program

_ACCUMULATING = ("lbfgs", "sam")  # the closure runs more than once a step


def generate(seed: int, without: Collection[str] = ()) -> Program:
    """Most of it is plausible user code; a few pieces of it are odd.

    Args:
        seed: gives the same program again, with the same ``without``.
        without: names of pieces to leave out.

    Example::

        assert generate(3).source() == generate(3).source()
    """
    return _Grammar(seed, without).program()


class _Grammar:
    def __init__(self, seed: int, without: Collection[str]) -> None:
        self.without = without
        self.random = random.Random(seed)
        self.seed = seed
        self.count = 0

    def place(self, piece: Piece) -> Placed:
        self.count += 1
        return Placed(piece, self.count)

    def pick(self, pieces: Sequence[Piece], shape: str = "", inner: bool = False) -> Placed:
        """One of ``pieces``, by their weights."""
        fit = [p for p in pieces if (not shape or shape in p.on) and not (inner and p.at == "net")]
        fit = [p for p in fit if p.name not in self.without]
        return self.place(self.random.choices(fit, [p.weight for p in fit])[0])

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def program(self) -> Program:
        shape = "BTC" if self.chance(0.6) else "BC"
        batch = self.random.choice((3, 4, 4, 5, 6, 8))
        stem, head = self.pick(STEMS[shape]), self.pick(HEADS[shape])
        if stem.piece.name == "patches" and head.piece.name == "per_token":
            stem = self.place(STEMS[shape][0])
        tokens = 4 if stem.piece.name == "patches" else self.random.choice((4, 6, 7, 8))
        width = self.random.choice((4, 8, 8, 12))
        sizes = (("T", tokens), ("B", batch), ("C", width), ("V", self.random.choice((7, 8, 11))))
        groups = tuple(self._group(shape, number) for number in range(self.random.choice((1, 2, 2, 3, 3, 4))))
        extras = self._extras()
        optimizer = self.pick(OPTIMIZERS)
        samples = batch * self.random.choice((2, 3, 3, 4)) - (
            self.random.randrange(1, batch) if self.chance(0.3) else 0
        )
        return Program(
            seed=self.seed,
            sizes=sizes,
            stem=stem,
            groups=groups,
            head=head,
            loss=self.pick(LOSSES[head.piece.name]),
            extras=extras,
            optimizer=optimizer,
            options=self._options(optimizer.piece),
            form=self.random.choices(("tuple", "dict", "strings", "list", "named", "nested"), (6, 4, 1, 1, 1, 1))[0],
            inline=self.chance(0.35),
            samples=samples,
            epochs=self.random.choice((1, 1, 2, 2, 3)),
            validates=self.chance(0.4),
            returns=self.random.choices(("loss", "{'loss': loss, 'out': out.detach()}"), (5, 1))[0],
            steps=self.random.choices(
                ("training_step(self, batch, batch_idx)", "training_step(self, batch, batch_idx=0)"), (8, 1)
            )[0],
        )

    def _group(self, shape: str, number: int) -> Group:
        kind = "block" if self.chance(0.5) else "net"
        inner = kind == "block"
        placed = [self.pick(LAYERS, shape, inner) for _ in range(self.random.choice((1, 1, 2)))]
        if self.chance(0.4):
            placed.append(self.pick(GLUE, shape, inner))
        if self.chance(0.2):
            placed.append(self.pick(INNER, shape, inner))
        if kind == "net" and self.chance(0.1):
            placed.append(self.pick(OUTER, shape))
        self.random.shuffle(placed)
        return Group(kind, tuple(placed), number, times=2 if inner and self.chance(0.1) else 1)

    def _extras(self) -> tuple[Placed, ...]:
        found: dict[str, Placed] = {}
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3))):
            one = self.pick(EXTRAS)
            found.setdefault(one.piece.name, one)
        return tuple(found.values())

    def _options(self, optimizer: Piece) -> tuple[tuple[str, str], ...]:
        options = {}
        if self.chance(0.25) and optimizer.name not in _ACCUMULATING:
            options["accumulate_grad_batches"] = str(self.random.choice((2, 3)))
        if self.chance(0.35) and optimizer.name not in _ACCUMULATING:
            options["gradient_clip_val"] = self.random.choice(("0.1", "0.5"))
            if self.chance(0.4):
                options["gradient_clip_algorithm"] = "'value'"
        if self.chance(0.1):
            options["max_steps"] = "2"
        if self.chance(0.05):
            options["limit_train_batches"] = "2"
        if self.chance(0.05):
            options["check_val_every_n_epoch"] = "2"
        if self.chance(0.05):
            options["log_every_n_steps"] = "1"
        if self.chance(0.05):
            options["num_sanity_val_steps"] = "1"
        if self.chance(0.04):
            options["detect_anomaly"] = "True"
        return tuple(options.items())
