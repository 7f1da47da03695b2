"""No file of a checkpoint runs code, crashes or hangs whoever reads it, and no link leads a save elsewhere."""

from __future__ import annotations

import datetime
import http.server
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tarfile
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_par.checkpoint import consolidate, generator_states, rename
from lightning_par.checkpoint.directory import Writing
from lightning_par.checkpoint.files import make_checkpoint_io, save
from lightning_par.checkpoint.folder import REST, Folder
from lightning_par.checkpoint.metadata import parsed
from lightning_par.checkpoint.reading import load, load_whole
from tests.checkpoint.test_urls import _save
from tests.helpers import hostile
from tests.helpers.fsspec_folders import register
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

REFUSALS = (pickle.UnpicklingError, ValueError, RuntimeError)


def _made(path: Path) -> None:
    """A file, one in torch's old format, and a directory."""
    torch.set_num_threads(1)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    save(state, str(path / "a.ckpt"))
    torch.save(state, path / "old.ckpt", _use_new_zipfile_serialization=False)
    _save(str(path / "folder.ckpt"), 7)


@pytest.fixture(scope="module")
def true(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that are as they should be."""
    path = tmp_path_factory.mktemp("true")
    pool.run(1, _made, path)
    return path


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("canary") / "ran"
    hostile.in_extensions()
    with mock.patch.dict(os.environ, {hostile.CANARY: str(path)}):
        yield path


def named(folder: Path) -> dict[str, Path]:
    """The files of a directory by what is in them."""
    return {path.name.strip("_.").split(".")[0].split("_")[0]: path for path in sorted(folder.iterdir())}


def _refused(read: Callable[[], Any], name: str, canary: Path) -> str:
    with warnings.catch_warnings(), pytest.raises(REFUSALS) as caught:
        warnings.simplefilter("ignore")
        read()
    assert not canary.exists(), "code has run"
    assert name in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ nothing runs code


def test_what_is_hostile_is_armed(canary: Path) -> None:
    for name, body in hostile.routes(str(canary)).items():
        pickled = hostile.whole(body, 2 if name == "Python 2's name" else 4)
        assert hostile.armed(pickled), f"{name} does nothing, so it shows nothing"


def test_metadata_runs_no_code(true: Path, canary: Path, tmp_path: Path) -> None:
    shutil.copytree(true / "folder.ckpt", path := tmp_path / "a.ckpt")
    metadata, draw = path / ".metadata", random.Random(0)
    good = metadata.read_bytes()
    register()
    for name, body in (hostile.routes(str(canary)) | hostile.NEEDS_A_READER).items():
        hidden = hostile.spliced(good, body, draw)
        assert name not in ("global", "dotted to a class") or hostile.armed(hidden), name
        for content in (hostile.whole(body, 2), hostile.whole(body, 4), hidden):
            metadata.write_bytes(content)
            weights_only = draw.choice((None, True, False))
            _refused(lambda: load(str(path), weights_only), "a.ckpt", canary)  # noqa: B023
        _refused(lambda: consolidate.consolidate(path, tmp_path / "b.ckpt", False), "a.ckpt", canary)
        Folder.at(f"shelf://{path}").tidy()  # as a save there does
        assert not canary.exists() and metadata.read_bytes() == content


def test_a_name_must_be_on_the_list_of_classes(true: Path, tmp_path: Path) -> None:
    shutil.copytree(true / "folder.ckpt", path := tmp_path / "a.ckpt")
    for module, name in (
        (hostile.METADATA, "Metadata.__init__"),
        (hostile.METADATA, "Any"),
        (hostile.METADATA, "torch"),
        ("torch.distributed.checkpoint", "metadata.Metadata"),
        ("torch.distributed.checkpoint", "Metadata"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("torch", "load"),
        ("torch", "serialization.load"),
        ("builtins", "eval"),
        ("builtins.getattr", ""),
        ("pathlib", "Path.unlink"),
    ):
        (path / ".metadata").write_bytes(hostile.whole(hostile.found_late(module, name), 4))
        with pytest.raises(pickle.UnpicklingError, match=f"a.ckpt is refused: '.metadata' holds {module}.{name}, "):
            load(str(path))


def _torch_files(true: bytes, body: bytes, draw: random.Random, folder: Path) -> Iterator[tuple[str, bytes]]:
    """What `torch.load` may be given: in all its formats."""
    yield "zip", hostile.rezipped(true, lambda _: hostile.whole(body, 2))
    yield "spliced", hostile.rezipped(true, lambda content: hostile.spliced(content, body, draw))
    pickled = hostile.whole(body, 2)
    parts = [pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}, [])]
    for i in range(len(parts)):
        yield f"old format, part {i}", b"".join([*parts[:i], pickled, *parts[i + 1 :]])
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("storages", "tensors", "pickle"):
            (folder / name).write_bytes(pickled)
            tar.add(folder / name, name)
    yield "tar", (folder / "tar").read_bytes()
    torch.jit.save(torch.jit.script(nn.ReLU()), folder / "script")
    yield "script", hostile.rezipped((folder / "script").read_bytes(), lambda _: pickled)


def test_files_run_no_code(true: Path, canary: Path, tmp_path: Path) -> None:
    io, path, draw = make_checkpoint_io(), tmp_path / "b.ckpt", random.Random(1)
    shutil.copytree(true / "folder.ckpt", folder := tmp_path / "a.ckpt")
    rest = named(folder)["meta"]
    good = rest.read_bytes()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data[REST].length = 0  # whatever is in it is read
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for name, body in (hostile.routes(str(canary)) | hostile.NEEDS_A_READER).items():
        formats = _torch_files(good, body, draw, tmp_path / "parts")
        for kind, content in formats if name in ("global", "getattr", "obj", "ext1") else islice(formats, 2):
            path.write_bytes(content)
            rest.write_bytes(content)
            for weights_only in (None, True):
                message = _refused(lambda: io.load_checkpoint(path, weights_only=weights_only), "b.ckpt", canary)  # noqa: B023
                assert message.replace(str(path), str(rest)) == _refused(
                    lambda: load_whole(str(folder), weights_only),  # noqa: B023
                    rest.name,
                    canary,
                ), (name, kind)


def test_tensors_of_a_directory_run_no_code(true: Path, canary: Path, tmp_path: Path) -> None:
    shutil.copytree(true / "folder.ckpt", folder := tmp_path / "a.ckpt")
    tensors, draw = named(folder)["0"], random.Random(2)
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    good = tensors.read_bytes()
    for index, stored in metadata.storage_data.items():
        if index.fqn == "state_dict.a":
            first = good[stored.offset : stored.offset + stored.length]
            place = stored
    for body in hostile.routes(str(canary)).values():
        content = hostile.rezipped(first, lambda content: hostile.spliced(content, body, draw))  # noqa: B023
        tensors.write_bytes(good + content)
        place.offset, place.length = len(good), len(content)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        for weights_only in (None, True, False):
            found = load(str(folder), weights_only)["state_dict"]["a"]
            assert tensors.name in _refused(found.read, "a.ckpt", canary)


def test_files_from_the_net_run_code_only_where_the_user_says_so(
    true: Path, canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))  # where downloads go
    served = tmp_path / "served"
    served.mkdir()
    shutil.copy(true / "a.ckpt", served / "good.ckpt")
    body = hostile.routes(str(canary))["global"]
    hidden = hostile.rezipped((true / "a.ckpt").read_bytes(), lambda x: hostile.spliced(x, body, random.Random(3)))
    (served / "bad.ckpt").write_bytes(hidden)
    handler = partial(type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(served))) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, io = f"http://127.0.0.1:{server.server_port}", make_checkpoint_io()
        assert io.load_checkpoint(f"{url}/good.ckpt")["epoch"] == 1
        for weights_only in (None, True):
            message = _refused(lambda: io.load_checkpoint(f"{url}/bad.ckpt", weights_only=weights_only), url, canary)  # noqa: B023
            assert "mkdir" in message and "weights_only=False" in message
        with pytest.raises(FileNotFoundError):
            io.load_checkpoint(f"{url}/none.ckpt")
        assert hostile.in_child(lambda: io.load_checkpoint(f"{url}/bad.ckpt", weights_only=False)) == 0
        assert canary.exists()
        canary.rmdir()
        server.shutdown()


# -------------------------------------------------------------------------------------------- what may be in a file


class Settings:
    """Hyperparameters of a class of the user's."""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_plain_data_needs_no_word_of_the_user(kind: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _loads_plain_data, kind, tmp_path)


def _loads_plain_data(kind: str, folder: Path) -> None:
    io, path = make_checkpoint_io(), folder / "a.ckpt"
    plain = {
        "hyper_parameters": {
            "root": Path("data") / "x",
            "sizes": (1, 2.5, None, True, 1j, b"x"),
            "dtype": torch.float32,
        },
        "callbacks": {"a": OrderedDict(best=torch.tensor(1.0)), "b": Counter("ab"), "c": {1, 2}},
        "optimizer_states": [{"state": {0: {"step": 3, "shape": torch.Size([2]), "device": torch.device("cpu")}}}],
        "state_dict": {"a": torch.arange(3.0)},
    }

    def write(checkpoint: dict[str, Any]) -> None:
        io.save_checkpoint(checkpoint, path) if kind == "file" else _save(str(path), 1, checkpoint)

    write(plain)
    for weights_only in (None, True):
        found = io.load_checkpoint(path, weights_only=weights_only)
        assert str(found) == str(plain) and type(found["hyper_parameters"]["root"]) is type(Path())
    known = set(torch.serialization.get_safe_globals())
    write(plain | {"hyper_parameters": {"settings": Settings(), "more": datetime.timedelta(1)}})
    with pytest.raises(pickle.UnpicklingError) as caught:
        io.load_checkpoint(path)
    for word in (
        "a.ckpt",
        f"{__name__}.Settings",
        "datetime.timedelta",
        "trainer.fit(..., ckpt_path=..., weights_only=False)",
    ):
        assert word in str(caught.value)
    assert set(torch.serialization.get_safe_globals()) == known
    assert type(io.load_checkpoint(path, weights_only=False)["hyper_parameters"]["settings"]) is Settings
    with torch.serialization.safe_globals([Settings, type(Path())]):
        write(plain | {"hyper_parameters": {"settings": Settings()}})
        io.load_checkpoint(path)
        assert type(Path()) in torch.serialization.get_safe_globals(), "what the user has allowed is forgotten"


# ----------------------------------------------------------------------------------------------- what is damaged


def _damaged(true: Path, folder: Path, seed: int) -> str:
    """What is wrong with how a damaged checkpoint is read; nothing if it is an error that names it."""
    draw, path = random.Random(seed), folder / f"{seed}.ckpt"
    kind = draw.choice(("a", "old", "metadata", "0", "meta"))
    if kind in ("a", "old"):
        shutil.copy(true / f"{kind}.ckpt", path)
        file, read = path, partial(make_checkpoint_io().load_checkpoint, path)
    else:
        shutil.copytree(true / "folder.ckpt", path)
        file, read = named(path)[kind], partial(load_whole, str(path))
    content, change = file.read_bytes(), partial(hostile.damaged, draw=draw)
    zipped = kind in ("a", "meta") and draw.random() < 0.6
    file.write_bytes(hostile.rezipped(content, change) if zipped else change(content))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except MemoryError:
        return ""
    except (*REFUSALS, OSError) as error:
        return "" if path.name in str(error) else f"{kind}: {type(error).__name__} names no file: {error}"
    except BaseException as error:
        return f"{kind}: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return ""


def _many(true: Path, folder: Path, seeds: range) -> dict[int, str]:
    """What is wrong, by seed, in processes of which each may die."""
    wrong: dict[int, str] = {}
    seed = seeds.start
    while seed < seeds.stop:
        note = folder / f"note-{seed}"
        code = hostile.in_child(partial(_note, true, folder, range(seed, seeds.stop), note))
        lines = note.read_text(errors="replace").splitlines()
        wrong |= {seed + i: line for i, line in enumerate(lines) if line}
        if code != 0:
            wrong[seed + len(lines)] = f"the process ended with {code}"
        seed += len(lines) + 1
    return wrong


def _note(true: Path, folder: Path, seeds: range, note: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    with open(note, "w", buffering=1, errors="replace") as file:
        for seed in seeds:
            signal.alarm(30)  # a hang is a death, too
            print(_damaged(true, folder, seed).replace("\n", " "), file=file)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_is_damaged_is_an_error_that_names_it(true: Path, pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, _many, true, tmp_path, range(200)) == [{}]


def test_damaged_metadata_is_read_or_an_error(true: Path) -> None:
    good, outcomes = (true / "folder.ckpt" / ".metadata").read_bytes(), Counter[str]()
    for seed in range(2000):
        content = hostile.damaged(good, random.Random(seed))
        try:
            outcomes[type(parsed(content)).__name__] += 1
        except (EOFError, pickle.UnpicklingError, ValueError) as error:
            outcomes[type(error).__name__] += 1
    assert min(outcomes[kind] for kind in ("Metadata", "EOFError", "UnpicklingError", "ValueError")) > 20


@slow()
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(4))
def test_much_that_is_damaged_is_an_error_that_names_it(block: int, true: Path, pool: Pool, tmp_path: Path) -> None:
    seeds = range(1000 + block * 10_000, 11_000 + block * 10_000)
    assert pool.run(1, _many, true, tmp_path, seeds, timeout=1700) == [{}]


def test_boxes_must_fill_their_tensor(true: Path, tmp_path: Path) -> None:
    """What no box has would be whatever is in memory."""
    shutil.copytree(true / "folder.ckpt", path := tmp_path / "a.ckpt")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["state_dict.a"]
    (index,) = (index for index in metadata.storage_data if index.fqn == "state_dict.a")

    kind = type(stored.chunks[0])

    def message(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
        stored.chunks = [kind(torch.Size(at), torch.Size(size)) for at, size in boxes]
        places = {type(index)("state_dict.a", at): metadata.storage_data[index] for at, _ in boxes}
        (path / ".metadata").write_bytes(pickle.dumps(type(metadata)(
            metadata.state_dict_metadata, storage_data=metadata.storage_data | places
        )))  # fmt: skip
        with pytest.raises(ValueError) as caught:
            load(str(path))
        return str(caught.value)

    for boxes in (
        [((0, 0), (2, 5)), ((1, 0), (1, 5))],
        [((0, 0), (2, 5)), ((0, 0), (1, 5))],
        [((0, 0), (3, 4))],
        [((1, 0), (2, 5)), ((2, 0), (1, 5))],
        [((0, 0), (1, 5)), ((1, 0), (2, 4)), ((0, 4), (1, 1)), ((0, 0), (1, 1))],
        [],
    ):
        assert "the tensor 'state_dict.a' is not complete" in message(*boxes)
    for boxes in ([((0, 0), (4, 5))], [((3, 0), (3, 5))], [((0,), (3,))]):
        assert "a.ckpt" in message(*boxes) and "a box is not in its tensor" in message(*boxes)


def test_generators_do_not_stand_outside_their_state() -> None:
    """Numpy reads the memory there."""
    good = generator_states.saved_state()
    for at in (-1, 625, 1 << 40):
        state = good | {"numpy": [*good["numpy"][:2], at, *good["numpy"][3:]]}
        with pytest.raises(ValueError, match="numpy's generator"):
            generator_states.load_state(state)
    generator_states.load_state(good)


def _by_value(member: Any, protocol: Any) -> Any:
    return type(member), (member.value,)


def _by_name(member: Any, protocol: Any) -> Any:
    return getattr, (type(member), member.name)


def test_metadata_of_other_pythons_is_read(true: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11.0 to 3.11.3 write an enum's member as an attribute of its class, others by its value."""
    content = (true / "folder.ckpt" / ".metadata").read_bytes()
    metadata, written = pickle.loads(content), []
    enum = vars(sys.modules[type(metadata).__module__])["_MEM_FORMAT_ENCODING"]
    for reduce in (_by_value, _by_name):
        monkeypatch.setattr(enum, "__reduce_ex__", reduce)
        written.append(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL))
    assert [b"getattr" in each for each in written] == [False, True]
    assert all(pickle.loads(each) == metadata and parsed(each) == parsed(content) for each in written)


# ------------------------------------------------------------------------------------------------------------- links


def _saves(kind: str, path: Path) -> None:
    if kind == "file":
        save({"epoch": 1}, str(path))
    else:
        _save(str(path), 1)


def _with_links(kind: str, folder: Path) -> None:
    """A link, and whatever else a kill or someone else has left, is neither followed nor in the way."""
    path, victim = folder / "a.ckpt", folder / "victim"
    target = victim / "inner" if kind == "file" else victim
    victim.mkdir()
    (victim / "inner").write_text("precious")
    names = [f".a.ckpt.{digit * 16}.tmp" for digit in "0123"]
    for name in (names[0], ".a.ckpt.tmp"):
        (folder / name).symlink_to(target)
    (folder / names[1]).write_text("of a kill")
    (folder / names[2]).mkdir()
    (folder / names[2] / "x").write_text("of a kill")
    (folder / names[3]).symlink_to(folder / "nowhere")
    (folder / ".a.ckpt.mine.tmp").write_text("mine")
    _saves(kind, path)
    assert sorted(os.listdir(folder)) == [".a.ckpt.mine.tmp", "a.ckpt", "victim"]
    assert not path.is_symlink() and make_checkpoint_io().load_checkpoint(path)
    before = _content(path)

    def planted(wanted: str) -> str:
        """As if the name had been guessed."""
        os.symlink(target, name := unguessed(wanted))
        return name

    unguessed = rename.unfinished
    with mock.patch.object(rename, "unfinished", planted), pytest.raises((FileExistsError, RuntimeError)):
        _saves(kind, path)
    assert (victim / "inner").read_text() == "precious" and os.listdir(victim) == ["inner"]
    assert _content(path) == before


def _content(path: Path) -> list[bytes]:
    return [x.read_bytes() for x in sorted(path.iterdir())] if path.is_dir() else [path.read_bytes()]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_no_link_leads_a_save_elsewhere(kind: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _with_links, kind, tmp_path)


def _with_inner_links(folder: Path) -> str:
    """A link in the folder that is being written, under a name that can be known."""
    victim = folder / "victim"
    victim.write_text("precious")
    made = Writing._make_folder

    def planted(writing: Writing) -> None:
        made(writing)
        os.symlink(victim, os.path.join(writing.folder.place, ".metadata.tmp"))

    with mock.patch.object(Writing, "_make_folder", planted), pytest.raises(RuntimeError) as caught:
        _save(str(folder / "a.ckpt"), 1)
    assert victim.read_text() == "precious" and os.listdir(folder) == ["victim"]
    return str(caught.value)


def test_no_link_in_the_folder_is_followed(pool: Pool, tmp_path: Path) -> None:
    (message,) = pool.run(1, _with_inner_links, tmp_path)
    assert "a.ckpt could not be saved" in message and "File exists" in message
