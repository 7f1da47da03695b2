"""Checkpoints at URLs: what is saved over one of the same name is killed at every step, and read meanwhile."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_par.checkpoint import consolidate
from lightning_par.checkpoint.directory import Writing
from lightning_par.checkpoint.files import make_checkpoint_io
from lightning_par.checkpoint.inventory import Inventory
from lightning_par.checkpoint.reading import load, load_whole
from lightning_par.mesh.layout import Layout, make_groups
from tests.checkpoint.test_checkpoints import Model, data, quiet, trainer_for
from tests.helpers.differences import differences
from tests.helpers.fsspec_folders import SHELVES, register
from tests.helpers.hostile import in_child
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow


def _remote(layout: str, url: str, folder: Path, how: Any, ckpt_path: str | None = None) -> dict[str, Any]:
    """Resume ``ckpt_path``, or train and save twice; the module's state, and which names there are."""
    register()
    with quiet():
        # Lightning's own takes a file:// URL for a relative path.
        kept = ModelCheckpoint(f"{url.removeprefix('file://')}/kept", "{step}", every_n_train_steps=1, save_top_k=1)
        model = Model().double()
        callbacks = [] if ckpt_path else [kept]
        trainer = trainer_for(layout, folder, distributed=how, max_epochs=2 if ckpt_path else 1, callbacks=callbacks)
        trainer.fit(model, data(), data(), ckpt_path=ckpt_path)
        state = {name: x.clone() for name, x in model.state_dict().items()}
        if ckpt_path is None:
            for _ in range(2):  # the second in the first one's place
                trainer.save_checkpoint(f"{url}/a.ckpt")
            trainer.validate(model, data(), ckpt_path=f"{url}/a.ckpt", verbose=False)
        return state


@long()
@slow(but=["False-shelf"])
@pytest.mark.parametrize("scheme", ["shelf", "file"])
@pytest.mark.parametrize("how", [False, True, "async"])
def test_checkpoints_go_to_urls(how: Any, scheme: str, pool: Pool, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}"
    pool.run(2, _remote, "tp2", url, tmp_path, how)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "kept"], "the first was not replaced, or something is left"
    assert os.listdir(tmp_path / "kept") == ["step=3.ckpt"], "older ones are still there"
    assert (tmp_path / "a.ckpt").is_dir() == bool(how)
    if how:
        assert len(os.listdir(tmp_path / "a.ckpt")) == 4, "files of the first are left"
    if scheme == "shelf":
        resumed = pool.run(2, _remote, "pp2", url, tmp_path, how, f"{url}/a.ckpt")
        assert not differences(resumed[0], pool.run(2, _remote, "tp2", url, tmp_path, how, f"{url}/a.ckpt")[0], 1e-9)
        register()
        with quiet():
            options: dict[str, Any] = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
            trainer = Trainer(plugins=[make_checkpoint_io()], max_epochs=2, default_root_dir=tmp_path, **options)
            trainer.fit(model := Model().double(), data(), data(), ckpt_path=f"{url}/a.ckpt")
        assert not differences(resumed[0], dict(model.state_dict()), 1e-9)


# ------------------------------------------------------------------------------------------ killed at each of its steps


def _content(number: int) -> dict[str, Any]:
    weights = {"a": torch.full((3, 5), float(number)), "b": torch.full((7,), float(number))}
    return {"state_dict": weights, "global_step": number}


def _save(url: str, number: int, content: dict[str, Any] | None = None) -> None:
    """On one rank, whose process group is this save's own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inventory = Inventory(make_groups(Layout(1, 1, 1, 1), timedelta(seconds=30)))
        writing = Writing(url, inventory)
        writing.begin(inventory.complete(_content(number) if content is None else content), [])
        writing.finish()
    finally:
        dist.destroy_process_group()


def _number(url: str) -> int:
    """Which save is there, all of which must be the same one's."""
    found = load_whole(url)
    number: int = found["global_step"]
    assert not differences(_content(number)["state_dict"], dict(found["state_dict"]), 0.0)
    return number


def _kill_before(step: int, kind: Any) -> None:
    """From now on: the process's next steps of these kinds are counted, and it is killed before number ``step``."""
    done = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for owner, name in ((kind, "_open"), (kind, "mv"), (kind, "cp_file"), (kind, "rm"), (LocalFileOpener, "__exit__")):
        setattr(owner, name, counted(getattr(owner, name)))


