"""A kill at any moment of a save loses nothing: the last good checkpoint resumes, bit by bit."""

from __future__ import annotations

import base64
import contextlib
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.checkpoint.folder import METADATA, files_of
from lightning_par.checkpoint.metadata import parsed
from lightning_par.checkpoint.reading import load_whole
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.tensor import leaf
from tests.checkpoint.test_checkpoints import load, quiet
from tests.helpers.fsspec_folders import register
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.watched_writes import told_of_writes

STRATEGIES: dict[str, Any] = {"tp2": TensorParallelStrategy, "pp2": PipelineParallelStrategy}
MODES: list[tuple[Any, str]] = [(False, "tp2"), (True, "pp2"), ("async", "tp2"), ("url", "tp2")]
STEPS = 200  # more than a job gets to before it is killed
VICTIMS: list[tuple[int, ...]] = [(0,), (1,), (0, 1)]
URL = "shelf://"


class Wide(LightningModule):
    """A checkpoint that takes a while to write: 12 bytes for each of 2 ``width`` * 4 ``width`` elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.down(self.act(self.up(batch))) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Journal(Callback):
    """What each rank holds after each step, and what is saved, in files that a kill leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _note(self, trainer: Trainer, kind: str, value: int) -> None:
        with open(self.folder / f"{kind}-{trainer.global_rank}", "a") as file:
            file.write(f"{trainer.global_step} {value}\n")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer, "pid", os.getpid())
        self._note(trainer, "held", _digest(trainer, pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step:  # `on_train_batch_end` comes before the callback that saves
            self._note(trainer, "saved", 0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._note(trainer, "held", _digest(trainer, pl_module))


def _digest(trainer: Trainer, module: LightningModule) -> int:
    """Of all that this rank holds of the weights and of the optimizer's state."""
    state = [*module.parameters(), *tensors_in([*trainer.optimizers[0].state.values()])]
    with torch._C.DisableTorchFunctionSubclass():  # else all ranks would have to read the same weight at a time
        parts = [leaf(x).detach() for x in state if not is_elsewhere(x)]
        return hash(tuple(int(x.contiguous().view(torch.int32).sum(dtype=torch.int64)) for x in parts))


class Killer(Callback):
    """Has the first rank kill ``victims`` in the third step's saves: when they have written ``share`` of their bytes.

    The second ones' go on meanwhile where saves do not hold up training.
    """

    def __init__(self, folder: Path, victims: tuple[int, ...], share: float) -> None:
        self.folder, self.victims, self.share = folder, victims, share
        self.steps, self.written, self.limit = 0, 0, math.inf

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            self.limit = (1 + self.share / 2) * self.written

    def told(self, written: int) -> None:
        self.written += written
        if self.written >= self.limit:
            self.limit = math.inf
            (self.folder / "killed").touch()
            for rank in sorted(self.victims, reverse=True):  # itself last
                os.kill(_noted(self.folder, f"pid-{rank}")[-1][1], signal.SIGKILL)


def job(
    folder: Path, how: Any, layout: str, width: int, steps: int, ckpt_path: str | None,
    victims: tuple[int, ...] = (), share: float = 0.0,
) -> None:  # fmt: skip
    """Train from ``ckpt_path``; save after each step under a new name, and under one that has the step before."""
    killer = Killer(folder, victims, share)
    with told_of_writes(folder / "saved", killer.told) if victims else contextlib.nullcontext():
        _train(folder, how, layout, width, steps, ckpt_path, killer)


def _train(folder: Path, how: Any, layout: str, width: int, steps: int, ckpt_path: str | None, killer: Killer) -> None:
    register()
    at_url, how = how == "url", True if how == "url" else how
    callbacks: list[Callback] = [Journal(folder / "journal"), *([killer] if killer.victims else [])]
    saves: dict[str, Any] = dict(every_n_train_steps=1, save_top_k=1, save_last=True, enable_version_counter=False)
    if steps == STEPS or ckpt_path is not None:
        callbacks.append(ModelCheckpoint(f"{URL * at_url}{folder}/saved", "{step}", **saves))
    options: dict[str, Any] = dict(accelerator="cpu", devices=2, logger=False, enable_progress_bar=False)
    trainer = Trainer(
        strategy=STRATEGIES[layout](save_distributed_checkpoint=how, **dict(microbatches=1) if layout == "pp2" else {}),
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    batch = torch.randn(4, width, generator=torch.Generator().manual_seed(2))
    with quiet():
        trainer.fit(Wide(width), DataLoader(batch, batch_size=4), ckpt_path=ckpt_path)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the killer


def _size(folder: Path) -> int | None:
    """Bytes of what is being written in ``folder``; None where nothing is."""
    found = None
    for path in (*folder.glob(".*.tmp"), *folder.glob("*/*")):
        with contextlib.suppress(FileNotFoundError):
            if path.parent == folder or path.name not in _named(path.parent):
                found = (found or 0) + _bytes(path)
    return found


def _bytes(path: Path) -> int:
    """Of a file, or of what makes the checkpoint of a directory."""
    return sum(file.stat().st_size for file in ([path / name for name in _named(path)] if path.is_dir() else [path]))


def _named(path: Path) -> set[str]:
    """The files in the directory ``path`` that are a whole checkpoint's; all where that is not here yet, or no more."""
    if path.name.startswith(".") or not (path / METADATA).exists():
        return {*os.listdir(path)}
    return {METADATA, *files_of(parsed((path / METADATA).read_bytes()))}


def _noted(folder: Path, name: str) -> list[tuple[int, int]]:
    path = folder / "journal" / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), int(value)) for step, value in map(str.split, lines)]


def _good(folder: Path, how: Any) -> dict[str, int]:
    """The checkpoints that are there, each of which must be whole, and their steps."""
    found = {}
    for path in sorted((folder / "saved").glob("[!.]*")):
        if how == "url" and path.name != "last.ckpt" and not (path / METADATA).exists():
            continue  # its first save did not come to its end, or it is being removed
        content = load_whole(str(path)) if path.is_dir() else load(path)
        assert len(content["state_dict"]) == 4 and len(content["optimizer_states"][0]["state"]) == 4
        assert path.name in ("last.ckpt", f"step={content['global_step']}.ckpt")
        found[f"{URL * (how == 'url')}{path}"] = content["global_step"]
    return found


class Trial:
    """One job after another, each from where the one before was killed.

    Args:
        folder: for its files.
        how: what `save_distributed_checkpoint` is.
        start: runs `job` with the arguments behind ``width``; what it said if it failed.
    """

    def __init__(self, folder: Path, how: Any, start: Callable[..., str]) -> None:
        self.folder, self.how, self.start = folder, how, start
        self.resumed: str | None = None

    def kill(self, victims: tuple[int, ...], share: float) -> None:
        """Let a job save twice, then kill it within a save; what is there must be whole, and nothing is lost."""
        said = self.start(STEPS, self.resumed, victims, share)
        assert said and (self.folder / "killed").exists(), said or "the job ended before the kill"
        (self.folder / "killed").unlink()
        good = _good(self.folder, self.how)
        done = _noted(self.folder, "saved-0")[-1][0]
        newest = max(good, key=lambda path: good[path])
        assert good[newest] >= done - (self.how == "async"), f"step {done} was saved; there are {good}"
        self.resumed = newest

    def finish(self) -> int:
        """Train on to the end; how many steps there were. The names that were killed over are written again."""
        steps = max(step for step, _ in _noted(self.folder, "held-0")) + 2
        assert not (said := self.start(steps, self.resumed)), said
        return steps


def _check(trial: Trial, reference: Path, steps: int) -> None:
    """Whatever a rank held after a step is what it held in the run that nobody killed."""
    for rank in (0, 1):
        expected, noted = dict(_noted(reference, f"held-{rank}")), _noted(trial.folder, f"held-{rank}")
        assert all(expected[step] == digest for step, digest in noted)
        assert noted[-1][0] == steps
    assert _size(trial.folder / "saved") is None, "leftovers of a kill"
    assert sorted(_good(trial.folder, trial.how).values())[-2:] == [steps, steps]


# ---------------------------------------------------------------------------------------------------- forked off a pool


def _forked(pool: Pool, how: Any, layout: str, width: int, folder: Path, *args: Any) -> str:
    """`job` on ranks of a pool; a rank that is left has a second for what it does meanwhile, which must do no harm."""
    try:
        pool.run(2, job, folder, how, layout, width, *args, grace=1)
    except RanksFailedError as error:
        return str(error)
    return ""


def _try(folder: Path, how: Any, start: Callable[..., str], kills: list[tuple[int, ...]]) -> None:
    """Kill as told, and compare the whole with a run that is left alone."""
    trial, shares = Trial(folder / "killed", how, partial(start, folder / "killed")), random.Random(str(how))
    for i, victims in enumerate(kills, start=1):
        trial.kill(victims, shares.random())
        print(f"save_distributed_checkpoint={how}: kill {i} of {len(kills)}, ranks {victims}: {trial.resumed} resumes")
    steps = trial.finish()
    assert not (said := start(folder / "reference", steps, None)), said
    _check(trial, folder / "reference", steps)


@long()
@slow(but=["True-pp2-victims1"])
@pytest.mark.parametrize(("how", "layout", "victims"), [(*mode, ranks) for mode, ranks in zip(MODES, (*VICTIMS, (0,)))])
def test_a_kill_within_a_save_loses_nothing(
    how: Any, layout: str, victims: tuple[int, ...], pool: Pool, tmp_path: Path
) -> None:
    _try(tmp_path, how, partial(_forked, pool, how, layout, 512), [victims])


@slow()
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "layout"), MODES)
def test_twenty_kills_lose_nothing(how: Any, layout: str, pool: Pool, tmp_path: Path) -> None:
    _try(tmp_path, how, partial(_forked, pool, how, layout, 1024), [VICTIMS[i % 3] for i in range(20)])


# -------------------------------------------------------------------------------------- started by Lightning's launcher


def _launched(how: Any, layout: str, width: int, folder: Path, *args: Any) -> str:
    """`job` as a script, of which Lightning starts the second rank."""
    asked = base64.b64encode(pickle.dumps((folder, how, layout, width, *args))).decode()
    env = dict(os.environ, OMP_NUM_THREADS="1")
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "tests.checkpoint.test_kill", asked]
        process = subprocess.Popen(command, env=env, start_new_session=True, stdout=said, stderr=said)
        while process.poll() is None and not (folder / "killed").exists():
            time.sleep(0.05)
        if process.poll() is None:
            time.sleep(0.5)  # what a rank that is left does meanwhile must do no harm
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        return f"{said.read()}\nexit code {process.returncode}" if process.wait() else ""


@slow()
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "layout"), MODES)
def test_kills_of_what_lightning_started_lose_nothing(how: Any, layout: str, tmp_path: Path) -> None:
    _try(tmp_path, how, partial(_launched, how, layout, 1024), VICTIMS)


if __name__ == "__main__":
    job(*pickle.loads(base64.b64decode(sys.argv[1])))
