"""The newest good checkpoint is found, and what is not good is passed over by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lightning_par.checkpoint.files import make_checkpoint_io
from lightning_par.checkpoint.outline import OWN
from lightning_par.resume.newest import newest, with_versions


def write(path: Path, step: int, run: str = "mine", fit: int = 1, age: float = 0.0, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"global_step": step, "optimizer_states": [], "w": torch.ones(500), OWN: {"run": run, "fit": fit}, **more}
    torch.save(content, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def load(path: str) -> dict[str, Any]:
    return make_checkpoint_io().load_checkpoint(path)  # type: ignore[no-any-return]


def test_the_newest_of_this_run_is_taken(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", 1, age=3)
    taken = write(tmp_path / "b.ckpt", 2, age=2)
    write(tmp_path / "other.ckpt", 7, run="another", age=1)
    write(tmp_path / "second fit.ckpt", 8, fit=2)
    torch.save({"global_step": 9, "optimizer_states": []}, tmp_path / "plain.ckpt")  # of plain Lightning
    found = newest([str(tmp_path)], "mine", 1, load)
    assert (found.path, found.step, found.passed_over) == (str(taken), 2, [])
    assert newest([str(tmp_path)], "nobody's", 1, load).path is None
    assert newest([str(tmp_path / "none")], "mine", 1, load).path is None


def test_what_is_torn_is_passed_over_and_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good.ckpt", 1, age=5)
    torn = write(tmp_path / "torn.ckpt", 2)
    torn.write_bytes(torn.read_bytes()[:-900])
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "folder.ckpt").mkdir()
    found = newest([str(tmp_path)], "mine", 1, load)
    assert found.path == str(good)
    assert {os.path.basename(path) for path, _ in found.passed_over} == {"torn.ckpt", "empty.ckpt", "folder.ckpt"}
    assert all(path in why for path, why in found.passed_over)


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.ckpt", 1, age=5)
    slim = write(tmp_path / "slim.ckpt", 2)
    torch.save({key: x for key, x in torch.load(slim).items() if key != "optimizer_states"}, slim)
    assert newest([str(tmp_path)], "mine", 1, load).path == str(whole)


def test_folders_that_a_logger_made_for_earlier_attempts_are_looked_into(tmp_path: Path) -> None:
    logs = tmp_path / "lightning_logs"
    taken = write(logs / "version_0" / "checkpoints" / "step=3.ckpt", 3)
    write(logs / "version_1" / "checkpoints" / "step=9.ckpt", 9, run="another")
    now = logs / "version_2" / "checkpoints"
    assert newest([str(now)], "mine", 1, load).path == str(taken)
    assert with_versions(str(tmp_path)) == [str(tmp_path)]


def test_what_a_kill_left_under_a_hidden_name_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt", 4)
    path.rename(tmp_path / ".last.ckpt.old")
    (tmp_path / ".last.ckpt.0123456789abcdef.tmp").touch()
    found = newest([str(tmp_path)], "mine", 1, load)
    # a file is replaced in one step: only directories are ever left so, which `load` finds by the name they had
    assert found.path is None and [os.path.basename(path) for path, _ in found.passed_over] == ["last.ckpt"]
