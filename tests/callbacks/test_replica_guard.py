"""The replica guard: silent while copies are equal, and then on all ranks the first parameter that isn't, by name."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, ReplicaGuard, ledger, pl
from lightning_par.callbacks.replica_guard import Unequal, _Pieces, farthest_first, unequal
from lightning_par.mesh.digest import outline
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": dict(data_parallel_size=2),
    "tp2": dict(tensor_parallel_size=2),
    "sp2": dict(sequence_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2, microbatches=2),
    "dp2-tp2": dict(data_parallel_size=2, tensor_parallel_size=2),
    "pp2-tp2": dict(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2),
}
EVERY, STEPS = 3, 7


class Spoiler(Callback):
    """Changes one entry of a parameter, or of its state, on one rank alone, once its optimizer step is done."""

    def __init__(self, rank: int, name: str, step: int, state: bool = False, factor: float = 1 + 1e-6) -> None:
        self.rank, self.name, self.step, self.state, self.factor = rank, name, step, state, factor

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            x = pl_module.get_parameter(self.name)
            if self.state:
                x = trainer.optimizers[0].state[x]["exp_avg_sq"]
            with torch.no_grad():
                (x.local if isinstance(x, ShardedTensor) else x).view(-1)[0].mul_(1.5 if self.state else self.factor)


class Foreign(SingleDeviceStrategy):
    """Says that there are others, and nothing of what they hold."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.world_size = 2


def _fit(
    layout: dict[str, Any] | str | Foreign,
    spoiler: tuple[Any, ...] = (),
    optimizer_state: bool = False,
    accumulate: int = 1,
) -> tuple[str, int, list[tuple[str, int, int]]]:
    """What the guard said, the optimizer step then, and the messages (verb, elements, bytes) that it took."""
    torch.manual_seed(0)
    case = MODELS["gpt_tied"]
    callbacks: list[Any] = [Spoiler(*spoiler)] if spoiler else []
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]),
        strategy=HybridParallelStrategy(**layout) if isinstance(layout, dict) else layout,
        callbacks=[*callbacks, ReplicaGuard(EVERY, optimizer_state)], max_steps=STEPS,
        accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    said = ""
    with warnings.catch_warnings(), ledger() as moved:
        warnings.simplefilter("ignore")
        try:
            trainer.fit(case.module(), DataLoader(case.data(0), batch_size=case.batch_size))
        except RuntimeError as error:
            said = str(error)
    messages = [(t.verb, t.numel, t.nbytes) for t in moved.select(purpose="replicas")]
    return said, trainer.global_step, messages


