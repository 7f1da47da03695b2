"""Directories that are written while training goes on, and what can go wrong while one is written."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_par.checkpoint.directory import Writing
from lightning_par.checkpoint.reading import load_whole
from tests.checkpoint.test_checkpoints import Model, data, load, quiet, trainer_for
from tests.helpers.differences import differences
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

PARTS = ["state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"]


class Slow(Callback):
    """Holds up what is written until training has gone on for two steps; and asks for a removal meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.go_on = folder, threading.Event()
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy: Any = trainer.strategy
        path = self.folder / "a.ckpt"
        if trainer.global_step == 1:
            strategy.save_distributed_checkpoint = False
            trainer.save_checkpoint(self.folder / "same.ckpt")
            trainer.save_checkpoint(self.folder / "old.ckpt")
            strategy.save_distributed_checkpoint = "async"
            finish, go_on = Writing.finish, self.go_on

            def late(writing: Any, *args: Any) -> None:
                go_on.wait()
                finish(writing, *args)

            with mock.patch.object(Writing, "finish", late):
                trainer.save_checkpoint(path)
            strategy.remove_checkpoint(self.folder / "old.ckpt")
        if trainer.global_step == 3:
            self.seen = [path.exists(), (self.folder / "old.ckpt").exists()]
            strategy.barrier()
            self.go_on.set()


def _async(layout: str, folder: Path) -> tuple[list[Any], bool]:
    with quiet():
        slow = Slow(folder)
        trainer_for(layout, folder, distributed="async", callbacks=[slow]).fit(Model().double(), data(), data())
        return slow.seen, (folder / "a.ckpt").exists()


@slow("pp2", "sp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2", "sp2"])
def test_what_is_saved_is_the_state_of_the_call_though_training_goes_on(
    layout: str, pool: Pool, tmp_path: Path
) -> None:
    for seen, waited in pool.run(2, _async, layout, tmp_path):
        assert seen == [False, True], "neither is it there yet, nor is the one before removed"
        assert waited, "fit did not wait"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "same.ckpt"]
    saved, same = load_whole(str(tmp_path / "a.ckpt")), load(tmp_path / "same.ckpt")
    for part in PARTS:
        assert not differences(same[part], saved[part], 0.0), "it changed while it was written"


class Often(Callback):
    """Saves after every step: how many saves ran at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at_a_time, self.most = folder, 0, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def _often(layout: str, folder: Path) -> tuple[int, int]:
    running, most, finish, lock = 0, 0, Writing.finish, threading.Lock()

    def counted(writing: Any, *args: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.05)
        finish(writing, *args)
        with lock:
            running -= 1

    with quiet(), mock.patch.object(Writing, "finish", counted):
        trainer_for(layout, folder, distributed="async", callbacks=[Often(folder)]).fit(Model().double(), data())
    return most, running


def test_a_save_waits_for_the_one_before(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _often, "tp2", tmp_path) == [(1, 0)] * 2
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt", "3.ckpt"]
    assert [load_whole(str(tmp_path / f"{i}.ckpt"))["global_step"] for i in (1, 2, 3)] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------------ what goes wrong


def _fails(layout: str, folder: Path, how: Any, rank: int) -> list[str]:
    def broken(*args: Any) -> None:
        raise OSError("the disk is full")

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            strategy: Any = trainer.strategy
            if trainer.global_step == 1:
                trainer.save_checkpoint(folder / "a.ckpt")  # at once
                strategy.save_distributed_checkpoint = how
            if trainer.global_step == 2:
                patch.start()
                trainer.save_checkpoint(folder / "a.ckpt")

    messages = []
    patch = mock.patch("lightning_par.checkpoint.dcp_writer._write", broken)
    with quiet():
        trainer = trainer_for(layout, folder, distributed=True, callbacks=[Saves()])
        if trainer.global_rank != rank:
            patch = mock.patch("os.getcwdb")
        try:
            trainer.fit(Model().double(), data())
        except RuntimeError as error:
            messages = [str(error), str(trainer.global_step)]
        finally:
            mock.patch.stopall()
    return messages


@slow("async-3-1", "True-2-0", "True-2-1")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("how", "steps"), [(True, "2"), ("async", "3")])
def test_a_rank_that_can_not_write_is_heard_by_all(how: Any, steps: str, rank: int, pool: Pool, tmp_path: Path) -> None:
    for message, ended in pool.run(2, _fails, "tp2", tmp_path, how, rank):
        assert message == f"The checkpoint {tmp_path}/a.ckpt could not be saved. Rank {rank}: OSError: the disk is full"
        assert ended == steps
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert load_whole(str(tmp_path / "a.ckpt"))["global_step"] == 1
