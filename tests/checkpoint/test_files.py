"""Checkpoint files are whole or not there, whatever happens during a save."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.checkpoint import files
from lightning_par.checkpoint.files import make_checkpoint_io
from tests.helpers.pool import Pool
from tests.helpers.process_memory import anonymous, watched
from tests.helpers.watched_writes import killed_when_written

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(params=NAMESPACES)
def io(request: pytest.FixtureRequest) -> Any:
    return make_checkpoint_io(request.param)


def test_belongs_to_the_namespace() -> None:
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from pytorch_lightning.plugins.io import TorchCheckpointIO as PLTorchCheckpointIO

    assert isinstance(make_checkpoint_io(), TorchCheckpointIO)
    assert isinstance(make_checkpoint_io("pytorch_lightning"), PLTorchCheckpointIO)
    assert not isinstance(make_checkpoint_io(), PLTorchCheckpointIO)


def test_pickles(io: Any) -> None:
    assert type(pickle.loads(pickle.dumps(io))) is type(io)


def test_saves_what_lightning_saves(io: Any, tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"w": torch.randn(3, 4)}, "epoch": 3}
    ours, theirs = tmp_path / "new" / "ours.ckpt", tmp_path / "theirs.ckpt"
    io.save_checkpoint(checkpoint, ours)
    super(type(io), io).save_checkpoint(checkpoint, theirs)
    for loaded in (io.load_checkpoint(ours, weights_only=True), torch.load(ours), io.load_checkpoint(theirs)):
        assert loaded["epoch"] == 3
        assert torch.equal(loaded["state_dict"]["w"], checkpoint["state_dict"]["w"])
    assert os.listdir(ours.parent) == ["ours.ckpt"]
    io.remove_checkpoint(ours)
    assert not ours.exists()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(ours)


def test_storage_options_refused_as_by_lightning(io: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="with `storage_options` arg is not supported"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    assert not os.listdir(tmp_path)


def test_forms_of_path(io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    long = "l" * 255
    for path in ("bare.ckpt", "~/home.ckpt", f"file://{tmp_path}/url.ckpt", "épöque=1.ckpt", long):
        io.save_checkpoint({"path": path}, path)
    assert sorted(os.listdir(tmp_path)) == sorted(["bare.ckpt", "home.ckpt", "url.ckpt", "épöque=1.ckpt", long])


def test_remote_path_goes_through_lightning(io: Any) -> None:
    io.save_checkpoint({"epoch": 1}, "memory://run/a.ckpt")
    assert io.load_checkpoint("memory://run/a.ckpt") == {"epoch": 1}


def test_error_while_pickling_leaves_old_file_alone(io: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    io.save_checkpoint({"epoch": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        io.save_checkpoint({"w": torch.zeros(1000), "fn": lambda: None}, path)
    assert io.load_checkpoint(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def _killed(path: Path, share: float) -> int:
    """How a save ends that is killed when that share of its bytes is written."""
    child = os.fork()
    if child == 0:
        with killed_when_written(path.parent, int(share * 1_200_000)):
            files.save({"step": 2, "w": torch.full((300_000,), 2.0)}, str(path))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_kill_during_save_leaves_a_whole_file(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    files.save({"step": 1}, str(path))
    for share in (0.0, 0.2, 0.6, 1.0):
        assert pool.run(1, _killed, path, share) == [-signal.SIGKILL]
        assert torch.load(path) == {"step": 1}
        (stray,) = {*os.listdir(tmp_path)} - {"a.ckpt"}
        assert re.fullmatch(r"\.a\.ckpt\.[0-9a-f]{16}\.tmp", stray)
    assert pool.run(1, _killed, path, 2.0) == [0]
    loaded = torch.load(path)
    assert loaded["step"] == 2 and (loaded["w"] == 2).all()
    assert os.listdir(tmp_path) == ["a.ckpt"]


def _grown(path: Path) -> int:
    """How many bytes a process takes while it saves 256 MB."""
    checkpoint = {i: torch.ones(4_000_000) for i in range(16)}
    files.save({0: 0}, str(path))
    before = anonymous()
    with watched() as peaks:
        files.save(checkpoint, str(path))
    return peaks["self"] - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_holds_no_second_copy(pool: Pool, tmp_path: Path) -> None:
    (grown,) = pool.run(1, _grown, tmp_path / "a.ckpt")
    assert grown < 64e6, f"saving 256 MB took {grown / 1e6:.0f} MB of memory"