@slow(but=["dp2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_copies_are_left_in_peace_and_cost_one_message_of_eight_bytes_a_parameter(
    pool: Pool, layout: str
) -> None:
    ranks = 4 if "-" in layout else 2
    parameters = len(list(MODELS["gpt_tied"].module().parameters()))
    for said, step, (names, *checks) in pool.run(ranks, _fit, LAYOUTS[layout]):
        assert (said, step) == ("", STEPS)
        assert names == ("all_gather", ranks, 0)  # who holds what, once a fit
        assert checks == [("all_gather", ranks * parameters, ranks * 8 * parameters)] * (STEPS // EVERY)


SPOILED = [
    ("dp2", 1, "blocks.0.attention.qkv.weight"),
    ("sp2", 1, "blocks.0.attention.qkv.weight"),
    ("tp2", 1, "blocks.0.norm1.weight"),  # whole
    ("dp2-tp2", 3, "blocks.0.attention.qkv.weight"),  # a part, whose copy rank 1 has
    ("pp2", 1, "tokens.weight"),  # tied, in both stages
    ("pp2-tp2", 3, "tokens.weight"),  # the same, split
]


@slow(but=["dp2-1-blocks.0.attention.qkv.weight", "tp2-1-blocks.0.norm1.weight"])
@pytest.mark.parametrize(("layout", "rank", "name"), SPOILED, ids=lambda x: str(x))
def test_a_copy_that_one_rank_changes_is_named_on_all_ranks(pool: Pool, layout: str, rank: int, name: str) -> None:
    ranks = 4 if "-" in layout else 2
    step = EVERY + 1  # after the first check, found by the second
    (first, *others) = pool.run(ranks, _fit, LAYOUTS[layout], (rank, name, step))
    peer = rank - 2 if ranks == 4 and layout == "dp2-tp2" else 1 if layout == "pp2-tp2" else 0
    assert all(other == first for other in others)
    said, stopped, _ = first
    assert stopped == 2 * EVERY
    assert said.startswith(f"After optimizer step {2 * EVERY} the ranks' copies of {name!r} differ: ")
    assert re.search(rf"differ: rank {rank} from rank {peer}\.", said)


def test_of_what_a_change_has_spread_to_the_one_that_was_changed_is_named_first(pool: Pool) -> None:
    name = "blocks.0.norm1.weight"
    for said, _, _ in pool.run(2, _fit, LAYOUTS["tp2"], (1, name, EVERY + 1, False, 1.01)):
        first, more = said.splitlines()
        assert first.startswith(f"After optimizer step {2 * EVERY} the ranks' copies of {name!r} differ: rank 1 from")
        assert more.startswith("Nearer to one another, but not equal, are those of 'positions.weight'")
    for said, *_ in pool.run(2, _fit, LAYOUTS["tp2"], (1, name, EVERY, False, 1.01)):
        assert f"After optimizer step {EVERY} the ranks' copies of {name!r} differ: rank 1" in said and "\n" not in said


def test_the_order_is_that_of_the_distance_an_entry_parameters_before_states() -> None:
    torch.manual_seed(0)
    x = torch.randn(10**5)  # of several chunks
    scales = {"'a'": 1e-6, "'b'": 1e-3, "the optimizer's state of 'a'": 1.0, "'c'": float("nan")}
    found = [Unequal(name, ((0, 2), (1,))) for name in scales]
    mine = torch.stack([torch.cat([torch.tensor([x.numel()]).double(), outline(x)]) for _ in scales])
    others = torch.stack([torch.cat([mine[0, :1], outline(x + s * torch.randn_like(x))]) for s in scales.values()])
    assert [one.name for one in farthest_first(found, [mine, others, mine])] == [
        "'c'", "'b'", "'a'", "the optimizer's state of 'a'"
    ]  # fmt: skip


@long()
def test_the_optimizers_state_is_compared_where_asked(pool: Pool) -> None:
    spoiler = (1, "blocks.0.norm1.weight", EVERY, True)
    alike, checked = (pool.run(2, _fit, LAYOUTS["tp2"], spoiler, state) for state in (False, True))
    for said, step, _ in alike:  # it shows in the weights, a check later
        assert step == 2 * EVERY and "differ: rank 1 from rank 0" in said and "state" not in said
    for said, step, _ in checked:
        assert step == EVERY
        assert "copies of the optimizer's state of 'blocks.0.norm1.weight' differ: rank 1 from rank 0" in said
    for said, step, _ in pool.run(2, _fit, LAYOUTS["pp2"], (), True):
        assert (said, step) == ("", STEPS)


def test_steps_are_those_of_the_optimizer_and_other_strategies_are_compared_or_refused(pool: Pool) -> None:
    for said, step, messages in pool.run(2, _fit, "ddp", (0, "norm.bias", 2), False, 2):
        assert step == EVERY and len(messages) == 2
        assert "step 3 the ranks' copies of 'norm.bias' differ: rank 1 from rank 0." in said
    with pytest.raises(
        RanksFailedError, match="does not know which ranks hold copies under Foreign.*leave it out here"
    ):
        pool.run(1, _fit, Foreign())
    ((said, step, messages),) = pool.run(1, _fit, "auto")
    assert (said, step, messages) == ("", STEPS, [])


def test_the_ranks_of_the_majority_come_first_and_what_is_elsewhere_is_no_copy() -> None:
    names = ("a", "b")
    held = [_Pieces(names, ("whole", "tensor 0")), _Pieces(names, ("whole", "tensor 1"))] * 2 + [
        _Pieces(names, ("whole", ""))
    ]
    hashes = [[1, 5], [1, 6], [2, 5], [1, 6], [1, 0]]
    found = unequal(held, hashes)
    assert found == [Unequal("'a'", ((0, 1, 3, 4), (2,)))]
    assert str(found[0]) == "'a' differ: rank 2 from ranks 0, 1, 3, 4"
    with pytest.raises(RuntimeError, match="Ranks 0 and 1 have not the same parameters: c is on one of them alone"):
        unequal([held[0], _Pieces((*names, "c"), ("whole",) * 3)], [[1, 2], [1, 2, 3]])


def test_both_lightnings_have_it() -> None:
    import pytorch_lightning

    assert isinstance(pl.ReplicaGuard(), pytorch_lightning.Callback)
    with pytest.raises(ValueError, match="every so many steps, got every_n_steps=0"):
        ReplicaGuard(0)
