"""A run that is killed and restarted again and again, each time on other ranks under another layout.

``python -m tests.endurance.restarts --kills 10`` does with forked ranks what `torchrun` does with processes: one store
of an agent that outlives the ranks, and the same script again, which asks for no checkpoint. What is killed is a random
rank, by SIGKILL, at a random moment: while it starts, in a step, in a save. The weights at the end must be those of a
run that nobody killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError

_PLACED = {"embedding": 0, "attention": 1, "norm": 1, "up": 0, "down": 1, "head": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": dict(tensor_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2, microbatches=2),
    "sp2": dict(sequence_parallel_size=2),
    "placed2": dict(placement=_PLACED),
    "dp2": dict(data_parallel_size=2),
    "fsdp2": dict(data_parallel_size=2, data_parallel="fsdp"),
    "tp2-pp2": dict(tensor_parallel_size=2, pipeline_parallel_size=2, microbatches=2),
    "dp2-tp2": dict(data_parallel_size=2, tensor_parallel_size=2),
    "dp2-sp2": dict(data_parallel_size=2, sequence_parallel_size=2),
    "fsdp2-pp2": dict(data_parallel_size=2, pipeline_parallel_size=2, data_parallel="fsdp", microbatches=2),
    "dp4": dict(data_parallel_size=4),
}
RANKS = {name: 1 if name == "one" else 2 * name.count("2") or 4 for name in LAYOUTS}
FIRST = "dp2"
"""With its accumulation it says which batches a step has: 2 replicas x 2."""
ACCUMULATE, BATCH, BATCHES = 2, 4, 14  # batches an epoch for each of the first layout's replicas
EPOCHS = 8


class Model(LightningModule):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(32, 16)
        self.attention = nn.Linear(16, 48)
        self.norm, self.up, self.down, self.head = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.Linear(16, 32),
        )
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.attention(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [dict(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7), interval="step")]


@dataclass(frozen=True)
class Kill:
    """When a rank kills itself.

    Args:
        rank: which.
        steps: after how many steps of its attempt; None for its start.
        delay: seconds after that.
    """

    rank: int
    steps: int | None
    delay: float

    def __str__(self) -> str:
        when = "start" if self.steps is None else f"step {self.steps}"
        return f"rank {self.rank}, {self.delay:.2f} s after {when}"


class Killer(Callback):
    """Kills its process as ``kill`` says, whatever it does at that moment."""

    def __init__(self, kill: Kill) -> None:
        self.kill, self.steps = kill, 0

    def arm(self) -> None:
        threading.Timer(self.kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps += trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0
        if self.steps == self.kill.steps:
            self.kill.steps is not None and self.arm()  # type: ignore[func-returns-value]


def job(folder: Path, layout: str, port: int, attempt: int, kill: Kill | None, directories: bool) -> dict[str, Tensor]:
    """The script that is started again and again; the weights at its end."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT=str(attempt), TORCHELASTIC_RUN_ID="none")
    callbacks: list[Callback] = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)]
    if kill is not None and kill.rank == int(os.environ["RANK"]):
        killer = Killer(kill)
        callbacks.append(killer)
        if kill.steps is None:
            killer.arm()
    L.seed_everything(3, verbose=False)
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        strategy=HybridParallelStrategy(**LAYOUTS[layout], save_distributed_checkpoint=directories),
        accelerator="cpu",
        devices=RANKS[layout],
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=callbacks,
        default_root_dir=folder,
        **options,
    )
    model = Model()
    tokens = torch.randint(0, 32, (2 * BATCH * BATCHES, 9), generator=torch.Generator().manual_seed(4))
    trainer.fit(model, DataLoader(tokens, BATCH, shuffle=True))  # type: ignore[arg-type]
    assert trainer.global_step == EPOCHS * BATCHES // ACCUMULATE
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


@dataclass
class Campaign:
    """One run, killed ``kills`` times.

    Args:
        pool: forks ranks.
        folder: for its files.
        seed: of layouts, victims and moments.
        directories: whether checkpoints are directories.
    """

    pool: Pool
    folder: Path
    seed: int
    directories: bool = False
    said: list[str] = field(default_factory=list)

    def run(self, kills: int) -> dict[str, Tensor]:
        """The weights at the end."""
        draw = random.Random(self.seed)
        agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        layout, attempt = FIRST, 0
        while True:
            ranks = RANKS[layout]
            kill = Kill(draw.randrange(ranks), draw.choice([None, 1, 2, 3, 4]), draw.uniform(0, 0.15))
            if attempt == 0:  # else there is no first layout whose batches the others have
                kill = Kill(kill.rank, kill.steps or 1, kill.delay)
            last = attempt == kills
            began = time.monotonic()
            try:
                weights = self.pool.run(
                    ranks,
                    job,
                    self.folder,
                    layout,
                    agent.port,
                    attempt,
                    None if last else kill,
                    self.directories,
                    grace=20,
                )
            except RanksFailedError as error:
                if last or "exit code -9" not in str(error):
                    raise
                self.say(f"attempt {attempt} on {layout}: killed {kill} ({time.monotonic() - began:.1f} s)")
            else:
                self.say(f"attempt {attempt} on {layout}: came to the end ({time.monotonic() - began:.1f} s)")
                return weights[0]  # type: ignore[no-any-return]
            attempt += 1
            size = (1, 2, 4)[attempt % 3]
            layout = draw.choice([name for name in LAYOUTS if RANKS[name] == size and name != layout])

    def say(self, what: str) -> None:
        self.said.append(what)
        print(what, flush=True)


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of weights, by the largest entry of each."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a)


def reference(pool: Pool, folder: Path) -> dict[str, Tensor]:
    """The weights of a run that nobody kills."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return pool.run(RANKS[FIRST], job, folder, FIRST, agent.port, 0, None, False)[0]  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones have the next seeds")
    parser.add_argument("--directories", action="store_true")
    asked, pool = parser.parse_args(), Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            whole, far = reference(pool, Path(folder, "whole")), []
            for seed in range(asked.seed, asked.seed + asked.runs):
                campaign = Campaign(pool, Path(folder, str(seed)), seed, asked.directories)
                far.append(furthest(campaign.run(asked.kills), whole))
                print(f"seed {seed}: {len(campaign.said) - 1} kills, weights differ by {far[-1]:.1e}", flush=True)
        print(f"{sum(x <= 1e-9 for x in far)} of {len(far)} runs end with the weights of one that nobody killed")
    finally:
        pool.close()


if __name__ == "__main__":
    from tests.endurance import restarts  # by whose name ranks find `job`

    restarts.main()
