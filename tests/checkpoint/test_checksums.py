"""Tensors of a checkpoint that changed since they were written are found, and named, by whatever reads them."""

from __future__ import annotations

import pickle
import random
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_par.checkpoint import checked_together, checksums, verify
from lightning_par.checkpoint.checksums import Part, records, tensor_names
from lightning_par.checkpoint.files import make_checkpoint_io, save
from lightning_par.checkpoint.metadata import parsed
from lightning_par.checkpoint.reading import load_whole
from tests.checkpoint.test_checkpoints import Model, data, quiet, trainer_for
from tests.checkpoint.test_urls import _save
from tests.helpers import hostile
from tests.helpers.differences import differences
from tests.helpers.fsspec_folders import register
from tests.helpers.pool import Pool
from tests.helpers.slow import slow


def _flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def _places(path: Path) -> dict[str, tuple[Path, int]]:
    """Where the bytes of tensors begin, by name: of a file, or of a directory."""
    if path.is_file():
        with open(path, "rb") as file:
            return {name: (path, start) for start, names in tensor_names(file).items() for name in names}
    found = {}
    for index, place in parsed((path / ".metadata").read_bytes()).storage_data.items():  # type: ignore[union-attr]
        with open(path / place.relative_path, "rb") as file:
            for record in records(Part(file, place.offset, place.length)):
                if record.is_tensor:
                    found.setdefault(index.fqn, (path / place.relative_path, place.offset + record.start))
    return found


# ------------------------------------------------------------------------------------------------------------ a file


def _content() -> dict[str, Any]:
    torch.manual_seed(0)
    weights = {"a": torch.randn(300, 5), "b": torch.arange(7), "none": torch.ones(0), "part": torch.randn(90)[10:20]}
    weights["tied"] = weights["a"]
    return {"state_dict": weights, "optimizer_states": [{"state": {0: {"m": torch.randn(400)}}}], "epoch": 1}


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path, io = tmp_path / "a.ckpt", make_checkpoint_io()
    save(_content(), str(path))
    good, places = path.read_bytes(), _places(path)
    assert not differences(_content(), io.load_checkpoint(path), 0.0)
    for name in ("state_dict.a", "state_dict.b", "state_dict.part", "optimizer_states.0.state.0.m"):
        path.write_bytes(good)
        _flip(path, places[name][1] + 3)
        for read in (io.load_checkpoint, lambda path: io.load_checkpoint(f"shelf://{path}")):
            register()
            with pytest.raises(RuntimeError) as caught:
                read(path)
            assert f"a.ckpt is damaged: the tensor {name!r}" in str(caught.value)
            assert "Load an older checkpoint" in str(caught.value)
        assert torch.load(path)["epoch"] == 1, "torch does not look, so what would find it is ours"


def test_many_damaged_tensors_are_counted(tmp_path: Path) -> None:
    save({f"w{i}": torch.ones(100) for i in range(9)}, str(path := tmp_path / "a.ckpt"))
    for _, start in _places(path).values():
        _flip(path, start)
    with pytest.raises(RuntimeError, match="'w0', .*'w4' and 4 more changed"):
        make_checkpoint_io().load_checkpoint(path)
    assert verify.verify(str(path)).damaged == tuple(f"the tensor 'w{i}'" for i in range(9))


