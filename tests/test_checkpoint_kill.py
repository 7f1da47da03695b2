"""A kill at any moment of a save loses nothing: the last good checkpoint resumes, bit by bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
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
from lightning_par.checkpoint.folder import METADATA, files_of
from lightning_par.checkpoint.metadata import parsed
from lightning_par.checkpoint.reading import load_whole
from lightning_par.pipeline.elsewhere import is_elsewhere
from lightning_par.pipeline.structure import tensors_in
from lightning_par.view import leaf
from tests.pool import Pool, RanksFailedError
from tests.shelf import register
from tests.test_checkpoints import load, quiet

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
    parts = [leaf(x).detach() for x in state if not is_elsewhere(x)]
    return hash(tuple(int(x.contiguous().view(torch.int32).sum(dtype=torch.int64)) for x in parts))


def job(folder: Path, how: Any, layout: str, width: int, steps: int, ckpt_path: str | None) -> None:
    """Train from ``ckpt_path``; save after each step under a new name, and under one that has the step before."""
    register()
    at_url, how = how == "url", True if how == "url" else how
    callbacks: list[Callback] = [Journal(folder / "journal")]
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
        start: starts `job` with the last two arguments: a `Forked` or a `Launched` one.
    """

    def __init__(self, folder: Path, how: Any, start: Callable[[int, str | None], Any]) -> None:
        self.folder, self.how, self.start = folder, how, start
        self.resumed: str | None = None

    def kill(self, victims: tuple[int, ...], share: float) -> None:
        """Let a job save once, then kill it within a save; what is there must be whole, and nothing is lost."""
        saved = len(_noted(self.folder, "saved-0"))
        running = self.start(STEPS, self.resumed)
        try:
            while len(_noted(self.folder, "saved-0")) <= saved + 1:
                assert not running.poll(), "the job failed before the kill"
                time.sleep(0.005)
            self._kill(victims, share, running.poll)
        except BaseException:
            running.stop()
            raise
        running.end()
        good = _good(self.folder, self.how)
        done = _noted(self.folder, "saved-0")[-1][0]
        newest = max(good, key=lambda path: good[path])
        assert good[newest] >= done - (self.how == "async"), f"step {done} was saved; there are {good}"
        self.resumed = newest

    def _kill(self, victims: tuple[int, ...], share: float, gone: Callable[[], bool]) -> None:
        full = None
        while full is None:  # a directory is exchanged now and then
            with contextlib.suppress(FileNotFoundError):
                full = _bytes(self.folder / "saved" / "last.ckpt")
        while (size := _size(self.folder / "saved")) is None or size < share * full:
            assert not gone(), "the job ended before the kill"
        for rank in victims:
            os.kill(_noted(self.folder, f"pid-{rank}")[-1][1], signal.SIGKILL)

    def finish(self) -> int:
        """Train on to the end; how many steps there were. The names that were killed over are written again."""
        steps = max(step for step, _ in _noted(self.folder, "held-0")) + 2
        self.start(steps, self.resumed).join()
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


class Forked:
    """`job` on ranks of a pool."""

    def __init__(self, pool: Pool, *args: Any) -> None:
        self.error: RanksFailedError | None = None
        self.pool = pool
        self.thread = threading.Thread(target=self._run, args=args, daemon=True)
        self.thread.start()

    def _run(self, *args: Any) -> None:
        try:
            self.pool.run(2, job, *args, grace=1)
        except RanksFailedError as error:
            self.error = error

    def poll(self) -> bool:
        return not self.thread.is_alive()

    def stop(self) -> None:
        self.pool.restart()
        self.thread.join()

    def end(self) -> None:
        self.thread.join()
        assert self.error is not None

    def join(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


def _try(folder: Path, how: Any, start: Callable[..., Any], kills: list[tuple[int, ...]]) -> None:
    """Kill as told, at random moments, and compare the whole with a run that is left alone."""
    trial = Trial(folder / "killed", how, partial(start, folder / "killed"))
    for i, victims in enumerate(kills, start=1):
        trial.kill(victims, random.random())
        print(f"save_distributed_checkpoint={how}: kill {i} of {len(kills)}, ranks {victims}: {trial.resumed} resumes")
    steps = trial.finish()
    start(folder / "reference", steps, None).join()
    _check(trial, folder / "reference", steps)


def _forked(pool: Pool, how: Any, layout: str, width: int) -> Callable[..., Forked]:
    return lambda folder, *args: Forked(pool, folder, how, layout, width, *args)


@pytest.mark.parametrize(("how", "layout", "victims"), [(*mode, ranks) for mode, ranks in zip(MODES, (*VICTIMS, (0,)))])
def test_a_kill_within_a_save_loses_nothing(
    how: Any, layout: str, victims: tuple[int, ...], pool: Pool, tmp_path: Path
) -> None:
    _try(tmp_path, how, _forked(pool, how, layout, 512), [victims])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "layout"), MODES)
def test_twenty_kills_lose_nothing(how: Any, layout: str, pool: Pool, tmp_path: Path) -> None:
    _try(tmp_path, how, _forked(pool, how, layout, 1024), [VICTIMS[i % 3] for i in range(20)])


# -------------------------------------------------------------------------------------- started by Lightning's launcher


class Launched:
    """`job` as a script, of which Lightning starts the second rank."""

    def __init__(self, *args: Any) -> None:
        command = [sys.executable, "-m", "tests.test_checkpoint_kill", *map(str, args)]
        env = dict(os.environ, OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)

    def poll(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> None:
        time.sleep(0.5)  # what a rank that is left does meanwhile must do no harm
        self.stop()
        assert self.process.returncode != 0

    def join(self) -> None:
        _, said = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "layout"), MODES)
def test_kills_of_what_lightning_started_lose_nothing(how: Any, layout: str, tmp_path: Path) -> None:
    _try(tmp_path, how, lambda folder, *args: Launched(folder, how, layout, 1024, *args), VICTIMS)


if __name__ == "__main__":
    given, mode, name, size, count, path = sys.argv[1:]
    made: Any = {"False": False, "True": True}.get(mode, mode)
    job(Path(given), made, name, int(size), int(count), None if path == "None" else path)
