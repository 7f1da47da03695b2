"""Steps of which only the first microbatch is looked at: where that holds, and what ends it."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.alike_microbatches import AlikeMicrobatches
from lightning_par.pipeline.run.replay import Replays
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.pipeline.run.test_replay import GPT, Block, UnforeseenDraws, _train


def _program() -> Program:
    return cast(Program, object())


def _step(alike: AlikeMicrobatches, program: Program, moved: bool = False, draws: bool = False) -> bool:
    """Whether the step was trusted."""
    alike.begin(program)
    trusted = alike.trusted
    if draws:
        torch.rand(1)
    alike.end(lambda: moved)
    return trusted


def test_a_step_is_trusted_once_one_was_looked_at() -> None:
    alike, program, other = AlikeMicrobatches(), _program(), _program()
    assert [_step(alike, program), _step(alike, program), _step(alike, other), _step(alike, other)] == [0, 1, 0, 1]


def test_a_step_in_which_something_strayed_is_never_trusted_again() -> None:
    alike, program = AlikeMicrobatches(), _program()
    alike.begin(program)
    alike.stray()
    alike.end(lambda: False)
    assert not _step(alike, program) and not _step(alike, program)


def test_what_moves_at_the_end_of_a_trusted_step_ends_the_trust() -> None:
    alike, program = AlikeMicrobatches(), _program()
    assert [_step(alike, program), _step(alike, program, moved=True), _step(alike, program)] == [False, True, False]


def test_what_draws_unforeseen_leaves_the_generator_where_all_ranks_have_it_and_ends_the_trust() -> None:
    alike, program = AlikeMicrobatches(), _program()
    _step(alike, program)
    before = torch.get_rng_state()
    assert _step(alike, program, draws=True) and torch.equal(torch.get_rng_state(), before)
    assert not _step(alike, program)


def test_what_draws_in_each_step_is_not_trusted() -> None:
    alike, program = AlikeMicrobatches(), _program()
    assert not any(_step(alike, program, draws=True) for _ in range(3))


class _Hooked(Block):
    """Hangs a hook on what it returns, once nothing that a trial of it could see tells that it will."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if sys.getrecursionlimit() % 2:
            getattr(x, "_".join(["register", "hook"]))(self.changed)  # by a name that the code does not say
        return x

    def changed(self, grad: Tensor) -> Tensor:
        return grad + 0.1 * torch.rand_like(grad)


class DrawsInBackward(UnforeseenDraws):
    """From the third step on."""

    kind: type[Block] = _Hooked

    def block(self, i: int) -> Block:
        return self.kind() if i == 1 else Block()


def _steps(make: type[GPT], how: str) -> Any:
    """What `_train` finds; whether each step was trusted at its end; where the generator stands behind it all."""
    trusted: list[bool] = []
    end = Replays.end

    def ends(self: Replays) -> None:
        trusted.append(self.alike.trusted)
        end(self)

    Replays.end = ends  # type: ignore[method-assign]
    try:
        found, _ = _train(make, how)
        return found, trusted, torch.get_rng_state()
    finally:
        Replays.end = end  # type: ignore[method-assign]


@long()
@slow(but=["DrawsInBackward"])
@pytest.mark.parametrize("make", [GPT, DrawsInBackward])
def test_a_trusted_step_is_the_one_that_is_looked_at(pool: Pool, make: type[GPT]) -> None:
    ranks = pool.run(2, _steps, make, "replayed")
    for (found, _, generator), (expected, none, other) in zip(ranks, pool.run(2, _steps, make, "as ever"), strict=True):
        assert not any(none)
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        assert torch.equal(generator, other)
    first, last = ranks[0][1], ranks[1][1]
    assert first[-3:] == ([True, True, True] if make is GPT else [True, False, False])
    assert last[-3:] == [True, True, True]  # the layer is on rank 0
