"""That a disk is full is said, with the sizes, on all ranks; what was there stays, and nothing unfinished is left."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy
from lightning_par.checkpoint import disk_space
from lightning_par.checkpoint.consolidate import consolidate
from lightning_par.checkpoint.disk_space import Failure, file_system, refuse_if_full, stored_bytes, writes
from lightning_par.checkpoint.export import export
from lightning_par.checkpoint.files import save
from lightning_par.mesh import host_files
from tests.checkpoint.test_checkpoints import quiet
from tests.checkpoint.test_urls import _save
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

SIZE = 4 << 20  # bytes of the small disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own that is soon full."""
    (folder := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        failure = done.stderr.strip()
    except OSError as error:
        done, failure = None, str(error)
    if done is None or done.returncode:
        pytest.skip(f"no disk can be mounted here, so none is full: {failure}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def not_foreseen() -> Iterator[None]:
    """As on a file system that does not say what it has left, or where others write at the same time."""
    with mock.patch.object(disk_space, "_AS_GIVEN", ()):
        yield


def _message(error: BaseException) -> str:
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC, repr(error)
    return str(error)


# -------------------------------------------------------------------------------------------------------- in a process


def _big() -> dict[str, Any]:
    weight = torch.zeros(1_500_000)  # 6 MB
    return {"state_dict": {"net.a": weight, "net.tied": weight, "net.b": torch.zeros(1000)}, "epoch": 2}


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_file_that_does_not_fit_leaves_the_old_one(foreseen: bool, disk: Path) -> None:
    path = disk / "a.ckpt"
    save({"epoch": 1}, str(path))
    with pytest.raises(OSError) as caught:
        if foreseen:
            with mock.patch("torch.save"):  # nothing is written
                save(_big(), str(path))
        else:
            with not_foreseen():
                save(_big(), str(path))
    message = _message(caught.value)
    assert f"No space left: 6.0 MB were to be written, and the disk has 4.2 MB free: '{path}'" in message
    assert os.listdir(disk) == ["a.ckpt"] and torch.load(path) == {"epoch": 1}
    save({"epoch": 2}, str(path))
    assert torch.load(path) == {"epoch": 2}


@pytest.mark.parametrize("left", [0, 100, 1000])
def test_the_last_bytes_that_do_not_fit_are_an_error(left: int, disk: Path) -> None:
    """Whatever is being written then: the tensors, the archive's end, what waits in a buffer."""
    with not_foreseen(), pytest.raises(OSError) as caught:
        save({"a": torch.zeros(SIZE - left, dtype=torch.uint8)}, str(disk / "a.ckpt"))
    _message(caught.value)
    assert os.listdir(disk) == []


def test_what_pickle_writes_is_counted(disk: Path) -> None:
    with pytest.raises(OSError, match=r"No space left: 6\.\d MB were to be written"):
        save({"a": b"x" * 6_000_000}, str(disk / "a.ckpt"))


def test_an_export_that_does_not_fit_leaves_nothing(disk: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    save(_big(), str(tmp_path / "big.ckpt"))
    for folder in (disk / "new", disk / "kept"):
        (disk / "kept").mkdir(exist_ok=True)
        (disk / "kept" / "config.txt").write_text("mine")
        with pytest.raises(OSError, match=r"No space left: 6\.0 MB were .*has 4\.2 MB free"):
            export(tmp_path / "big.ckpt", folder)
        for size in ("50GB", "2MB"):
            with not_foreseen(), pytest.raises(OSError) as caught:
                export(tmp_path / "big.ckpt", folder, max_shard_size=size)
            assert f"6.0 MB were to be written, and the disk has 4.2 MB free: '{folder}'" in _message(caught.value)
        assert not (disk / "new").exists() and os.listdir(disk / "kept") == ["config.txt"]


def test_a_consolidated_file_that_does_not_fit_leaves_nothing(pool: Pool, disk: Path, tmp_path: Path) -> None:
    pool.run(1, _save, str(tmp_path / "a.ckpt"), 1, {**_big(), "global_step": 1})
    for context in (mock.MagicMock(), not_foreseen()):
        with context, pytest.raises(OSError) as caught:
            consolidate(tmp_path / "a.ckpt", disk / "b.ckpt")
        assert "6.0 MB were to be written" in _message(caught.value) and os.listdir(disk) == []


def test_ranks_of_a_host_do_without_files_that_do_not_fit(disk: Path) -> None:
    assert host_files._reserve(str(disk / "a"), 1 << 20) and not host_files._reserve(str(disk / "b"), SIZE)
    assert os.listdir(disk) == ["a"], "what is of no use takes room"


def _limited(path: Path) -> tuple[int | None, str]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            save(_big(), str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return caught.value.errno, str(caught.value)


def test_a_limit_of_a_file_is_told_from_a_full_disk(pool: Pool, tmp_path: Path) -> None:
    """Where no disk can be mounted, this is the one that is full."""
    save({"epoch": 1}, str(path := tmp_path / "a.ckpt"))
    ((number, message),) = pool.run(1, _limited, path)
    assert number == errno.EFBIG and "6.0 MB were to be written" in message and "(`ulimit -f`)" in message
    assert os.listdir(tmp_path) == ["a.ckpt"] and torch.load(path) == {"epoch": 1}


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writes(str(tmp_path / "a")) as file:
        file.write(b"x")
        raise KeyError("a")
    with pytest.raises(FileExistsError), writes(str(tmp_path / "a")):
        pass
    assert type(Failure.of(OSError(errno.EACCES, "no")).error("x: ")) is RuntimeError
    told = Failure.of(ValueError("a"), OSError(errno.EDQUOT, "b"), names=["Rank 0: ", "Rank 1: "]).error("It failed. ")
    assert isinstance(told, OSError) and told.errno == errno.EDQUOT
    assert "It failed. Rank 0: ValueError: a; Rank 1: OSError: [Errno" in str(told)


def test_only_file_systems_that_are_known_are_asked(tmp_path: Path) -> None:
    """On others a file may take less than its bytes."""
    with mock.patch.object(disk_space, "_AS_GIVEN", (file_system(str(tmp_path)),)):
        with pytest.raises(OSError, match=r"1000000\.0 GB were"):
            refuse_if_full(str(tmp_path / "not" / "there" / "a.ckpt"), 1e15)
        refuse_if_full(str(tmp_path / "a.ckpt"), 1e3)
    with not_foreseen():
        refuse_if_full(str(tmp_path / "a.ckpt"), 1e15)


def test_stored_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    state = {
        **_big(),
        "view": torch.zeros(1000)[:10],
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.zeros(9, device="meta"),
    }
    torch.save(state, tmp_path / "a")
    assert stored_bytes(state) == 6_000_000 + 2 * 4000 < os.path.getsize(tmp_path / "a") < 6_000_000 + 20_000


# ------------------------------------------------------------------------------------------------------ on all ranks


class Wide(LightningModule):
    """A checkpoint of 5.8 MB, of which each of two ranks has about half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.act, self.down = nn.Linear(246, 984), nn.ReLU(), nn.Linear(984, 246)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.down(self.act(self.up(batch))) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def _full(layout: str, path: Path, how: Any, foreseen: bool, limited: int | None) -> tuple[int | None, str, int]:
    """The number and the message of what a fit raises that saves in its first step, and the step at which it does.

    ``limited`` is a rank of whose process files may not be large, in place of a disk that is full."""
    kind = {"tp2": TensorParallelStrategy, "pp2": PipelineParallelStrategy}[layout]
    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=kind(save_distributed_checkpoint=how), max_steps=4,
        callbacks=[Saves(path)], default_root_dir=path.parent, **options,
    )  # fmt: skip
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with quiet(), mock.patch.object(disk_space, "_AS_GIVEN", disk_space._AS_GIVEN if foreseen else ()):
        if trainer.global_rank == limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            trainer.fit(Wide(), DataLoader(torch.randn(16, 246), batch_size=4))  # type: ignore[arg-type]
        except (OSError, RuntimeError) as error:
            return getattr(error, "errno", None), str(error), trainer.global_step
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return 0, "", trainer.global_step


@slow(but=["tp2-False-False", "tp2-True-True", "pp2-async-False"])
@pytest.mark.parametrize("foreseen", [True, False])
@pytest.mark.parametrize("how", [False, True, "async"])
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_all_ranks_hear_that_the_disk_is_full(layout: str, how: Any, foreseen: bool, pool: Pool, disk: Path) -> None:
    save({"epoch": 1}, str(path := disk / "a.ckpt"))
    found = pool.run(2, _full, layout, path, how, foreseen, None)
    for number, message, step in found:
        assert number == errno.ENOSPC and "No space left: " in message and str(path) in message, message
        assert "MB were to be written" in message and "MB free" in message
        assert foreseen or how or message.count("5.8 MB") == 1
        assert step <= (4 if how == "async" else 1)
    assert os.listdir(disk) == ["a.ckpt"] and torch.load(path) == {"epoch": 1}


@pytest.mark.parametrize(("how", "rank"), [(False, 0), (True, 1)])
def test_all_ranks_hear_that_one_can_not_write(how: Any, rank: int, pool: Pool, tmp_path: Path) -> None:
    save({"epoch": 1}, str(path := tmp_path / "a.ckpt"))
    for number, message, _ in pool.run(2, _full, "tp2", path, how, True, rank):
        assert number == errno.EFBIG and "(`ulimit -f`)" in message and (not how or f"Rank {rank}: " in message)
    assert os.listdir(tmp_path) == ["a.ckpt"] and torch.load(path) == {"epoch": 1}