def test_what_has_no_checksums_is_read(tmp_path: Path) -> None:
    path, io = tmp_path / "a.ckpt", make_checkpoint_io()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(_content(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert not differences(_content(), io.load_checkpoint(path), 0.0)
    assert verify.main([str(path)]) == 2
    torch.save(_content(), path, _use_new_zipfile_serialization=False)
    assert not differences(_content(), io.load_checkpoint(path), 0.0)
    assert verify.main([str(path)]) == 2


def test_what_is_read_as_a_stream_is_not_read_again(tmp_path: Path) -> None:
    save(_content(), str(path := tmp_path / "a.ckpt"))
    with open(path, "rb") as file:
        torch.load(part := Part(file), weights_only=True)  # type: ignore[arg-type]
        done = file.tell()
        with mock.patch.object(checksums, "_PIECE", 0):  # nothing could be
            again = [record for record in records(part) if record.problem and record.nbytes]
    assert done and [record.name for record in again] == []


def test_a_share_has_each_record_once(tmp_path: Path) -> None:
    save({f"w{i}": torch.ones(10 * 4**i) for i in range(5)}, str(path := tmp_path / "a.ckpt"))
    with open(path, "rb") as file:
        names = [record.name for record in records(file)]
        shares = [[record.name for record in records(file, (i, 3))] for i in range(3)]
    assert sorted(sum(shares, [])) == sorted(names) and len(shares[0]) == 1, "the largest is one's whole share"


# ------------------------------------------------------------------------------------------------------ on all ranks


def _resumes(layout: str, path: Path, folder: Path) -> tuple[str, int]:
    """What is raised, and how many records this rank has looked at."""
    looked = 0

    def counted(part: Part, *args: Any) -> Any:
        nonlocal looked
        looked += 1
        return problem(part, *args)

    problem = checksums._problem
    with quiet(), mock.patch.object(checksums, "_problem", counted):
        try:
            trainer_for(layout, folder, max_epochs=2).fit(Model().double(), data(), ckpt_path=path)
        except (RuntimeError, ValueError) as error:
            return str(error), looked
    return "", looked


def _saves(layout: str, path: Path, how: Any) -> None:
    with quiet():
        trainer = trainer_for(layout, path.parent, distributed=how)
        trainer.fit(Model().double(), data(), data())
        trainer.save_checkpoint(path)


@slow(but=["tp2"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "sp2", "placed"])
def test_all_ranks_refuse_a_damaged_file(layout: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _saves, layout, path := tmp_path / "a.ckpt", False)
    with open(path, "rb") as file:
        count = len([*records(file)])
    found = pool.run(2, _resumes, layout, path, tmp_path)
    assert [message for message, _ in found] == ["", ""]
    assert sum(looked for _, looked in found) == count, "each looks at all, or none at some"
    _flip(*_places(path)["state_dict.up.weight"])
    for message, _ in pool.run(2, _resumes, layout, path, tmp_path):
        assert "a.ckpt is damaged: the tensor 'state_dict.up.weight' changed" in message


def _reads_alone(path: Path) -> list[Any]:
    """As the user's code may, on one rank, while the others go on."""
    looked: list[Any] = []

    class Reads(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            with mock.patch.object(checked_together, "refuse_damaged", lambda *args, **share: looked.append(share)):
                if trainer.global_rank == 0:
                    trainer.strategy.load_checkpoint(path)

    with quiet():
        trainer_for("tp2", path.parent, callbacks=[Reads()]).fit(Model().double(), data())
    return looked


def test_one_rank_may_look_at_a_file_alone(pool: Pool, tmp_path: Path) -> None:
    save(_content(), str(tmp_path / "a.ckpt"))
    assert pool.run(2, _reads_alone, tmp_path / "a.ckpt") == [[{}], []]


# -------------------------------------------------------------------------------------------------------- directories


def test_a_damaged_box_is_found_and_named(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _saves, "tp2", path := tmp_path / "a.ckpt", True)
    whole, places = load_whole(str(path)), _places(path)
    assert verify.main([str(path)]) == 0
    for name in ("state_dict.up.weight", "optimizer_0.state.down.weight.exp_avg", "state_dict.norm.bias"):
        file, start = places[name]
        good = file.read_bytes()
        _flip(file, start + 9, 6)
        with pytest.raises(ValueError, match=f"damaged: the tensor '{name}' in '{file.name}' changed since"):
            load_whole(str(path))
        assert verify.verify(str(path)).damaged == (f"the tensor {name!r} in {file.name!r}",)
        file.write_bytes(good)
    assert not differences(whole, load_whole(str(path)), 0.0)
    ((file, start),) = (places[name] for name in ["state_dict.embedding.weight"])
    _flip(file, start)
    refused = [message for message, _ in pool.run(2, _resumes, "tp2", path, tmp_path) if message]
    assert refused and all("'state_dict.embedding.weight'" in message for message in refused)


# ---------------------------------------------------------------------------------------------------- any bit of any


def _made(path: Path) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    save(state, str(path / "a.ckpt"))
    _save(str(path / "folder.ckpt"), 7, state)


@pytest.fixture(scope="module")
def true(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pool.run(1, _made, path := tmp_path_factory.mktemp("true"))
    return path


def _flipped(true: Path, folder: Path, seed: int) -> str:
    """What is wrong with how a checkpoint is read of which one bit was flipped, wherever it is."""
    draw, path = random.Random(seed), folder / f"{seed}.ckpt"
    file: Path
    if draw.random() < 0.4:
        shutil.copy(true / "a.ckpt", path)
        file, read, good = path, make_checkpoint_io().load_checkpoint, true / "a.ckpt"
    else:
        shutil.copytree(true / "folder.ckpt", path)
        file = draw.choice(sorted(path.iterdir()))
        read, good = (lambda path: load_whole(str(path))), true / "folder.ckpt"
    _flip(file, draw.randrange(file.stat().st_size), draw.randrange(8))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, wanted = read(path), read(good)
    except (pickle.UnpicklingError, ValueError, RuntimeError, OSError) as error:
        return "" if path.name in str(error) else f"{type(error).__name__} names no file: {error}"
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return "; ".join(differences(wanted, found, 0.0))


def _many(true: Path, folder: Path, seeds: range) -> dict[int, str]:
    return {seed: wrong for seed in seeds if (wrong := _flipped(true, folder, seed))}


def test_no_flipped_bit_is_read_as_a_value(true: Path, pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, _many, true, tmp_path, range(120)) == [{}]


def _each_bit(folder: Path, start: int, stop: int) -> dict[tuple[int, int], str]:
    """What is read in place of two tensors, by the byte and the bit that are flipped."""
    torch.set_num_threads(1)
    content = {"a": torch.arange(1, 6.0), "b": torch.arange(2, 7.0)}
    save(content, str(path := folder / f"{start}.ckpt"))
    good, wrong = path.read_bytes(), {}
    for at in range(start, min(stop, len(good))):
        for bit in range(8):
            path.write_bytes(good)
            _flip(path, at, bit)
            for place in (str(path), f"shelf://{path}"):  # mapped, and as a stream
                with warnings.catch_warnings(), suppress(pickle.UnpicklingError, ValueError, RuntimeError, OSError):
                    warnings.simplefilter("ignore")
                    if found := differences(content, make_checkpoint_io().load_checkpoint(place), 0.0):
                        wrong[at, bit] = f"{place}: {found}"
    return wrong


def _each_bit_of_the_end(folder: Path) -> Any:
    register()
    save({"a": torch.arange(1, 6.0), "b": torch.arange(2, 7.0)}, str(path := folder / "a.ckpt"))
    size = path.stat().st_size
    return _each_bit(folder, path.read_bytes().index(b"PK\x01\x02"), size)


@slow()
def test_no_flipped_bit_of_an_index_is_read_as_a_value(pool: Pool, tmp_path: Path) -> None:
    """What says where records are: torch takes its word."""
    assert pool.run(1, _each_bit_of_the_end, tmp_path) == [{}]


def test_a_record_that_torch_would_skip_is_damaged(tmp_path: Path) -> None:
    """It takes it for a folder's, and the tensor has what was in memory."""
    save({"a": torch.ones(5)}, str(path := tmp_path / "a.ckpt"))
    line = path.read_bytes().rindex(b"/data/0")  # of the index, which has the name last
    line = path.read_bytes().rindex(b"PK\x01\x02", 0, line)
    _flip(path, line + 38, 4)  # its attributes
    with pytest.raises(RuntimeError, match="damaged: the tensor 'a'"):
        make_checkpoint_io().load_checkpoint(path)


@slow()
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", range(4))
def test_none_of_many_flipped_bits_is_read_as_a_value(block: int, true: Path, pool: Pool, tmp_path: Path) -> None:
    seeds = range(1000 + block * 2500, 3500 + block * 2500)
    assert pool.run(1, _many, true, tmp_path, seeds, timeout=900) == [{}]


# -------------------------------------------------------------------------------------------------------- the command


def test_the_command_says_what_is_whole(true: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register()
    file, folder = true / "a.ckpt", true / "folder.ckpt"
    assert verify.main([str(file), str(folder), f"shelf://{file}", f"shelf://{folder}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines[2:]] == [line.partition(": ")[2] for line in lines[:2]]
    assert lines[0].startswith(f"{file}: ok (8 tensors, ") and lines[1].startswith(f"{folder}: ok (8 tensors, ")
    shutil.copy(file, bad := tmp_path / "bad.ckpt")
    _flip(*_places(bad)["state_dict.bias"])
    assert verify.main([str(file), str(bad), str(tmp_path / "none.ckpt")]) == 1
    out = capsys.readouterr().out
    assert "7 tensors" in out and "\n  the tensor 'state_dict.bias'\n" in out and "no such file" in out
    assert verify.main([str(file), str(tmp_path / "none.ckpt")]) == 2
    (tmp_path / "text").write_text("no checkpoint at all")
    assert verify.main([str(tmp_path / "text")]) == 2
    shutil.copytree(folder, cut := tmp_path / "cut.ckpt")
    (lost := next(cut.glob("__0*"))).unlink()
    assert verify.verify(str(cut)).damaged == (f"{lost.name!r} is missing",)


def test_the_command_reads_what_torch_wrote(tmp_path: Path) -> None:
    state = {"a": torch.randn(30), "b": [torch.ones(2), 3]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    assert verify.verify(str(tmp_path / "a")).tensors >= 1 and verify.main([str(tmp_path / "a")]) == 0
    file, start = _places(tmp_path / "a")["a"]
    _flip(file, start)
    assert verify.main([str(tmp_path / "a")]) == 1


def test_the_command_runs_no_code(true: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = tmp_path / "ran"
    monkeypatch.setenv(hostile.CANARY, str(canary))
    for body in list(hostile.routes(str(canary)).values())[::5]:
        content = hostile.rezipped((true / "a.ckpt").read_bytes(), lambda x: hostile.spliced(x, body, random.Random(1)))  # noqa: B023
        (path := tmp_path / "a.ckpt").write_bytes(content)
        verify.verify(str(path))
        _flip(path, len(content) // 2)  # names are looked for
        verify.verify(str(path))
        assert not canary.exists()
