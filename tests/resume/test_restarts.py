"""A run that its launcher starts again goes on from its newest checkpoint, and from nobody else's."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import IO, Any

import lightning as L
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, TensorParallelStrategy
from tests.endurance.restarts import Campaign, furthest, reference
from tests.helpers.pool import Pool
from tests.helpers.slow import slow


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 4).double()
        self.begun: int | None = None
        self.losses: list[float] = []

    def on_train_start(self) -> None:
        self.begun = self.trainer.global_step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class Stop(Callback):
    """Ends the process's run after a step, as a kill would, but for what a test may ask it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def slurm(job: int, restarts: int) -> None:
    """Let this process be the one task of a job, which was queued again so many times."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    own = dict(JOB_ID=job, NTASKS=1, PROCID=0, LOCALID=0, NODEID=0, STEP_ID=0, RESTART_COUNT=restarts, JOB_NAME="train")
    os.environ.update({f"SLURM_{name}": str(value) for name, value in own.items()}, MASTER_PORT=str(free_port()))


def attempt(
    folder: Path, job: int, restarts: int, stop: int, logger: bool = False, path: Any = None, fits: int = 1
) -> list[tuple[int | None, int, list[str]]]:  # fmt: skip
    """Where each fit began and ended, and of what it warned."""
    slurm(job, restarts)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    told = []
    for fit in range(fits):
        L.seed_everything(4, verbose=False)
        folders = dict(dirpath=None if logger else folder / f"fit{fit}", filename="{step}")
        saving = ModelCheckpoint(**folders, every_n_train_steps=1, save_top_k=-1, save_last=True)  # type: ignore
        trainer = Trainer(
            strategy=HybridParallelStrategy(), accelerator="cpu", devices=1, max_steps=8,
            callbacks=[saving, Stop(stop)], logger=CSVLogger(folder, version=None) if logger else False,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Net()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(model, DataLoader([*torch.randn(6, 4).double()], shuffle=True), ckpt_path=path)  # type: ignore
            except InterruptedError:
                pass
        told.append((model.begun, trainer.global_step, [str(x.message) for x in caught]))
    return told


def test_a_job_that_is_queued_again_goes_on(pool: Pool, tmp_path: Path) -> None:
    ((begun, ended, _),) = pool.run(1, attempt, tmp_path, 7, 0, 3)[0]
    assert (begun, ended) == (0, 3)
    ((begun, ended, _),) = pool.run(1, attempt, tmp_path, 8, 1, 5)[0]
    assert (begun, ended) == (0, 5), "of another job"
    newest = tmp_path / "fit0" / "last.ckpt"
    ((begun, _, _),) = pool.run(1, attempt, tmp_path, 8, 2, 5, path=tmp_path / "fit0" / "step=2.ckpt")[0]
    assert begun == 2, "what the user names is taken"
    newest.write_bytes(newest.read_bytes()[:-1000])
    ((begun, ended, warned),) = pool.run(1, attempt, tmp_path, 8, 3, 6, path="last")[0]
    assert (begun, ended) == (5, 6)
    (torn,) = [text for text in warned if "is passed over" in text]
    assert str(newest) in torn and "step=5-v1.ckpt is taken" in torn


def test_folders_that_a_logger_counts_up_and_several_fits(pool: Pool, tmp_path: Path) -> None:
    for restarts, (stop, begins) in enumerate([(3, [0]), (5, [3]), (9, [5])]):
        told = pool.run(1, attempt, tmp_path, 7, restarts, stop, logger=True)[0]
        assert [begun for begun, _, _ in told] == begins
    two = tmp_path / "two"
    assert [x[:2] for x in pool.run(1, attempt, two, 7, 0, 9, fits=2)[0]] == [(0, 8), (0, 8)]
    again = pool.run(1, attempt, two, 7, 1, 9, fits=2)[0]
    assert [ended for _, ended, _ in again] == [8, 8] and again[1][0] in (None, 8), "each goes on from its own"


# ------------------------------------------------------------------------------------------------- another data size


class SavesAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _trained(
    folder: Path, size: int, accumulate: int, path: Path | None, steps: int
) -> tuple[list[float], list[Tensor], list[str]]:
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=HybridParallelStrategy(), accelerator="cpu", devices=size, max_steps=steps,
        accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[SavesAt(4, folder / f"{size}x{accumulate}-4.ckpt")],
    )  # fmt: skip
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader([*torch.randn(24, 4).double()], 2, shuffle=True), ckpt_path=path)  # type: ignore
    return model.losses, [x.detach().clone() for x in model.parameters()], [str(x.message) for x in caught]


def test_a_checkpoint_of_two_replicas_goes_on_with_one(pool: Pool, tmp_path: Path) -> None:
    _, whole, _ = pool.run(2, _trained, tmp_path, 2, 1, None, 9)[0]
    losses, weights, warned = pool.run(1, _trained, tmp_path, 1, 2, tmp_path / "2x1-4.ckpt", 9)[0]
    assert len(losses) == 10 and not [text for text in warned if "stepped on" in text]
    assert all(torch.allclose(a, b, 1e-9, 1e-12) for a, b in zip(whole, weights))
    _, weights, warned = pool.run(1, _trained, tmp_path, 1, 1, tmp_path / "2x1-4.ckpt", 9)[0]
    assert not all(torch.allclose(a, b, 1e-9, 1e-12) for a, b in zip(whole, weights))
    (text,) = [text for text in warned if "stepped on" in text]
    assert "2 replicas x accumulate_grad_batches=1 = 2 batches" in text and "Write accumulate_grad_batches=2" in text


# --------------------------------------------------------------------------------------------------------- campaigns


@slow()
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [1, 10])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(kills: int, pool: Pool, tmp_path: Path) -> None:
    campaign = Campaign(pool, tmp_path / "killed", seed=kills, directories=kills == 1)
    assert furthest(campaign.run(kills), reference(pool, tmp_path / "whole")) < 1e-9


# ----------------------------------------------------------------------------------------------------------- torchrun


def main(folder: Path, kills: int) -> None:
    """The script that torchrun starts: its last rank is killed in each of the first ``kills`` attempts."""
    count, size = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        strategy=TensorParallelStrategy(), accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_steps=40,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1)], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Net()
    (folder / f"rank of {os.getppid()}").write_text(f"{os.getpid()}")

    class Watched(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            (folder / f"{size} ranks at step {trainer.global_step}").touch()
            if trainer.global_step == 2 * count + 2 and count < kills and os.environ["RANK"] == f"{size - 1}":
                os.kill(os.getpid(), 9)
            time.sleep(0 if kills else 0.3)

    trainer.callbacks.append(Watched())
    torch.manual_seed(0)
    trainer.fit(model, DataLoader([*torch.randn(6, 4).double()], shuffle=True))  # type: ignore[arg-type]
    if os.environ["RANK"] == "0":
        print(f"attempt {count} of {size} ranks began at step {model.begun}, weight {model.net.weight.sum().item()}")


def torchrun(folder: Path, kills: int, *options: str, **variables: str) -> tuple[subprocess.Popen[str], IO[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.resume.test_restarts"]
    environment = {key: x for key, x in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= variables
    output = open(folder / f"said-{time.monotonic()}", "w+")  # as long as the process
    job = subprocess.Popen(
        [*command, str(folder), str(kills)], cwd=Path(__file__).parents[2], env=environment, text=True,
        start_new_session=True, stdout=output, stderr=output,
    )  # fmt: skip
    return job, output


def end_of(job: tuple[subprocess.Popen[str], IO[str]]) -> str:
    """What a job has said, once it has ended."""
    job[0].wait()
    job[1].seek(0)
    return job[1].read()


@slow()
@pytest.mark.parametrize("how", ["static", "standalone"])
def test_torchrun_restarts_a_run(how: str, tmp_path: Path) -> None:
    options = ["--standalone"] if how == "standalone" else ["--nnodes", "1", "--master-port", str(free_port())]
    kills = 1 if how == "static" else 2
    job = torchrun(tmp_path, kills, *options, "--nproc-per-node", "2", "--max-restarts", str(kills))
    said = end_of(job)
    assert job[0].returncode == 0 and f"attempt {kills} of 2 ranks began at step {2 * kills}," in said, said[-3000:]


@slow()
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_goes_and_comes_back(lost: int, tmp_path: Path) -> None:
    """Two agents, as on two hosts; one is killed with its rank, and another one comes later."""
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of a third host
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d")
    options += ("--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-conf", f"{conf},is_host=0")

    def met(ranks: int, least: int) -> bool:
        return any(f"{ranks} ranks at step {step}" in os.listdir(tmp_path) for step in range(least, 40))

    def wait(ranks: int, least: int) -> None:
        while not met(ranks, least):
            assert any(agent.poll() is None for agent, _ in agents), "".join(map(end_of, agents))
            time.sleep(0.1)

    # torch's agent tells a host that comes later nothing of a store that it has had before
    own_store = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    agents = [torchrun(tmp_path, 0, *options, **own_store) for _ in range(2)]
    wait(2, 3)
    agent = agents[lost][0].pid
    os.kill(agent, signal.SIGKILL)
    os.kill(int((tmp_path / f"rank of {agent}").read_text()), signal.SIGKILL)
    wait(1, 4)
    agents.append(torchrun(tmp_path, 0, *options, **own_store))
    said = [*map(end_of, agents)]
    left = said[1 - lost] + said[2]
    assert met(2, 6), "the host that came later was not waited for"
    (end,) = [line for line in left.splitlines() if " began at step " in line]
    assert "of 2 ranks" in end and int(end.split(" began at step ")[1].split(",")[0]) >= 4, left[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
