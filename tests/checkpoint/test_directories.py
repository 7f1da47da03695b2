"""A checkpoint that is a directory: what reads it, what a Trainer does with it, and what is refused."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from lightning_par.absent.unread import Unread
from lightning_par.checkpoint import consolidate, rename
from lightning_par.checkpoint.files import make_checkpoint_io
from lightning_par.checkpoint.reading import load, load_whole
from tests.checkpoint.test_checkpoints import Choice, Model, data, quiet, trainer_for
from tests.helpers.differences import differences
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]


class Rows(Model):
    """Draws in its step, and trains on batches in a random order."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()).item())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data().dataset, batch_size=4, shuffle=True)


def _fit(layout: str, folder: Path, model: Any = None, how: Any = True, **options: Any) -> Trainer:
    trainer = trainer_for(layout, folder, distributed=how, **options)
    trainer.fit(Model().double() if model is None else model, data(), data())
    return trainer


def _save(layout: str, path: Path, how: Any = True) -> None:
    """In the middle of a run."""

    class Saves(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if not trainer.sanity_checking:
                trainer.save_checkpoint(path)

    with quiet():
        _fit(layout, path.parent, how=how, callbacks=[Saves()])


def named(path: Path) -> dict[str, str]:
    """The names of the files in a directory by what is in them: without the part that no other save has."""
    return dict(
        sorted((".".join(part for part in name.split(".") if len(part) != 16), name) for name in os.listdir(path))
    )


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that two ranks wrote."""
    path = tmp_path_factory.mktemp("directory") / "a.ckpt"
    pool.run(2, _save, "tp2", path)
    return path


# ------------------------------------------------------------------------------------------------------ what reads it


def test_each_rank_writes_its_part(saved: Path) -> None:
    assert [*named(saved)] == FILES
    with open(saved / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    written = {named(saved)[name]: 0 for name in FILES[1:3]}
    for name, stored in metadata.state_dict_metadata.items():
        for chunk in getattr(stored, "chunks", ()):
            at = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            written[at.relative_path] += chunk.sizes.numel() * (name != "state_dict.head.weight")  # tied
    first, second = written.values()
    assert 0.9 < first / second < 1.1
    assert [name for name in os.listdir(saved.parent) if name.startswith(".")] == []


def test_torchs_tools_read_it(saved: Path, tmp_path: Path) -> None:
    whole = load_whole(str(saved))
    dcp_to_torch_save(saved, tmp_path / "file.pt")
    weights = torch.load(tmp_path / "file.pt", weights_only=True)["state_dict"]
    assert weights.keys() == whole["state_dict"].keys()
    assert all(torch.equal(x, weights[name]) for name, x in whole["state_dict"].items())
    model = Model().double()
    optimizer = model.configure_optimizers()["optimizer"]
    state = {"state_dict": model.state_dict(), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(saved), no_dist=True)
    model.load_state_dict(state["state_dict"])
    set_optimizer_state_dict(model, optimizer, state["optimizer_0"])
    assert not differences(dict(whole["state_dict"]), dict(model.state_dict()), 0.0)
    want, got = whole["optimizer_states"][0], optimizer.state_dict()
    assert not differences(want["state"], got["state"], 0.0)
    assert [group["lr"] for group in want["param_groups"]] == [group["lr"] for group in got["param_groups"]]


def test_consolidated_it_is_the_file_of_one_device(saved: Path, pool: Pool, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "a.ckpt")
    consolidate.main([str(tmp_path / "a.ckpt") + "/"])
    pool.run(1, _save, "one", tmp_path / "one.ckpt", False)
    one, file = (torch.load(tmp_path / name) for name in ("one.ckpt", "a.ckpt.consolidated"))
    assert not differences(one, file, 1e-9)
    assert file["state_dict"]["head.weight"].data_ptr() == file["state_dict"]["embedding.weight"].data_ptr()
    assert os.path.getsize(tmp_path / "a.ckpt.consolidated") == os.path.getsize(tmp_path / "one.ckpt")
    Model.load_from_checkpoint(tmp_path / "a.ckpt.consolidated")
    with pytest.raises(ValueError, match="name another file"):
        consolidate.consolidate(tmp_path / "a.ckpt", tmp_path / "a.ckpt")
    with pytest.raises(FileNotFoundError, match="no directory"):
        consolidate.consolidate(tmp_path / "b.ckpt", tmp_path / "c.ckpt")


def test_plain_lightning_resumes_it_with_the_plugin(saved: Path, tmp_path: Path) -> None:
    with quiet():
        options: dict[str, Any] = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
        trainer = Trainer(plugins=[make_checkpoint_io()], max_epochs=2, default_root_dir=tmp_path, **options)
        trainer.fit(model := Model().double(), data(), data(), ckpt_path=saved)
    assert trainer.global_step == 6 and trainer.optimizers[0].state_dict()["state"][0]["step"] == 6
    assert all(type(x) in (nn.Parameter, Tensor) for x in model.state_dict(keep_vars=True).values())


def test_tensors_are_read_when_they_are_used(saved: Path) -> None:
    checkpoint = load(str(saved))
    weights = checkpoint["state_dict"]
    assert all(isinstance(x, Unread) and not x.is_kept for x in weights.values())
    whole = weights["up.weight"].read()
    for dim, indices in ((0, [0, 3, 4, 19]), (1, [7]), (0, []), (1, [*range(8)])):
        index = torch.tensor(indices, dtype=torch.int64)
        assert torch.equal(weights["up.weight"].read_part(dim, index), whole.index_select(dim, index))
    assert weights["head.weight"].memory is weights["embedding.weight"].memory


# ------------------------------------------------------------------------------------------------- what a Trainer does


def _best_and_last(layout: str, folder: Path, how: Any) -> dict[str, Any]:
    with quiet():
        best = ModelCheckpoint(folder, "best-{epoch}", monitor="val_loss", mode="max", save_last="link")
        slim = ModelCheckpoint(folder, "slim-{epoch}", monitor="val_loss", save_weights_only=True, save_top_k=-1)
        every = ModelCheckpoint(folder, "every-{step}", every_n_train_steps=1, save_top_k=1)
        model = Model().double()
        trainer = _fit(layout, folder, model, how, max_epochs=2, callbacks=[best, slim, every])
        last = Path(every.best_model_path)  # other checkpoints hold other paths
        found: dict[str, Any] = dict(best=Path(best.best_model_path).name, last=last.name)
        for ckpt_path in ("best", folder / "slim-epoch=0.ckpt", folder / "last.ckpt"):
            found[f"test {Path(ckpt_path).name}"] = trainer.test(
                model, dataloaders=data(), ckpt_path=ckpt_path, verbose=False
            )[0]["test_loss"]
        found["val"] = trainer.validate(model, data(), ckpt_path=last, verbose=False)[0]["val_loss"]
        trainer = trainer_for(layout, folder, distributed=how, max_epochs=3)
        trainer.fit(model := Model().double(), data(), data(), ckpt_path=last)
        found["steps"] = trainer.global_step
        found["weights"] = {name: x.clone() for name, x in model.state_dict().items()}
        return found


@long()
@slow(but=["tp2-True"])
@pytest.mark.parametrize(("layout", "how"), [("tp2", True), ("pp2", "async")])
def test_a_trainer_treats_directories_as_it_does_files(layout: str, how: Any, pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.run(1, _best_and_last, "one", tmp_path / "one", False)
    for found in pool.run(2, _best_and_last, layout, tmp_path / layout, how):
        assert not differences(one, found, 1e-9)
    names = sorted(os.listdir(tmp_path / layout))
    assert names == sorted(os.listdir(tmp_path / "one")) and all((tmp_path / layout / name).is_dir() for name in names)
    slim = load_whole(str(tmp_path / layout / "slim-epoch=0.ckpt"))
    assert "optimizer_states" not in slim and "callbacks" not in slim and "lightning_par" not in slim


def _draws(layout: str, folder: Path, ckpt_path: Path | None, epochs: int) -> dict[str, Any]:
    with quiet():
        torch.manual_seed(len(str(ckpt_path)))
        trainer = trainer_for(layout, folder, distributed=True, max_epochs=epochs)
        trainer.fit(model := Rows().double(), ckpt_path=ckpt_path)
        if ckpt_path is None and epochs == 1:
            trainer.save_checkpoint(folder / "half.ckpt")
        return {name: x.clone() for name, x in model.state_dict().items()}


@slow("pp2")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_resumed_run_draws_what_one_that_was_not_stopped_draws(layout: str, pool: Pool, tmp_path: Path) -> None:
    whole, _ = pool.run(2, _draws, layout, tmp_path, None, 2)
    pool.run(2, _draws, layout, tmp_path, None, 1)
    resumed, _ = pool.run(2, _draws, layout, tmp_path, tmp_path / "half.ckpt", 2)
    assert not differences(whole, resumed, 0.0)
    other = load_whole(str(tmp_path / "half.ckpt"))
    assert differences(dict(other["state_dict"]), dict(resumed), 1e-3), "nothing was trained"


def _weights_only(layout: str, folder: Path, weights_only: bool | None) -> str:
    with quiet():
        path = folder / "a.ckpt"
        _fit(layout, folder, Model(choice=Choice("x")).double()).save_checkpoint(path)
        try:
            trainer_for(layout, folder, max_epochs=2).fit(
                Model().double(), data(), ckpt_path=path, weights_only=weights_only
            )
        except pickle.UnpicklingError:
            return "refused"
    return "loaded"


@slow("None-refused")
@pytest.mark.parametrize(("weights_only", "outcome"), [(None, "refused"), (False, "loaded")])
def test_weights_only_is_honoured(weights_only: bool | None, outcome: str, pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _weights_only, "tp2", tmp_path, weights_only) == [outcome] * 2


def test_metadata_runs_no_code(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(pickle.UnpicklingError, match="posix.getcwd"):
        load(str(tmp_path / "a"))


def _over(layout: str, folder: Path) -> list[bool]:
    with quiet():
        trainer = _fit(layout, folder)
        kinds = []
        for how in (True, True, False, False, True):
            trainer.strategy.save_distributed_checkpoint = how  # type: ignore[attr-defined]
            trainer.save_checkpoint(folder / "a.ckpt")
            if trainer.global_rank == 1:
                time.sleep(0.3)  # the other one waits with its next save
            trainer.strategy.load_checkpoint(folder / "a.ckpt")
            kinds.append((folder / "a.ckpt").is_dir())
    return kinds


def test_files_and_directories_take_each_others_place(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _over, "tp2", tmp_path) == [[True, True, False, False, True]] * 2
    assert os.listdir(tmp_path) == ["a.ckpt"]


# ----------------------------------------------------------------------------------------------------- what is refused


def _refused(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load(str(path))
    return str(caught.value)


@pytest.mark.parametrize("kind", FILES)
def test_a_directory_that_is_cut_short_is_refused(kind: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "a")
    load(str(tmp_path / "a"))
    name = named(saved)[kind]
    size = os.path.getsize(tmp_path / "a" / name)
    if kind != ".metadata":
        os.truncate(tmp_path / "a" / name, size - 100)
        assert f"cut short: '{name}' has {size - 100} of {size} bytes" in _refused(tmp_path / "a")
    else:
        for left in (0, 1, size // 2, size - 1):
            shutil.copy(saved / name, tmp_path / "a" / name)
            os.truncate(tmp_path / "a" / name, left)
            assert f"cut short: '{name}' ends too early" in _refused(tmp_path / "a")
    os.remove(tmp_path / "a" / name)
    assert f"cut short: '{name}' is missing" in _refused(tmp_path / "a")


def test_a_tensor_that_is_missing_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "a")
    with open(saved / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    lost = next(index for index in metadata.storage_data if index.fqn == "state_dict.up.weight")
    del metadata.storage_data[lost], metadata.state_dict_metadata["optimizer_0.state.down.weight.exp_avg"]
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    message = _refused(tmp_path / "a")
    assert "the tensor 'state_dict.up.weight' is not complete" in message
    assert "the tensor 'optimizer_0.state.down.weight.exp_avg' is missing" in message


def test_what_others_wrote_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    assert "'meta.pt' is missing" in _refused(tmp_path / "a")
    torch.save({"epoch": 1}, tmp_path / "a" / "meta.pt")
    assert "was not written by lightning_par" in _refused(tmp_path / "a")


class Other(Model):
    """A tensor that the directory does not have, one that it has is gone, and one has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.norm = nn.Linear(2, 2), nn.Identity()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(12, 8)


def _unfit(layout: str, path: Path, folder: Path, model: type[Model]) -> tuple[str, int]:
    trainer = trainer_for(layout, folder, max_epochs=2)
    try:
        with quiet():
            trainer.fit(model().double(), data(), ckpt_path=path)
    except (RuntimeError, ValueError) as error:
        return str(error), trainer.global_step
    return "", -1


@slow(but=["sp2", "tp2"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "sp2", "placed"])
def test_a_directory_that_does_not_fit_is_refused_on_all_ranks(
    layout: str, saved: Path, pool: Pool, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "cut")
    os.remove(tmp_path / "cut" / (lost := named(saved)["__1_0.distcp"]))
    for path, model, words in (
        (saved, Other, ["extra.weight", "norm.weight", "up.weight", "torch.Size([20, 8])", "torch.Size([24, 8])"]),
        (tmp_path / "cut", Model, [f"is cut short: '{lost}' is missing"]),
    ):
        for message, steps in pool.run(2, _unfit, layout, path, tmp_path, model):
            assert all(word in message for word in words) and steps == 0


# -------------------------------------------------------------------------------------------------------------- names


def test_a_name_has_the_old_or_the_new_at_every_moment(tmp_path: Path) -> None:
    """Also where names can't be exchanged, a kill in between is found again."""
    for exchange in (True, False):
        path = str(tmp_path / f"a{exchange}")
        for content in ("old", "new"):
            os.mkdir(finished := rename.unfinished(path))
            Path(finished, content).touch()
            with mock.patch.object(rename, "_exchange", rename._exchange if exchange else lambda a, b: False):
                rename.put_in_place(finished, path)
        assert os.listdir(path) == ["new"] and rename.left_behind(path) == path
    os.rename(path, rename.beside(path, ".old"))
    assert rename.left_behind(path) == rename.beside(path, ".old")