def _killed(scheme: str, folder: Path) -> list[tuple[int, int, int, int, int]]:
    """For each step at which a save over another is killed: what is there then, and when a next one is killed, too;
    and what one leaves that is not killed, in how many files."""
    register()
    torch.set_num_threads(1)
    found: list[Any] = []
    assert in_child(lambda: _save(f"{scheme}://{folder}/old", 1)) == 0
    while not found or found[-1][0] != 0:
        step = len(found)
        path = folder / f"{step}.ckpt"
        url = f"{scheme}://{path}"
        shutil.copytree(folder / "old", path)
        code = in_child(lambda: _dying(url, 2, step))  # noqa: B023  (is called at once)
        there = _number(url)
        in_child(lambda: _dying(url, 3, step * 7 % 16))  # noqa: B023
        then = _number(url)
        assert in_child(lambda: _save(url, 4)) == 0  # noqa: B023
        found.append((code, there, then, _number(url), len(os.listdir(path))))
    return found


def _dying(url: str, number: int, step: int) -> None:
    _kill_before(step, SHELVES[url.partition(":")[0]])
    _save(url, number)


@long()
@slow(but=["shelf"])
@pytest.mark.parametrize("scheme", SHELVES)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(scheme: str, pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(1, _killed, scheme, tmp_path)
    codes = [code for code, *_ in found]
    assert codes == [-signal.SIGKILL] * (len(found) - 1) + [0] and len(found) > 12
    for i, (_, there, then, last, files) in enumerate(found):
        assert there in (1, 2) and then in (there, 3) and (last, files) == (4, 3), (i, found[i])
    assert [there for _, there, *_ in found] == sorted(there for _, there, *_ in found)
    assert {there for _, there, *_ in found} == {1, 2}


def _read_meanwhile(path: str) -> list[int]:
    """What others read while saves replace one another, each of which must be whole, until some were seen; the last."""
    register()
    torch.set_num_threads(1)
    assert in_child(lambda: _save(path, 0)) == 0
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        numbers = itertools.count(1)
        while not select.select([told], [], [], 0)[0]:  # until its other end is closed
            _save(path, next(numbers))
        os._exit(0)
    found: list[int] = []
    while len({*found}) < 6:
        found.append(_number(path))
    os.close(tell)
    assert os.waitpid(child, 0)[1] == 0
    return [*found, _number(path)]


@slow(but=["", "copying://"])
@pytest.mark.parametrize("scheme", ["", *(f"{name}://" for name in SHELVES)])
def test_who_reads_meanwhile_sees_the_old_or_the_new(scheme: str, pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(1, _read_meanwhile, f"{scheme}{tmp_path}/a.ckpt")
    assert found == sorted(found)
    assert len(os.listdir(tmp_path / "a.ckpt")) == 3 and os.listdir(tmp_path) == ["a.ckpt"]


def _read_late(path: str) -> list[str]:
    register()
    torch.set_num_threads(1)
    assert in_child(lambda: _save(path, 1)) == 0
    early = load(path)["state_dict"]
    assert in_child(lambda: _save(path, 2)) == 0
    with pytest.raises(FileNotFoundError) as caught:
        early["a"].read()
    return [str(caught.value)]


@pytest.mark.parametrize("scheme", ["", "shelf://"])
def test_what_is_read_after_it_was_replaced_is_refused(scheme: str, pool: Pool, tmp_path: Path) -> None:
    ((message,),) = pool.run(1, _read_late, f"{scheme}{tmp_path}/a.ckpt")
    assert "a.ckpt was replaced or removed while it was read. Load it again." in message


def test_all_tools_read_one_at_a_url(pool: Pool, tmp_path: Path) -> None:
    register()
    pool.run(2, _remote, "tp2", url := f"shelf://{tmp_path}", tmp_path, True)
    consolidate.main([f"{url}/a.ckpt", "--output_file", str(tmp_path / "one.ckpt")])
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    dcp_to_torch_save(tmp_path / "a.ckpt", tmp_path / "torch.pt")
    for other in (load(f"{url}/a.ckpt", True), torch.load(tmp_path / "torch.pt", weights_only=True)):
        assert one.keys() == other["state_dict"].keys()
        assert all(torch.equal(x, other["state_dict"][name].clone()) for name, x in one.items())
